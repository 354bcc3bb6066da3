"""Tests of servers whose requests are prefilled in one engine process and decoded in another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferscope.engine import Sampling, load_engine, load_tokenizer
from inferscope.fold.final_records import FinalRequest
from inferscope.readers.source import RingSource
from tests.engine.server.running import Finals, Server, Stream, in_background, serving
from tests.engine.test_disagg import descriptors

pytestmark = pytest.mark.thorough

PROMPT = "def main(argv):\n    parser = argparse.ArgumentParser(description=__doc__)\n"
BODY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("disaggregated")
    with serving(folder, "builtin", "--disaggregate", "--max-running", "4") as running:
        yield running.wait()
        pids = running.children()
        assert running.stop() == 0, running.said()
        assert not any(descriptors(pid) for pid in pids)


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def engines(server: Server) -> tuple[int, int]:
    """Return the process IDs of the decode and the prefill engine."""
    by_role = {}
    for pid in server.children():
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        for role in ("decode", "prefill"):
            if f'"role":"{role}"'.encode() in words:
                by_role[role] = pid
    return by_role["decode"], by_role["prefill"]


def num_shared(server: Server) -> int:
    return sum(len(descriptors(pid)) for pid in engines(server))


def assert_nothing_is_left(server: Server) -> None:
    """Assert that no shared memory and no KV block is in use within a while."""
    wait_for(lambda: num_shared(server) == 0, "shared memory is left")
    wait_for(lambda: _metric(server, "kv_cache_usage_ratio") == 0, "KV blocks are left")


def finals_of(server: Server, engine: str, *, until: int) -> list[FinalRequest]:
    """Fold an engine's rings until this number of requests is final."""
    sink = Finals()
    source = RingSource(lambda: server.rings.glob(f"{engine}/*.ring"), name="test", sinks=(sink,))
    wait_for(lambda: bool(source.advance()) or len(sink.requests) >= until, "records are missing")
    while len(sink.requests) < until:
        wait_for(lambda: bool(source.advance()), "records are missing")
    source.close()
    return sink.requests


def _metric(server: Server, name: str) -> float:
    url = f"http://127.0.0.1:{server.port}/metrics"
    page = subprocess.run(["curl", "-sS", url], capture_output=True, text=True, check=True).stdout
    return float(page.split(f"\ninferscope_serve_{name} ")[1].split()[0])


def test_one_request_has_one_ledger_over_both_engines(server: Server) -> None:
    engine, tokenizer = load_engine("builtin"), load_tokenizer("builtin")
    tokens = tokenizer.encode(PROMPT)
    (expected,) = engine.generate([tokens], Sampling(max_tokens=24, ignore_eos=True))
    headers = {"X-Request-Id": "whole", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}

    status, answer, _ = server.post("/v1/completions", BODY, headers)

    assert status == 200
    assert answer["choices"][0]["text"] == tokenizer.decode(expected)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    decoded = server.final("whole")
    (prefilled,) = finals_of(server, "served-prefill", until=1)
    (transfer,) = decoded.transfers
    assert (transfer.peer, transfer.peer_request_id) == ("served-prefill", prefilled.request_id)
    assert transfer.num_bytes == (len(tokens) - 1) * engine.model.config.kv_token_bytes(4)
    assert decoded.ledger_ns["kv_transfer"] == transfer.end_ns - transfer.start_ns
    assert transfer.start_ns <= prefilled.arrived_ns <= prefilled.delivered_ns <= transfer.end_ns
    for final in (decoded, prefilled):
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert min(final.ledger_ns.values()) >= 0
        assert final.trace.startswith(f"00-{TRACE}")
    assert (decoded.arrived_at, decoded.delivered_at) == ("http", "http")
    assert (decoded.cached_tokens, decoded.prefill_work.tokens) == (len(tokens) - 1, 1)
    assert prefilled.prefill_work.tokens == len(tokens)
    told = why(server, "whole")
    assert f"{transfer.num_bytes:,} bytes from engine served-prefill, which took" in told
    assert "prefill_own)" in told or "prefill_own," in told
    assert f"{len(tokens) - 1} tokens came from another engine" in told
    assert_nothing_is_left(server)


def test_prefix_hits_are_those_of_the_prefill_engine(server: Server) -> None:
    for _ in range(2):
        status, answer, _ = server.post("/v1/completions", BODY)
        assert status == 200
    num_blocks = answer["usage"]["prompt_tokens"] // 16
    assert num_blocks
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * num_blocks
    hits = []
    for _ in range(2):
        _, answer, _ = server.post("/v1/completions", {**BODY, "cache_salt": "of another client"})
        hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert hits == [0, 16 * num_blocks]


def test_log_probabilities_are_those_of_the_decode_engine(server: Server) -> None:
    for prompt in (BODY["prompt"], [7]):
        _, answer, _ = server.post("/v1/completions", {**BODY, "prompt": prompt, "logprobs": 2})
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"]
        assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]


def why(server: Server, name: str) -> str:
    """Return what `inferscope why` prints, as one line."""
    words = [sys.executable, "-m", "inferscope", "why", name]
    environment = {**os.environ, "INFERSCOPE_DIR": str(server.rings)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def test_a_prompt_of_one_token_needs_no_prefill_engine(server: Server) -> None:
    body = {**BODY, "prompt": [7]}
    status, answer, _ = server.post("/v1/completions", body, {"X-Request-Id": "short"})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 24)
    assert server.final("short").transfers == ()


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_client_that_leaves_during_the_transfer_leaves_nothing(
    server: Server, stopped: str
) -> None:
    name = f"left-{stopped}"
    pid = engines(server)[stopped == "prefill"]
    os.kill(pid, signal.SIGSTOP)
    try:
        headers = {"X-Request-Id": name}
        stream = Stream(server.port, "/v1/completions", BODY, headers=headers)
        if stopped == "decode":
            wait_for(lambda: num_shared(server) == 1, "the prompt is not prefilled")
        else:
            time.sleep(0.3)
        stream.close()
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    final = server.final(name)
    assert (final.finish, final.output_tokens) == ("client_cancel", 0)
    if final.ledger_missing:  # it ended before the decode engine reported it
        assert final.ledger_missing == "not seen by the core"
    else:
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert_nothing_is_left(server)


def test_a_killed_prefill_engine_fails_only_requests_in_prefill(server: Server) -> None:
    _, pid = engines(server)
    headers = {"X-Request-Id": "in prefill"}
    with Stream(server.port, "/v1/completions", {**BODY, "max_tokens": 600}) as stream:
        events = stream.events()
        next(events)
        os.kill(pid, signal.SIGSTOP)
        thread, results = in_background(server.post, "/v1/completions", BODY, headers)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        thread.join()
        status, answer, _ = results[0]
        assert status == 503
        assert "the prefill engine has exited" in answer["error"]["message"]
        assert list(events)[-1] == "[DONE]"
    assert server.final("in prefill").finish == "error"
    wait_for(lambda: server.post("/v1/completions", BODY)[0] == 200, "no prefill engine follows")
    lines = [line for line in server.said().splitlines() if "killed by signal 9" in line]
    assert lines == [
        "inferscope: the prefill engine's process was killed by signal 9; requests in prefill "
        "fail, another one starts."
    ]
    assert_nothing_is_left(server)


def test_shared_memory_that_is_gone_fails_one_request(server: Server) -> None:
    decode, prefill = engines(server)
    os.kill(decode, signal.SIGSTOP)
    try:
        headers = {"X-Request-Id": "gone"}
        thread, results = in_background(server.post, "/v1/completions", BODY, headers)
        wait_for(lambda: num_shared(server) == 1, "the prompt is not prefilled")
        time.sleep(0.3)
        os.kill(prefill, signal.SIGKILL)
        wait_for(lambda: prefill not in server.children(), "the prefill engine is not replaced")
    finally:
        os.kill(decode, signal.SIGCONT)
    thread.join()
    status, answer, _ = results[0]
    assert (status, answer["error"]["code"]) == (503, "kv_transfer_failed")
    assert server.final("gone").finish == "error"
    (line,) = [line for line in server.said().splitlines() if "cannot be read" in line]
    assert line.startswith("request api-0-")
    wait_for(lambda: server.post("/v1/completions", BODY)[0] == 200, "no prefill engine follows")
    assert_nothing_is_left(server)


def test_a_slow_decode_engine_delays_prompts_and_a_full_queue_refuses_them(tmp_path: Path) -> None:
    options = ("--max-model-len", "64", "--num-blocks", "4", "--max-waiting", "3")
    with serving(tmp_path, "builtin", "--disaggregate", *options) as server:
        server.wait()
        body = {**BODY, "prompt": list(range(20)), "max_tokens": 40}
        decode, prefill = engines(server)
        os.kill(decode, signal.SIGSTOP)
        try:
            started = [in_background(server.post, "/v1/completions", body) for _ in range(8)]
            wait_for(lambda: len(descriptors(prefill)) == 3, "prompts are not prefilled")
            time.sleep(0.5)
            assert len(descriptors(prefill)) == 3  # of 20 tokens, in the size of a pool of 64
        finally:
            os.kill(decode, signal.SIGCONT)
        for thread, _ in started:
            thread.join()
        answers = [results[0] for _, results in started]
        texts = {answer["choices"][0]["text"] for status, answer, _ in answers if status == 200}
        assert len(texts) == 1
        assert {status for status, *_ in answers} == {200, 429}
        assert sum(status == 200 for status, *_ in answers) >= 3
        assert_nothing_is_left(server)
        assert server.stop() == 0


def test_roles_started_apart_serve_one_request(tmp_path: Path) -> None:
    meeting = str(tmp_path / "kv")
    (tmp_path / "p").mkdir()
    with serving(tmp_path / "p", "builtin", "--role", "prefill", "--kv-dir", meeting) as prefill:
        wait_for(lambda: "is ready" in prefill.said(), prefill.said())
        assert "exists: a prefill engine uses it" in refused("prefill", meeting)
        assert "the prefill engine has model builtin" in refused(
            "decode", meeting, model="random:tiny"
        )
        (tmp_path / "d").mkdir()
        with serving(tmp_path / "d", "builtin", "--role", "decode", "--kv-dir", meeting) as decode:
            decode.wait()
            status, *_ = decode.post("/v1/completions", BODY, {"X-Request-Id": "apart"})
            assert status == 200
            (transfer,) = decode.final("apart").transfers
            assert transfer.peer == "served"
            assert prefill.stop() == 0
            assert list(Path(meeting).iterdir()) == []
            assert decode.post("/v1/completions", BODY)[0] == 503
            options = ("--role", "prefill", "--kv-dir", meeting)
            with serving(tmp_path / "p", "builtin", *options) as following:
                wait_for(
                    lambda: decode.post("/v1/completions", BODY)[0] == 200, "it does not reconnect"
                )
                assert following.stop() == 0
            assert decode.stop() == 0


def test_the_socket_of_a_killed_prefill_engine_is_none(tmp_path: Path) -> None:
    (tmp_path / "prefill").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "prefill" / "core"))
    assert "has no prefill engine" in refused("decode", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--role", "prefill"], "--role and --kv-dir belong together"),
        (["--kv-dir", "x"], "--role and --kv-dir belong together"),
        (["--disaggregate", "--role", "decode", "--kv-dir", "x"], "Leave out --role"),
        (["--disaggregate", "--worker"], "--worker holds the KV in another process"),
        (["--disaggregate", "--overlap"], "cannot be handed over"),
        (["--disaggregate", "--tensor-parallel", "2"], "the KV of 2 ranks is in as many processes"),
        (["--disaggregate", "--pipeline-parallel", "2"], "in as many processes"),
        (["--disaggregate", "--speculative", "draft"], "the KV of a draft model"),
        (["--role", "decode", "--kv-dir", "nowhere"], "has no prefill engine"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: list[str], reason: str) -> None:
    words = [sys.executable, "-m", "inferscope", "serve", "builtin", "--port", "0", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def refused(role: str, meeting: str, *, model: str = "builtin") -> str:
    """Return why a server of a role does not start."""
    words = [sys.executable, "-m", "inferscope", "serve", model, "--port", "0"]
    words += ["--role", role, "--kv-dir", meeting]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr
