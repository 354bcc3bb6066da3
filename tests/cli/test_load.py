"""`inferscope load` as a user runs it: against a real engine, and against servers that are not."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscope.cli.load import run as load_run
from inferscope.cli.main import main
from tests.children import child
from tests.cli.running import ROOT, inferscope
from tests.load.raw_server import SSE, RawServer, sending, whole

SERVER = ("-m", "inferscope.engine.start", "tests.load.engine_server")
ANSWER = (
    SSE + b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Serve the built-in engine in a process of its own; return its URL."""
    with child(
        [sys.executable, *SERVER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.communicate(timeout=60)


def without_progress(printed: str) -> list[str]:
    """Return the lines of standard error but those that come every 5 s."""
    return [line for line in printed.splitlines() if not line.startswith("inferscope: load: ")]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(engine: str) -> dict[str, dict[str, Any]]:
    """Return what reached the engine, by request id."""
    with urllib.request.urlopen(f"{engine}/asked", timeout=30) as answer:
        return {one["headers"]["x-request-id"]: one for one in json.load(answer)}


def bodies_of(engine: str, run: str) -> list[dict[str, Any]]:
    """Return what a run asked for, in the order of its numbers."""
    return [one["body"] for name, one in sorted(asked(engine).items()) if name.startswith(run)]


def load(url: str, *arguments: str, rings: Path) -> subprocess.CompletedProcess[str]:
    return inferscope("load", url, *arguments, rings=rings)


def test_client_and_engine_agree_on_a_load_against_a_real_engine(
    tmp_path: Path, engine: str
) -> None:
    out = tmp_path / "client.jsonl"
    done = load(
        engine, "--rate", "30", "--requests", "12", "--seed", "7", "--run-name", "seven",
        "--prompt-tokens", "60..90",
        "--output-tokens", "3..8", "--shared-prefix", "40", "--parts", "--traceparent",
        "--json",
        "--out", str(out), rings=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not without_progress(done.stderr)
    document = json.loads(done.stdout)
    summary = document["summary"]
    assert (summary["scheduled"], summary["finished"], summary["failed"]) == (12, 12, {})
    assert document["words"]["is_measured"]
    assert out.stat().st_mode & 0o777 == 0o600
    arrived = asked(engine)
    lines = rows(out)
    assert [row["name"] for row in sorted(lines, key=lambda row: row["scheduled_ns"])] == [
        f"seven-{number:06d}" for number in range(12)
    ]
    for row in lines:
        other = arrived[row["name"]]
        assert other["headers"]["traceparent"] == row["traceparent"]
        header = re.fullmatch(r"(system=40,)?user=(\d+)", other["headers"]["x-inferscope-parts"])
        assert header is not None
        assert row["prompt_tokens"] == pytest.approx(
            (40 if header[1] else 0) + int(header[2]), abs=30
        )
        assert other["body"]["ignore_eos"]
        assert "seed" not in other["body"]
        # The engine counts: full length, each token seen, prompts of about the length asked for.
        assert row["output_tokens"] == row["tokens"] == other["body"]["max_tokens"]
        assert 50 <= row["prompt_tokens"] <= 150
        assert row["scheduled_ns"] <= row["sent_ns"] < row["first_token_ns"]
        assert row["first_token_ns"] + sum(row["tbt_ns"]) == row["last_token_ns"]
        assert row["last_token_ns"] <= row["ended_ns"]
        assert abs(row["sent_at_unix_ns"] - time.time_ns()) < 300e9
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in lines)
    assert summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in lines)
    canary = " ".join(next(iter(arrived.values()))["body"]["messages"][0]["content"].split()[:4])
    assert canary not in out.read_text(encoding="utf-8") + done.stdout


@pytest.mark.thorough
def test_what_is_asked_does_not_depend_on_how_the_server_fares(tmp_path: Path, engine: str) -> None:
    arguments = ("--rate", "40", "--requests", "8", "--seed", "11", "--kind", "chat")
    gaps = []
    bodies: list[list[dict[str, Any]]] = []
    for number, url in enumerate((engine, engine)):
        out = tmp_path / f"{number}.jsonl"
        done = load(url, *arguments, "--out", str(out), "--run-name", f"r{number}", rings=tmp_path)
        assert done.returncode == 0, done.stderr
        bodies.append(bodies_of(engine, f"r{number}"))
        lines = sorted(rows(out), key=lambda row: row["scheduled_ns"])
        gaps.append([row["scheduled_ns"] - lines[0]["scheduled_ns"] for row in lines])
    out = tmp_path / "broken.jsonl"
    with RawServer(sending(whole("500 Broken", b"{}"))) as broken:
        assert load(broken.url, *arguments, "--out", str(out), rings=tmp_path).returncode == 1
    lines = sorted(rows(out), key=lambda row: row["scheduled_ns"])
    gaps.append([row["scheduled_ns"] - lines[0]["scheduled_ns"] for row in lines])
    assert gaps[0] == gaps[1] == gaps[2]
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) == 8


def test_completions_send_a_prompt_and_the_summary_is_text(tmp_path: Path, engine: str) -> None:
    done = load(
        engine, "--endpoint", "completions", "--burst", "3", "--burst-every", "0.2", "--duration",
        "0.5", "--run-name", "five", "--output-tokens", "2", "--prompt-tokens", "30",
        "--sampling-seeds",
        rings=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "scheduled  9   sent 9   finished 9   failed 0" in done.stdout
    assert "TTFT" in done.stdout
    mine = bodies_of(engine, "five")
    assert len({body["prompt"] for body in mine}) == len({body["seed"] for body in mine}) == 9


def test_a_server_without_a_tokenizer_makes_lengths_approximate(tmp_path: Path) -> None:
    with RawServer(sending(ANSWER)) as server:
        done = load(
            server.url, "--requests", "2", "--rate", "50", "--prompt-tokens", "9", rings=tmp_path
        )
    assert done.returncode == 0, done.stderr
    assert "Prompt lengths are approximate" in done.stdout
    assert "the server sent no usage" in done.stdout


def test_when_all_requests_fail_one_line_states_how(tmp_path: Path) -> None:
    body = b'{"error": {"message": "queue full"}}'
    with RawServer(sending(whole("429 Too Many Requests", body))) as server:
        done = load(server.url, "--requests", "3", "--rate", "50", "--json", rings=tmp_path)
    assert done.returncode == 1
    (line,) = without_progress(done.stderr)
    assert "none of 3 requests finished: 3 x HTTP 429 (queue full)" in line
    assert json.loads(done.stdout)["summary"]["failed"] == {"HTTP 429": 3}


def test_too_many_open_are_counted_and_named(tmp_path: Path) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        writer.write(ANSWER)

    with RawServer(slow) as server:
        done = load(
            server.url, "--burst", "6", "--burst-every", "0.2", "--requests", "6", "--most-open",
            "2", rings=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finished 2   failed 0   refused 4" in done.stdout
    assert "--most-open" in done.stdout


def test_a_piped_load_prints_its_progress_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(ANSWER)

    monkeypatch.setattr(load_run, "_LOG_S", 0.05)
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    with RawServer(slow) as server:
        assert main(["load", server.url, "--requests", "2", "--rate", "50"]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert any(re.match(r"inferscope: load: [\d.]+ s  sent \d  open", line) for line in lines)
    assert "\x1b" not in printed.err + printed.out


def test_no_server_is_one_line(tmp_path: Path) -> None:
    older = tmp_path / "client.jsonl"
    older.write_bytes(b"precious")
    done = load("http://127.0.0.1:9", "--out", str(older), rings=tmp_path)
    assert older.read_bytes() == b"precious"
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = without_progress(done.stderr)
    assert "no server answers at http://127.0.0.1:9" in line
    assert "inferscope serve" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://here",), "is not a server URL"),
        (("http://u:p@127.0.0.1:9",), "--api-key-env"),
        (("127.0.0.1:9", "--run-name", "a b"), "'a b'"),
        (("127.0.0.1:9", "--burst", "3"), "--burst-every"),
        (("127.0.0.1:9", "--temperature", "nan"), "--temperature is nan"),
        (("127.0.0.1:9", "--kind", "chat", "--prompt-tokens", "3"), "sets the lengths itself"),
        (("127.0.0.1:9", "--prefix-share", "0.3"), "--shared-prefix"),
        (("127.0.0.1:9", "--shared-prefix", "30"), "--prompt-tokens"),
        (("127.0.0.1:9", "--prompt-tokens", "30", "--parts"), "--shared-prefix"),
        (("127.0.0.1:9", "--prompt-tokens", "normal:x"), "'normal:x' is not a token length"),
        (("127.0.0.1:9", "--requests", "1.5"), "'1.5' is not a whole number"),
        (("127.0.0.1:9", "--api-key-env", "NOT_SET_HERE"), "NOT_SET_HERE, which is not set"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = inferscope("load", *arguments, rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with RawServer(sending(ANSWER)) as server:
        done = load(server.url, "--out", "/none/client.jsonl", rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write /none/client.jsonl" in done.stderr


def test_a_load_too_short_for_any_request_is_reported(tmp_path: Path) -> None:
    with RawServer(sending(ANSWER)) as server:
        done = load(server.url, "--rate", "0.001", "--duration", "0.1", rings=tmp_path)
    assert done.returncode == 1
    assert "no request was due within 0.1 s" in done.stderr


def test_a_full_disk_ends_the_load_with_one_line(tmp_path: Path) -> None:
    with RawServer(sending(ANSWER)) as server:
        done = load(server.url, "--requests", "200", "--rate", "400", "--out", "/dev/full",
                    rings=tmp_path)  # fmt: skip
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_prints_what_there_is_and_leaves_with_130(tmp_path: Path) -> None:
    """On a terminal: the line is shown while it runs, two Ctrl-C do not wait for the answers."""

    async def never(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    terminal, its_end = pty.openpty()
    out = tmp_path / "client.jsonl"
    with (
        RawServer(never) as server,
        child(
            [sys.executable, "-m", "inferscope", "load", server.url, "--rate", "50", "--out", out],
            stdout=subprocess.PIPE,
            stderr=its_end,
            text=True,
            env={**os.environ, "TERM": "xterm"},
        ) as process,
    ):
        os.close(its_end)
        deadline_s = time.monotonic() + 90
        while len(server.asked_at) < 5:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # two that come too close are one
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert " s  sent " in shown
    assert shown.endswith("\r\x1b[K")
    lines = rows(out)
    assert {row["outcome"] for row in lines} == {"abandoned"}
    assert f"scheduled  {len(lines)}   sent {len(lines)}   finished 0" in output
    assert f"abandoned {len(lines)}" in output


@pytest.mark.thorough
def test_the_load_extra_is_all_it_needs(tmp_path: Path) -> None:
    for module in ("numpy", "torch", "textual", "yaml"):
        missing = f"raise ModuleNotFoundError('not here', name='{module}')\n"
        (tmp_path / f"{module}.py").write_text(missing, encoding="utf-8")
    with RawServer(sending(ANSWER)) as server:
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = inferscope(
            "load", server.url, "--requests", "1", "--rate", "50", rings=tmp_path, PYTHONPATH=path
        )
    assert done.returncode == 0, done.stderr
