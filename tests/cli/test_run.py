"""`run` changes nothing about a command but that it is observed, and reports when it cannot be."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import inferscope
from inferscope.daemon.lock import LOCK_NAME
from inferscope.records import CLOSED, CounterSample, ProbeHealth
from inferscope.ring.discovery import find_engines, sampler_rings
from tests.children import child
from tests.cli.namesake import unpack
from tests.cli.running import ANY_PORT
from tests.cli.running import inferscope as run_inferscope
from tests.probe.fakes import of

ROOT = str(Path(inferscope.__file__).parents[1])
SAY_ENVIRONMENT = """
import os, sys
print(os.environ["INFERSCOPE"], os.environ["INFERSCOPE_ENGINE_ID"], *sys.argv[1:])
sys.exit(7)
"""
ENGINE = """
import signal, sys, time
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "toy"))
index = probe.queued("one", prompt_tokens=3)
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.3)
probe.finished(index, "stop")
probe.close()
print("got", *[int(number) for number in got], flush=True)
sys.exit(3)
"""

UNTIL_COLLECTED = f"""
import os, pathlib, time
folder = pathlib.Path(os.environ["INFERSCOPE_DIR"]) / f".collector-{{os.geteuid()}}"
lock = folder / "{LOCK_NAME}"
until = time.monotonic() + 60
while not (lock.exists() and lock.read_text()):
    assert time.monotonic() < until, "no collector has come"
    time.sleep(0.05)
time.sleep(0.5)
print("over")
"""

UNTIL_SAMPLED = """
import os, time
from inferscope.probe import EngineInfo, Probe
from inferscope.records import CounterSample
from inferscope.ring.discovery import sampler_rings
from inferscope.ring.reader import Frame, RingReader
probe = Probe.open(EngineInfo(0, "toy"))
until = time.monotonic() + 60
def num_samples():
    num = 0
    for path in sampler_rings():
        reader = RingReader(path)
        num += sum(frame.code == CounterSample.CODE for frame in reader.read())
        reader.close()
    return num
while num_samples() < 8 and time.monotonic() < until:
    time.sleep(0.05)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("sampled")
probe.close()
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def script(folder: Path, text: str, name: str = "program.py") -> list[str]:
    (folder / name).write_text(text)
    return [sys.executable, str(folder / name)]


def run(*arguments: str, rings: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_inferscope("run", *arguments, rings=rings, PYTHONPATH=ROOT, **environment)


@contextlib.contextmanager
def running(
    *arguments: str, rings: Path, terminal: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run in the background, on a terminal of its own where one is given; leave nothing behind."""

    def take_terminal() -> None:
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    with child(
        [sys.executable, "-m", "inferscope", "run", *arguments],
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERSCOPE_DIR": str(rings), "PYTHONPATH": ROOT},
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as process:
        yield process


@pytest.mark.thorough
def test_the_command_has_its_arguments_output_and_exit_code(tmp_path: Path) -> None:
    words = script(tmp_path, SAY_ENVIRONMENT)
    first = run("--", *words, "--record", "-x", rings=tmp_path)
    second = run(*words, rings=tmp_path)
    assert (first.returncode, second.returncode) == (7, 7)
    is_on, engine_id, *arguments = first.stdout.split()
    assert is_on == "1"
    assert arguments == ["--record", "-x"]
    assert engine_id != second.stdout.split()[1]
    assert f"inferscope attach {engine_id}" in first.stderr


def test_whatever_the_command_starts_is_of_the_same_engine(tmp_path: Path) -> None:
    child = "import os; print(os.environ['INFERSCOPE_ENGINE_ID'])"
    words = script(
        tmp_path,
        "import os, subprocess, sys\nprint(os.environ['INFERSCOPE_ENGINE_ID'], flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])",
    )
    first, second = run("--", *words, rings=tmp_path).stdout.split()
    assert first == second


def test_a_plain_program_gets_the_import_hook_beside_its_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys\nsys.was_customised = True\n")
    words = script(
        tmp_path,
        "import sys\nprint(sys.was_customised, 'inferscope.adapters.inject' in sys.modules)",
    )
    path = os.pathsep.join([str(tmp_path / "own"), ROOT])
    done = run_inferscope("run", "--", *words, rings=tmp_path, PYTHONPATH=path)
    assert done.stdout == "True True\n"
    forbidden = run_inferscope(
        "run", "--", *words, rings=tmp_path, PYTHONPATH=path, INFERSCOPE_INJECT="0"
    )
    assert forbidden.stdout == "True False\n"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["python", "shebang", "env", "long"])
def test_the_error_for_a_python_without_inferscope_names_the_install_command(
    tmp_path: Path, kind: str
) -> None:
    # Named as an interpreter; isolated, without site-packages, it sees the standard library alone.
    bare = executable(tmp_path / "python3", f'#!/bin/sh\nexec "{sys.executable}" -IS "$@"\n')
    heads = {
        "python": "",
        "shebang": f"#!{bare}\n",
        "env": "#!/usr/bin/env -S python3 -u\n",
        "long": f"#!/bin/sh\n'''exec' \"{bare}\" \"$0\" \"$@\"\n' '''\n",
    }
    program = executable(tmp_path / "program", heads[kind] + "print('it ran')\n")
    words = [str(bare), str(program)] if kind == "python" else [str(program)]
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    refused = run("--", *words, rings=tmp_path, PATH=search)
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.endswith(f"Install it there with: {bare} -m pip install inferscope-llm")
    if kind != "shebang":  # the kernel does not run a script as an interpreter
        allowed = run("--unobserved", "--", *words, rings=tmp_path, PATH=search)
        assert allowed.stdout == "it ran\n"
        assert "not observed" in allowed.stderr


@pytest.mark.parametrize("has_ours", [False, True])
def test_the_package_of_another_project_is_named_with_the_lines_that_replace_it(
    tmp_path: Path, has_ours: bool
) -> None:
    site = unpack(tmp_path / "site", over=Path(ROOT) / "inferscope" if has_ours else None)
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    python = executable(
        tmp_path / "python3", f'#!/bin/sh\nPYTHONPATH={site} exec "{sys.executable}" -S "$@"\n'
    )
    refused = run("--", str(python), "-c", "print('it ran')", rings=tmp_path)
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "inferscope 0.1.1 (Python-package for inferscope mlops service)" in line
    assert line.endswith(
        f"Replace it with: {python} -m pip uninstall -y inferscope inferscope-llm && "
        f"{python} -m pip install inferscope-llm"
    )


def test_a_program_that_is_not_python_runs_only_if_that_is_wanted(tmp_path: Path) -> None:
    words = [str(executable(tmp_path / "serve.sh", "#!/bin/sh\necho it ran\n"))]
    refused = run("--", *words, rings=tmp_path)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "serve.sh is not a Python program" in refused.stderr
    assert run("--unobserved", "--", *words, rings=tmp_path).stdout == "it ran\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no command to run"),
        (["--"], "there is no command to run"),
        (["--", "no-such-program"], "there is no program no-such-program"),
        (["--", __file__], "is not executable. Give its Python"),
    ],
)
def test_a_command_that_cannot_run_is_named(tmp_path: Path, words: list[str], message: str) -> None:
    done = run(*words, rings=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "given", "wanted"),
    [
        ("vllm", "a,b", "a,b,inferscope"),
        ("vllm", "", "inferscope"),
        ("sglang", "a,b", "a,b,inferscope"),
        ("sglang", ", a", "a,inferscope"),
    ],
)
def test_a_list_of_an_engines_plug_ins_must_name_us(
    tmp_path: Path, engine: str, given: str, wanted: str
) -> None:
    variable = f"{engine.upper()}_PLUGINS"
    program = executable(tmp_path / engine, f"#!{sys.executable}\nprint('it ran')\n")
    refused = run("--", str(program), "serve", rings=tmp_path, **{variable: given})
    assert refused.returncode == 2
    assert refused.stderr.endswith(f"Set {variable}={wanted}\n")
    named = run("--", str(program), "serve", rings=tmp_path, **{variable: wanted})
    assert named.stdout == "it ran\n"
    other = run("--", *script(tmp_path, "print('it ran')"), rings=tmp_path, **{variable: given})
    assert other.stdout == "it ran\n"
    assert wanted in other.stderr


@pytest.mark.parametrize("given", ["", "a, inferscope "])
def test_sglang_takes_an_empty_list_for_none_and_strips_names(tmp_path: Path, given: str) -> None:
    sglang = executable(tmp_path / "sglang", f"#!{sys.executable}\nprint('it ran')\n")
    done = run("--", str(sglang), "serve", rings=tmp_path, SGLANG_PLUGINS=given)
    assert done.stdout == "it ran\n"
    assert "SGLANG_PLUGINS" not in done.stderr


def test_vllm_on_ray_gets_the_variables_to_copy(tmp_path: Path) -> None:
    vllm = str(
        executable(tmp_path / "vllm", f"#!{sys.executable}\nimport os\nprint(*os.environ)\n")
    )
    words = [vllm, "serve", "MODEL", "--distributed-executor-backend", "ray"]
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    done = run("--", *words, rings=tmp_path, **{name: "MINE"})
    assert done.returncode == 0
    _, _, rest = done.stderr.partition(f"{name}=")
    value = rest.split()[0]
    wanted = {"MINE", "INFERSCOPE", "INFERSCOPE_DIR", "INFERSCOPE_ENGINE_ID"}
    assert set(value.split(",")) >= wanted
    silent = run("--", *words, rings=tmp_path, **{name: value})
    assert name not in silent.stderr
    assert "PYTHONPATH" in done.stdout.split()  # as we gave it; vLLM loads us by itself
    assert "Ray" not in run("--", vllm, "serve", rings=tmp_path).stderr


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_recorded", [False, True], ids=["alone", "recorded"])
def test_a_signal_reaches_the_command_once_and_its_code_comes_back(
    tmp_path: Path, number: signal.Signals, is_recorded: bool
) -> None:
    file = tmp_path / "run.isr"
    beside = ["--record", str(file)] if is_recorded else []
    words = script(tmp_path, ENGINE)
    with running(*beside, "--", *words, rings=tmp_path / "rings") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert out == f"got {int(number)}\n"
    assert process.returncode == 3
    (engine,) = find_engines(tmp_path / "rings")
    assert not engine.is_alive(time.monotonic_ns())
    if is_recorded:
        assert "records, 0 lost" in err
        export = run_inferscope("export", str(file), "-o", "-", rings=tmp_path)
        assert '"finish":"stop"' in export.stdout


UNTIL_ASKED = """
import resource, select, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
from inferscope.probe import EngineInfo, Probe
probe, number = Probe.open(EngineInfo(0, "toy")), 0
while not select.select([sys.stdin], [], [], 0.005)[0]:
    for number in range(number + 1, number + 60):
        probe.finished(probe.queued(f"request {number}", prompt_tokens=3), "stop")
probe.close()
sys.exit(3)
"""


@pytest.mark.thorough
def test_a_recording_that_cannot_be_written_leaves_the_command_running(tmp_path: Path) -> None:
    file = tmp_path / "run.isr"
    words = script(tmp_path, UNTIL_ASKED)
    with child(
        [sys.executable, "-m", "inferscope", "run", "--record", str(file), "--", *words],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path / "rings"), "PYTHONPATH": ROOT},
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)
        ),
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        assert f"cannot write {file}" in lines[1], lines
        _, rest = process.communicate("\n", timeout=60)
    assert process.returncode == 3
    assert rest == "", "said once"


@pytest.mark.thorough
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_log_on_a_full_disk_costs_the_command_nothing(tmp_path: Path, is_recorded: bool) -> None:
    beside = ("--record", str(tmp_path / "run.isr")) if is_recorded else ()
    words = script(tmp_path, "print('ran'); raise SystemExit(3)")
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "inferscope", "run", *beside, "--", *words],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env={**os.environ, "INFERSCOPE_DIR": str(tmp_path / "rings"), "PYTHONPATH": ROOT},
            timeout=60,
            check=False,
        )
    assert (done.stdout, done.returncode) == ("ran\n", 3)


TWO_MODELS = """
from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorders
from inferscope.probe import EngineInfo, HostTimer
class Model: pass
models, recorders = [Model(), Model()], Recorders(Patches("test"))
for at, model in enumerate(models):
    info = EngineInfo(0, "test", model=f"model {at}")
    probe = recorders.take(model, lambda: (info, HostTimer())).probe
    probe.finished(probe.queued(f"request {at}", prompt_tokens=3), "stop")
recorders.close()
"""


def test_every_model_of_the_command_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "run.isr"
    done = run("--record", str(file), "--", *script(tmp_path, TWO_MODELS), rings=tmp_path / "rings")
    assert done.returncode == 0, done.stderr
    export = run_inferscope("export", str(file), "-o", "-", rings=tmp_path)
    rows = [json.loads(line) for line in export.stdout.splitlines()]
    named = {row["request"]: row["engine"] for row in rows if row["kind"] == "request"}
    first, second = named["request 0"], named["request 1"]
    assert f"attach {first}" in done.stderr
    assert second == f"{first}-2"


@pytest.mark.thorough
def test_ctrl_c_on_a_terminal_interrupts_the_command_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = script(tmp_path, ENGINE)
    record = ["--record", str(tmp_path / "run.isr")]
    try:
        with running(*record, "--", *words, rings=tmp_path, terminal=theirs) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.write(ours, b"\x03")
            out, _ = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert out == "got 2\n"
    assert process.returncode == 3


def test_a_killed_command_has_the_code_that_a_shell_gives_it(tmp_path: Path) -> None:
    words = script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    done = run("--record", str(tmp_path / "run.isr"), "--", *words, rings=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "no process of the command opened a ring" in done.stderr


@pytest.mark.thorough
def test_a_collector_beside_it_ends_with_it(tmp_path: Path) -> None:
    words = script(tmp_path, UNTIL_COLLECTED)
    done = run(
        *("--collect", "--", *words), rings=tmp_path / "rings", XDG_STATE_HOME=str(tmp_path),
        **ANY_PORT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "over\n"
    assert "collecting from" in done.stderr
    again = run_inferscope("collect", "--check", rings=tmp_path / "rings", **ANY_PORT)
    assert again.returncode == 0, again.stderr


def test_a_sampler_beside_it_reports_its_process_and_ends_with_it(tmp_path: Path) -> None:
    words = script(tmp_path, UNTIL_SAMPLED)
    done = run("--counters", "host", "--", *words, rings=tmp_path / "rings", INFERSCOPE_RING_MB="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sampled\n"
    (path,) = sampler_rings(tmp_path / "rings")
    until = time.monotonic() + 90
    while of(ProbeHealth, path)[-1].state != CLOSED:
        assert time.monotonic() < until
        time.sleep(0.05)
    (engine,) = find_engines(tmp_path / "rings")
    pids = {one.values["pid"] for one in of(CounterSample, path) if one.values}
    assert pids == set(engine.pids)


def test_counters_are_sources_that_there_are(tmp_path: Path) -> None:
    words = script(tmp_path, "print('over')")
    assert run("--counters", "some", "--", *words, rings=tmp_path).returncode == 2
    done = run("--counters", "off", "--", *words, rings=tmp_path)
    assert done.stdout == "over\n"
    assert sampler_rings(tmp_path) == []
