from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.records import COUNTERS
from inferscope.sampler import processes
from inferscope.sampler.claims import HOST, Claims, NoClaims
from inferscope.sampler.host import LOOK_NS, HostSource
from inferscope.sampler.processes import Observed, holders, observed
from inferscope.sampler.source import Unavailable
from tests.children import child

ENGINE = """
import sys, time
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "test"))
print("up", flush=True)
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print(time.process_time(), flush=True)
probe.close()
"""


class Engine:
    """A process with a ring, which burns processor time on command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.line() == "up"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def burn(self, seconds: float) -> float:
        """Use this much CPU time; return the process's total."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self.line())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with child(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_RING_MB": "0.25"},
    ) as process:
        yield Engine(process)


def test_an_engines_processor_time_and_memory_are_those_of_the_kernel(
    engine: Engine, tmp_path: Path
) -> None:
    source = HostSource(tmp_path, NoClaims(), period_ns=100_000_000)
    (opened,) = source.open(time.monotonic_ns())
    assert int(opened.facts["cores"]) >= 1
    before = engine.burn(0.0)
    assert source.read(time.monotonic_ns()) == []
    after = engine.burn(0.2)
    start_ns = time.monotonic_ns()
    (one,) = source.read(start_ns)
    assert one.end_ns == start_ns
    assert one.values["pid"] == engine.process.pid
    assert one.values["cpu_ns"] >= (after - before) * 1e9 * 0.99
    assert one.values["cpu_ns"] <= (one.end_ns - one.start_ns) * (os.cpu_count() or 1)
    assert 4 << 20 < one.values["rss_bytes"] < 1 << 30
    assert one.values.keys() <= COUNTERS.keys()


def test_a_process_that_ended_is_forgotten(engine: Engine, tmp_path: Path) -> None:
    source = HostSource(tmp_path, NoClaims(), period_ns=1)
    now_ns = time.monotonic_ns()
    source.open(now_ns)
    source.read(now_ns)
    assert len(source.read(now_ns + 1)) == 1
    engine.process.kill()
    engine.process.wait()
    assert source.read(now_ns + 2) == []
    assert source.read(now_ns + LOOK_NS + 3) == []


def test_one_sampler_reports_a_host(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.take(HOST)
    with pytest.raises(Unavailable, match="samples host already"):
        HostSource(tmp_path, Claims(tmp_path), period_ns=1).open(0)
    claims.close()


def test_a_rings_lock_names_its_writer_whatever_number_it_goes_by(
    engine: Engine, tmp_path: Path
) -> None:
    (found,) = observed(tmp_path, time.monotonic_ns())
    assert found.pid == found.own_pid == engine.process.pid
    (ring,) = tmp_path.glob("**/*.ring")
    assert processes._holder(processes._lock_holders(), ring.stat()) == engine.process.pid


def test_an_engines_children_are_the_engines() -> None:
    with child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        engines = [Observed(os.getppid(), 1, "e")]
        found = holders([started.pid, 4_000_000], engines, sees_host=True)
        assert (found.ours, found.foreign) == ({started.pid}, {4_000_000})
        without_engines = holders([started.pid], [], sees_host=True)
        assert without_engines.foreign == {started.pid}


def test_within_a_container_numbers_mean_nothing_until_one_is_ours() -> None:
    me = Observed(os.getppid(), 1, "e")
    lost = holders([4_000_000], [me], sees_host=False)
    assert (lost.foreign, lost.unknown) == (frozenset(), {4_000_000})
    met = holders([4_000_000, me.pid], [me], sees_host=False)
    assert (met.ours, met.foreign, met.unknown) == ({me.pid}, frozenset(), {4_000_000})
