from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inferscope.errors import InferScopeError
from inferscope.records import CLOSED, CounterSample, ProbeHealth
from inferscope.ring.discovery import find_engines, sampler_rings
from inferscope.ring.reader import RingReader
from inferscope.sampler.privilege import become
from tests.children import child
from tests.cli.running import inferscope
from tests.daemon.other_user import open_folder
from tests.probe.fakes import of

DROP = """
import os, sys
from inferscope.sampler.privilege import become
print(become(int(sys.argv[1]), keeps_counters=sys.argv[2] == "counters"))
status = open("/proc/self/status").read().splitlines()
wanted = ("CapEff:", "CapPrm:", "NoNewPrivs:")
print(os.getuid(), os.geteuid(), os.getgroups(), *(line.split()[1] for line in status
      if line.startswith(wanted)))
"""
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(*options: str) -> subprocess.Popen[str]:
            words = [sys.executable, "-m", "inferscope", "sampler", *options]
            environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_RING_MB": "1"}
            started = child(words, env=environment, stderr=subprocess.PIPE, text=True)
            return stack.enter_context(started)

        yield begin


def until(is_so: Callable[[], object], *, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def samples_of(folder: Path) -> list[CounterSample]:
    return [one for path in sampler_rings(folder) for one in of(CounterSample, path)]


def test_a_sampler_has_a_private_ring_and_writes_a_shutdown_record(
    start: Start, tmp_path: Path
) -> None:
    sampler = start("--counters", "host")
    until(lambda: any(one.facts for one in samples_of(tmp_path)))
    (path,) = sampler_rings(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert find_engines(tmp_path) == []
    sampler.send_signal(signal.SIGTERM)
    assert sampler.wait(30) == 0
    assert of(ProbeHealth, path)[-1].state == CLOSED
    reader = RingReader(path)
    assert reader.heartbeat_ns() == 0
    reader.close()


@pytest.mark.thorough
def test_second_sampler_names_the_first_and_takes_over_when_it_exits(
    start: Start, tmp_path: Path
) -> None:
    first = start("--counters", "host")
    until(lambda: any(one.facts for one in samples_of(tmp_path)))
    second = start("--counters", "host")
    until(lambda: any(one.reason for one in samples_of(tmp_path)))
    (refused,) = [one for one in samples_of(tmp_path) if one.reason]
    assert refused.reason == (
        f"process {first.pid} samples host already; this sampler takes over when it exits."
    )
    first.kill()
    until(lambda: len([one for one in samples_of(tmp_path) if one.facts]) == 2)
    assert second.stderr is not None
    lines = []
    for line in second.stderr:
        lines.append(line)
        if "host: available again" in line:
            break
    assert f"host: process {first.pid} samples host already" in "".join(lines[:-1])
    assert "host: available again" in lines[-1]


def test_a_sampler_ends_with_the_process_that_it_is_beside(start: Start, tmp_path: Path) -> None:
    with child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as companion:
        sampler = start("--counters", "host", "--beside", str(companion.pid))
        until(lambda: any(one.facts for one in samples_of(tmp_path)))
        assert sampler.poll() is None
    assert sampler.wait(60) == 0


def test_one_reading_states_what_there_is_and_why_not_the_rest(tmp_path: Path) -> None:
    done = inferscope(
        "sampler", "--once", "--json", "--counters", "host,dcgm",
        "--dcgm-url", "http://127.0.0.1:1/metrics", rings=tmp_path / "none",
    )  # fmt: skip
    assert done.returncode == 0
    found = {row["source"]: row for row in json.loads(done.stdout)["sources"]}
    assert set(found) == {"host", "dcgm", "pm"}
    assert found["host"]["reason"] == ""
    assert found["host"]["devices"][0]["facts"]["cores"]
    assert found["dcgm"]["reason"].startswith("no dcgm-exporter answers")
    assert "--counters pm" in found["pm"]["reason"]
    assert not (tmp_path / "none").exists()
    text = inferscope("sampler", "--once", "--counters", "host", rings=tmp_path).stdout
    assert text.startswith("ok  host")


@pytest.mark.parametrize(
    "options", [["--counters", "tea"], ["--interval", "5"], ["--interval", "0ms"]], ids=" ".join
)
def test_what_is_no_source_and_no_time_is_refused(options: list[str], tmp_path: Path) -> None:
    assert inferscope("sampler", *options, rings=tmp_path).returncode == 2


def test_an_engine_that_does_not_run_is_not_sampled_for(tmp_path: Path) -> None:
    done = inferscope("sampler", "--for", "absent", rings=tmp_path)
    assert done.returncode == 1
    assert "no engine absent runs" in done.stderr


PERFMON, SYS_ADMIN = "cap_perfmon", "cap_sys_admin"
BIT = {SYS_ADMIN: 1 << 21, PERFMON: 1 << 38}


@is_root
@pytest.mark.parametrize(
    ("given", "keeps", "kept"),
    [
        ((PERFMON, SYS_ADMIN), "counters", PERFMON),
        ((SYS_ADMIN,), "counters", SYS_ADMIN),  # as containers have it, and kernels before 5.8
        ((PERFMON,), "counters", PERFMON),
        ((), "counters", None),
        ((PERFMON, SYS_ADMIN), "nothing", None),
    ],
)
def test_root_becomes_the_rings_owner_and_keeps_one_right_at_most(
    given: tuple[str, ...], keeps: str, kept: str | None
) -> None:
    dropped = [name for name in BIT if name not in given]
    command = [sys.executable, "-c", DROP, "12345", keeps]
    if dropped:
        bounds = ",".join(f"-{name.removeprefix('cap_')}" for name in dropped)
        command = ["setpriv", f"--bounding-set={bounds}", "--", *command]
    if not can_start_with(given, dropped):
        pytest.skip("this root cannot have, or give up, these capabilities (setpriv)")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line, facts = done.stdout.splitlines()
    rights = "without capabilities" if kept is None else f"with {kept.upper()} only"
    assert line == f"switched to uid 12345, {rights}"
    uid, euid, groups, permitted, effective, no_new = facts.split()
    assert (uid, euid, groups, no_new) == ("12345", "12345", "[]", "1")
    assert int(permitted, 16) == int(effective, 16) == (0 if kept is None else BIT[kept])


def can_start_with(given: tuple[str, ...], dropped: list[str]) -> bool:
    """Return whether a child of this process can have these capabilities and not those."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    bounding = int(status.partition("CapBnd:")[2].split()[0], 16)
    permitted = int(status.partition("CapPrm:")[2].split()[0], 16)
    has_all = all(bounding & permitted & BIT[name] for name in given)
    return has_all and (not dropped or shutil.which("setpriv") is not None)


@is_root
def test_roots_ring_belongs_to_the_owner_of_the_folder(start: Start) -> None:
    with open_folder() as folder:
        home = folder / "rings"
        home.mkdir(mode=0o700)
        os.chown(home, 12345, 12345)
        sampler = start("--counters", "host", "--dir", str(home))
        until(lambda: sampler_rings(home))
        (path,) = sampler_rings(home)
        assert path.stat().st_uid == path.parent.stat().st_uid == 12345
        status = Path(f"/proc/{sampler.pid}/status").read_text(encoding="ascii")
        assert "Uid:\t12345\t12345\t12345" in status
        sampler.terminate()
        assert "switched to uid 12345, without capabilities" in sampler.communicate()[1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can become anybody")
def test_only_root_can_sample_for_others() -> None:
    assert become(os.geteuid(), keeps_counters=True) == ""
    with pytest.raises(InferScopeError, match="or as root"):
        become(os.geteuid() + 1, keeps_counters=False)
