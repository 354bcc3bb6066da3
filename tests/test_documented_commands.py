"""Each command of the README, docs and samples, executed: `make test-docs`.

A command runs in a folder of its own with recordings under the names that the pages use, beside a
running engine. What cannot run here is in `ELSEWHERE` and skipped with its reason.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from inferscope.cli.main import COMMANDS
from tests.children import child
from tests.cli.running import ANY_PORT, ROOT, Engine, inferscope, running_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# `make docs` writes commands.md from the parsers.
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "commands.md"),
    *sorted(path for path in (ROOT / "samples").rglob("*") if path.suffix in (".md", ".sh")),
    *sorted((ROOT / "dashboards").rglob("*.yaml")),
]
PROGRAM = re.compile(
    rf"(?:[A-Z_]+=(?:\$\(.*?\)|\S+) )*(?:inferscope (?:{'|'.join(COMMANDS)})\b"
    r"|(?:make|python|pip|curl|docker|kubectl|duckdb|sudo) |samples/\S+\.sh)"
)
ELSEWHERE = {
    r"vllm serve|sglang\.launch|transformers serve": "needs another engine, and its models",
    r"pip install": "needs a package index",
    r"^kubectl": "needs a cluster",
    r"docker": "needs Docker",
    r"^sudo": "needs a GPU whose counters only root may read",
    r"cuda|random:llama-8b": "needs a GPU",
    r"^make|samples/lab": "builds an environment or measures for many minutes",
    r"--compare|^inferscope calibrate": "measures for minutes; has tests of its own",
    r"dynamo-fpm|ipc:": "needs a file of Dynamo's or an address of SGLang's",
    r"script\.py|record\.sh FILE": "needs a program or a name of yours",
    r"--role decode": "needs the prefill engine beside it: engine/server/test_disagg.py",
    r"/opt/": "needs a program at this path",
    r"^curl": "needs the server of the line above: tests/cli/test_readme.py pastes both",
    r"duckdb <": "needs DuckDB's own program: tests run the queries in its library",
    r"inferscope profile": "has tests of its own: kernels of this engine need its second press",
}
"""Patterns of commands that are not executed, with the reasons."""
STAND_INS = {
    r"\b(?:ENGINE_ID|ENGINE|41233|PID)\b|(?<=attach )llama\b": "under-test",
    r"(?<=why )\S+": "fe-9 --pick 1",
    r"(?<=join )run\.isr": "aiperf.isr",
    r"14:02:07": "{now}",
    r"/etc/prometheus/inferscope": "rules",
    r"/tmp/kv": "kv",
    r"\bRINGS\b": "under-test",
    r"http://127\.0\.0\.1:8000": "{server}",
    r"--duration \d+": "--duration 2",
    r"--burst-every \d+": "--burst-every 2 --duration 2",
    r"\s\|\s*(?:kubectl|jq)\b.*": "",
    r"\s&$": "",
    r"serve builtin(?! --port)": "serve builtin --port {port}",
    r"\b8000\b": "{port}",
}
"""What takes the place of a page's names, and of times that are longer than a test needs."""
RECORDINGS = ("demo", "run", "before", "after", "baseline", "new", "a", "b")
CLIENTS = ROOT / "tests" / "insight" / "clients"
UNTIL_STOPPED = re.compile(
    r"(?:\S+=\S+ )?inferscope (?:serve|collect(?!.* --check)|record(?!.* --duration)|sampler --for)"
    r"|python samples/instrument_a_loop"
)
STATES_A_FAULT = re.compile(r"inferscope (?:cache|doctor|slo check|findings)")
"""Commands whose status 1 is an answer."""
STARTS_AN_ENGINE = re.compile(r"serve builtin|instrument_a_loop")
"""Commands with a ring folder of their own: to the others, one engine is the only one."""
_BEGUN_S, _SETTLED_S = 30.0, 3.0
"""Longest wait for the first output of what runs until it is stopped, and the time after it."""


class Command(NamedTuple):
    """Command as a page shows it."""

    page: Path
    line: str


def commands_of(page: Path) -> Iterator[str]:
    """Yield the commands in the blocks of a page, or in the comments of another file."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    else:
        text = "\n".join(re.findall(r"^# +(.*)", text, re.MULTILINE))
    for line in text.replace("\\\n", " ").splitlines():
        line = re.split(r" {2,}(?!-)|\s# ", line.strip().removeprefix("$ "))[0]
        if PROGRAM.match(line):
            yield re.sub(r"\s+", " ", line)


COMMANDS_SHOWN = list(
    {line: Command(page, line) for page in PAGES for line in commands_of(page)}.values()
)


def reason_elsewhere(line: str) -> str | None:
    """Return why a command is not executed; None for one that is."""
    return next((why for shape, why in ELSEWHERE.items() if re.search(shape, line)), None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Run an engine under a light load: each command on it reads its whole history."""
    with running_engine(tmp_path_factory.mktemp("engine"), rate_s=2.0) as running:
        running.wait_for(10)
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the built-in model; return its address."""
    folder = tmp_path_factory.mktemp("server")
    url = f"http://127.0.0.1:{free_port()}"
    words = ["-m", "inferscope", "serve", "builtin", "--port", url.rpartition(":")[2]]
    environment = {**os.environ, "INFERSCOPE_DIR": str(folder)}
    with child([sys.executable, *words], env=environment, start_new_session=True):
        waits = ["curl", "-sS", "-o", os.devnull, "--retry", "90", "--retry-delay", "1"]
        subprocess.run([*waits, "--retry-connrefused", f"{url}/health"], check=True)
        yield url


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that pages name."""
    for name in ("samples", "dashboards"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    sample = tmp_path / "samples" / "demo.isr"
    for name in (*RECORDINGS, "pin-20260307T141530Z-breach"):
        shutil.copy(sample, tmp_path / f"{name}.isr")
    shutil.copy(tmp_path / "samples" / "slo.yaml", tmp_path / "slo.yaml")
    shutil.copy(CLIENTS / "aiperf.isr", tmp_path)
    (tmp_path / "artifacts").mkdir()
    shutil.copy(CLIENTS / "aiperf.jsonl", tmp_path / "artifacts" / "profile_export.jsonl")
    for name in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "collect.yaml").write_text("{}\n", encoding="utf-8")
    (tmp_path / "dashboards" / "prometheus" / "token").write_text("x" * 64, encoding="utf-8")
    (tmp_path / "dashboards" / "prometheus" / "token").chmod(0o600)
    return tmp_path


def skipped(command: Command) -> list[pytest.MarkDecorator]:
    """Return a mark with the page, the command and the reason not to execute it, if any."""
    reason = reason_elsewhere(command.line)
    where = f"{command.page.relative_to(ROOT)}: {command.line}"
    return [] if reason is None else [pytest.mark.skip(reason=f"{where}: {reason}")]


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, id=each.line, marks=skipped(each)) for each in COMMANDS_SHOWN],
)
def test_the_command_does_what_the_page_shows(
    command: Command,
    engine: Engine,
    server: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, port, now = command.line, free_port(), time.strftime("%H:%M:%S")
    for shape, stand_in in STAND_INS.items():
        line = re.sub(shape, stand_in.format(server=server, port=port, now=now), line)
    for written in re.findall(r"(?:-o|--out|record\.sh) (\S+)", line):
        (folder / written).unlink(missing_ok=True)
    rings = folder / "rings" if STARTS_AN_ENGINE.search(line) else engine.rings
    program, *words = shlex.split(line)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    if UNTIL_STOPPED.match(line):
        code, printed = stopped(line, rings)
    elif program == "inferscope" and not {"&&", ">"} & set(words):
        done = inferscope(*words, rings=rings, timeout_s=300, NO_COLOR="1")
        code, printed = done.returncode, done.stdout + done.stderr
    else:
        more = {"PORT": str(port), "SECONDS_OF_LOAD": "5"}
        with shell(line, rings, **more) as process:
            printed, _ = process.communicate(timeout=300)
        code = process.returncode
    assert code in ((0, 1) if STATES_A_FAULT.match(line) else (0,)), printed
    assert "Traceback" not in printed or program == "python"


def shell(line: str, rings: Path, **more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a line in the current folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return child(
        ["bash", "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PATH": path,
            "INFERSCOPE_DIR": str(rings),
            "NO_COLOR": "1",
            **ANY_PORT,
            **more,
        },
    )


def stopped(line: str, rings: Path) -> tuple[int, str]:
    """Run a line and interrupt it after its first output; return 0 where that ended it."""
    with shell(line, rings) as process:
        select.select([process.stdout], [], [], _BEGUN_S)
        try:
            printed, _ = process.communicate(timeout=_SETTLED_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
            if process.returncode in (130, -signal.SIGINT):
                return 0, printed
        return process.returncode, printed


def test_each_reason_holds_for_a_command_and_most_commands_are_executed() -> None:
    lines = [command.line for command in COMMANDS_SHOWN]
    assert [shape for shape in ELSEWHERE if not any(re.search(shape, line) for line in lines)] == []
    assert sum(reason_elsewhere(line) is None for line in lines) > len(lines) / 2
