"""On a real vLLM server: every token counted, every nanosecond explained, no answer changed."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real.clients import Ask, ask_all, mixed_asks
from tests.engines_real.vllm_server import (
    CHECKPOINT,
    VLLM,
    Server,
    environment,
    export,
    needs_vllm,
    serving,
    stop,
)

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]

Lines = list[dict[str, Any]]


def of_kind(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


def hold_to_the_laws(
    lines: Lines, asks: list[Ask], *, was_core_killed: bool = False
) -> dict[str, Any]:
    """Hold an export against the clients' account; return what was seen, for the test to demand.

    A core that is killed while a worker executes never tells who was in that step: that one, and
    no other, may be unjoined.

    Σ tokens of a request's slices = prompt - cached + outputs - 1 + recomputed, exactly.
    """
    (run,) = of_kind(lines, "run")
    assert (run["lost"], run["late"]) == (0, 0)
    assert run["unjoined"] <= was_core_killed
    computed: collections.Counter[str] = collections.Counter()
    guessed: collections.Counter[str] = collections.Counter()
    again: collections.Counter[str] = collections.Counter()
    num_mixed = 0
    for step in of_kind(lines, "step"):
        shares = step["shares"]
        spent = sum(share["ns"] for share in shares)
        assert spent + step["padding_ns"] + step["unattributed_ns"] == step["measured_ns"]
        assert all(share["ns"] >= 0 for share in shares)
        num_mixed += len({share["phase"] == "prefill" for share in shares}) > 1
        for share in shares:
            computed[share["request"]] += share["tokens"]
            again[share["request"]] += share["tokens"] * share["recomputed"]
            guessed[share["request"]] += share["tokens"] * (share["phase"] == "verify")
    by_name = collections.defaultdict(list)
    for request in of_kind(lines, "request"):
        by_name[request["external_id"]].append(request)
        ledger = request["ledger_ns"]
        assert sum(ledger.values()) == request["delivered_ns"] - request["arrived_ns"]
        assert all(ns > 0 for ns in ledger.values())
        assert not request["joined_late"]
    for ask in asks:
        told = by_name.pop(ask.name)
        if not ask.is_whole:
            continue
        assert len(told) == ask.body.get("n", 1)
        assert {request["prompt_tokens"] for request in told} == {ask.usage["prompt_tokens"]}
        outputs = sum(request["output_tokens"] for request in told)
        assert outputs == ask.usage["completion_tokens"]
        for request in told:
            assert request["arrived_at"] == request["delivered_at"] == "http"
            due = request["prompt_tokens"] - request["cached_tokens"] + request["output_tokens"] - 1
            spent = computed[request["request"]] - again[request["request"]]
            if "stop" in ask.body:  # found by the front end, while the core goes on
                assert request["finish"] == "stop"
                assert spent >= due
                continue
            assert request["finish"] == "length"
            # Draft tokens that were rejected, or came after the last, are computed in vain.
            assert due <= spent <= due + guessed[request["request"]]
        details = ask.usage.get("prompt_tokens_details") or {}
        if len(told) == 1 and "cached_tokens" in details:
            assert told[0]["cached_tokens"] == details["cached_tokens"]
    assert not by_name  # health probes, and the like, are no requests
    return {
        "steps": len(of_kind(lines, "step")),
        "mixed": num_mixed,
        "recomputed": sum(again.values()),
        "guessed": sum(guessed.values()),
        "cached": sum(request["cached_tokens"] for request in of_kind(lines, "request")),
        "finishes": collections.Counter(r["finish"] for r in of_kind(lines, "request")),
        "probe_cost_ns": run["probe_cost_ns"],
    }


def agreement(lines: Lines, asks: list[Ask]) -> dict[str, list[float]]:
    """Return how much later the clients saw first and last bytes than we, in ms, sorted."""
    by_name = {request["external_id"]: request for request in of_kind(lines, "request")}
    apart: dict[str, list[float]] = {"ttft": [], "e2e": []}
    for ask in asks:
        if ask.is_whole and ask.body.get("n", 1) == 1:
            request = by_name[ask.name]
            ours = request["first_token_ns"] - request["arrived_ns"]
            apart["ttft"].append((ask.first_ns - ask.sent_ns - ours) / 1e6)
            ours = request["delivered_ns"] - request["arrived_ns"]
            apart["e2e"].append((ask.ended_ns - ask.sent_ns - ours) / 1e6)
    return {name: sorted(values) for name, values in apart.items()}


def metric(server: Server, name: str) -> float:
    return sum(
        float(number)
        for number in re.findall(rf"^{name}(?:_total)?{{.*}} (\S+)$", server.get("/metrics"), re.M)
    )


def report(name: str, seen: dict[str, Any], apart: dict[str, list[float]]) -> None:
    spread = {
        key: f"p50 {values[len(values) // 2]:.2f} max {values[-1]:.2f} min {values[0]:.2f} ms"
        for key, values in apart.items()
    }
    print(f"\n{name}: {seen} client - ours: {spread}")  # noqa: T201


@pytest.mark.conformance("vLLM", "`inferscope run` in front of the server")
@pytest.mark.conformance("vLLM", "HTTP receipt and last byte are the edges")
@pytest.mark.conformance("vLLM", "the client's id (`X-Request-Id`)")
@pytest.mark.conformance("vLLM", "tokens of slices = the API's `usage`")
@pytest.mark.conformance("vLLM", "every step joined and conserved, every ledger closed")
@pytest.mark.conformance("vLLM", "preemption and recompute")
@pytest.mark.conformance("vLLM", "several answers (`n`)")
@pytest.mark.conformance("vLLM", "clients that hang up are cancels")
@pytest.mark.conformance("vLLM", "refused requests, with their status")
@pytest.mark.conformance("vLLM", "health probes are no requests")
def test_preempted_requests_are_counted_to_the_token(tmp_path: Path) -> None:
    with serving(
        tmp_path, "--num-gpu-blocks-override", "18", "--no-enable-prefix-caching"
    ) as server:
        asks = mixed_asks(1, 30, prompts=(60, 400), outputs=(60, 250))
        ask_all(server.url, asks, at_once=14)
        num_preemptions = metric(server, "vllm:num_preemptions")
        long = [
            Ask(
                "killed",
                {
                    "model": "tiny",
                    "prompt": [5] * 50,
                    "max_tokens": 1500,
                    "ignore_eos": True,
                    "stream": True,
                },
                give_up_after=10,
            )
        ]
        ask_all(server.url, long, at_once=1)
        assert stop(server) == 0
    lines = export(server)
    seen = hold_to_the_laws(lines, asks + long)
    report("preemption", seen, agreement(lines, asks))
    assert num_preemptions > 0
    assert seen["recomputed"] > 0
    assert seen["mixed"] > 20
    assert seen["cached"] == 0
    assert seen["finishes"]["client_cancel"] >= 3
    assert seen["finishes"]["rejected"] == 2


@pytest.mark.conformance("vLLM", "HTTP receipt and last byte are the edges")
@pytest.mark.conformance("vLLM", "the client's id (`X-Request-Id`)")
@pytest.mark.conformance("vLLM", "tokens of slices = the API's `usage`")
@pytest.mark.conformance("vLLM", "every step joined and conserved, every ledger closed")
@pytest.mark.conformance("vLLM", "chunked and mixed prefill")
@pytest.mark.conformance("vLLM", "prefix cache")
@pytest.mark.conformance("vLLM", "stop strings")
@pytest.mark.conformance("vLLM", "`kill -9` of the core")
def test_cached_and_chunked_prompts_are_counted_to_the_token(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        asks = mixed_asks(2, 40, prompts=(10, 1500), outputs=(5, 60))
        asks.append(
            Ask(
                "stopped",
                {
                    "model": "tiny",
                    "prompt": "hello",
                    "max_tokens": 300,
                    "stop": ["xxxx"],
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
        )
        ask_all(server.url, asks, at_once=10)
        dying = [
            Ask(
                f"dying-{number}",
                {
                    "model": "tiny",
                    "prompt": [5] * 50,
                    "max_tokens": 1500,
                    "ignore_eos": True,
                    "stream": True,
                },
            )
            for number in range(3)
        ]
        core = next(r.identity.pid for r in server.engine.rings if r.identity.role == "core")
        _kill_while_asking(server, dying, core)
    time.sleep(6)  # that a process was killed is known by its silence
    lines = export(server)
    lost = [r for r in of_kind(lines, "request") if r["finish"] == "engine_lost"]
    assert {request["external_id"] for request in lost} == {ask.name for ask in dying}
    answered = [line for line in lines if line not in lost]
    seen = hold_to_the_laws(answered, asks, was_core_killed=True)
    report("prefix cache", seen, agreement(lines, asks))
    assert seen["cached"] > 0
    assert seen["recomputed"] == seen["guessed"] == 0
    assert seen["finishes"]["stop"] == 1


def _kill_while_asking(server: Server, asks: list[Ask], core: int) -> None:
    asking = threading.Thread(target=_ask_the_dying, args=(server.url, asks))
    asking.start()
    time.sleep(1.5)
    os.kill(core, signal.SIGKILL)
    asking.join(60)
    assert not asking.is_alive()


def _ask_the_dying(url: str, asks: list[Ask]) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        ask_all(url, asks, at_once=len(asks))


@pytest.mark.conformance("vLLM", "speculative decoding (n-gram)")
def test_draft_tokens_are_verified_beside_the_decodes(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with serving(tmp_path, "--speculative-config", json.dumps(drafts)) as server:
        asks = mixed_asks(3, 16, prompts=(10, 300), outputs=(20, 80))
        ask_all(server.url, asks, at_once=6)
        num_drafts = metric(server, "vllm:spec_decode_num_draft_tokens")
        assert stop(server) == 0
    lines = export(server)
    seen = hold_to_the_laws(lines, asks)
    report("n-gram drafts", {**seen, "vllm": num_drafts}, agreement(lines, asks))
    assert seen["guessed"] > 0


@pytest.mark.conformance("vLLM", "several API servers")
def test_several_front_ends_have_a_ring_each(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2") as server:
        asks = mixed_asks(4, 20, prompts=(10, 300), outputs=(5, 40))
        ask_all(server.url, asks, at_once=8)
        rings = [(ring.identity.role, ring.identity.rank) for ring in server.engine.rings]
        assert stop(server) == 0
    assert sorted(rings) == [("core", 0), ("frontend", 0), ("frontend", 1), ("worker", 0)]
    lines = export(server)
    report("two front ends", hold_to_the_laws(lines, asks), agreement(lines, asks))


@pytest.mark.conformance("vLLM", "data-parallel replicas")
def test_replicas_count_their_own_steps(tmp_path: Path) -> None:
    with serving(tmp_path, "--data-parallel-size", "2") as server:
        asks = mixed_asks(5, 20, prompts=(10, 300), outputs=(5, 40))
        ask_all(server.url, asks, at_once=8)
        rings = {(ring.identity.role, ring.identity.rank) for ring in server.engine.rings}
        assert stop(server) == 0
    assert rings >= {("core", 0), ("core", 1), ("worker", 0), ("worker", 1)}
    lines = export(server)
    report("two replicas", hold_to_the_laws(lines, asks), agreement(lines, asks))
    assert {step["dp_rank"] for step in of_kind(lines, "step")} == {0, 1}


OFFLINE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=1024, enforce_eager=True)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    prompts = [{"prompt_token_ids": list(range(10, 40 + 9 * i))} for i in range(6)]
    answers = llm.generate(prompts, sampling)
    assert all(len(answer.outputs[0].token_ids) == 16 for answer in answers)
"""


@pytest.mark.conformance("vLLM", "offline, without a server")
@pytest.mark.parametrize("is_split", ["1", "0"], ids=["own processes", "one process"])
def test_generating_offline_is_seen_from_the_engine(tmp_path: Path, is_split: str) -> None:
    (tmp_path / "offline.py").write_text(OFFLINE)
    record = tmp_path / "offline.isr"
    python = str(VLLM.parent / "python")
    words = ["run", "--record", str(record), "--", python, "offline.py", str(CHECKPOINT)]
    variables = {**environment(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": is_split}
    command = [sys.executable, "-m", "inferscope"]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "offline.jsonl"
    subprocess.run([*command, "export", str(record), "-o", str(out)], check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    (run,) = of_kind(lines, "run")
    assert (run["lost"], run["late"], run["unjoined"]) == (0, 0, 0)
    requests = of_kind(lines, "request")
    assert sorted(request["prompt_tokens"] for request in requests) == [
        30 + 9 * i for i in range(6)
    ]
    for request in requests:
        assert (request["output_tokens"], request["finish"]) == (16, "length")
        assert request["arrived_at"] == request["delivered_at"] == "engine"
        shares = [s for step in of_kind(lines, "step") for s in step["shares"]]
        spent = sum(s["tokens"] for s in shares if s["request"] == request["request"])
        assert spent == request["prompt_tokens"] - request["cached_tokens"] + 15


SABOTAGE = """
import sys
from inferscope.adapters import vllm_frontend, vllm_steps, vllm_worker

def broken(*args, **kwargs):
    raise RuntimeError("our own mistake")

vllm_steps.Core.updated = broken
vllm_worker.WorkerHooks.sampled = broken
vllm_frontend.FrontEndHooks.processed = broken
"""


@pytest.mark.conformance("vLLM", "a fault of ours changes no answer")
def test_faults_of_ours_are_said_once_and_every_answer_comes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(tmp_path / "server", PYTHONPATH=path) as server:
        asks = mixed_asks(6, 12, prompts=(10, 300), outputs=(5, 40))
        ask_all(server.url, asks, at_once=4)
        assert stop(server) == 0
    whole = [ask for ask in asks if ask.is_whole]
    assert len(whole) > 8
    for ask in whole:
        assert ask.usage["completion_tokens"] == ask.body["max_tokens"] * ask.body.get("n", 1)
    said = [line for line in server.log().splitlines() if "our own mistake" in line]
    assert len(said) == 3, said


@pytest.mark.conformance("vLLM", "the same answers with and without the probe")
def test_answers_are_the_same_with_and_without_the_probe(tmp_path: Path) -> None:
    answers = []
    for is_observed in (True, False):
        with serving(tmp_path / str(is_observed), is_observed=is_observed) as server:
            asks = [
                Ask(
                    f"same-{number}",
                    {
                        "model": "tiny",
                        "prompt": list(range(10, 60 + number)),
                        "max_tokens": 40,
                        "ignore_eos": True,
                        "temperature": 0,
                        "logprobs": 1,
                    },
                )
                for number in range(8)
            ]
            ask_all(server.url, asks, at_once=1)
            assert all(ask.status == 200 for ask in asks)
            answers.append([ask.text for ask in asks])
            assert stop(server) == 0
        if is_observed:
            lines = export(server)
            report("one at a time", hold_to_the_laws(lines, asks), agreement(lines, asks))
        else:
            assert not (server.folder / "rings").exists()
    assert answers[0] == answers[1]
