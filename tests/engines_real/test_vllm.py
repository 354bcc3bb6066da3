"""On a real vLLM server: every token counted, every nanosecond explained, no answer changed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines_real.clients import Ask, ask_all, mixed_asks
from tests.engines_real.vllm_laws import agreement, hold_to_the_laws, metric, of_kind, report
from tests.engines_real.vllm_server import (
    CHECKPOINT,
    VLLM,
    environment,
    export,
    needs_vllm,
    serving,
    stop,
)

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]


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
        time.sleep(1)  # the front end informs the core; a core stopped before that writes no record
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
        assert stop(server) == 0
    lines = export(server)
    seen = hold_to_the_laws(lines, asks)
    report("prefix cache", seen, agreement(lines, asks))
    assert seen["cached"] > 0
    assert seen["recomputed"] == seen["guessed"] == 0
    assert seen["finishes"]["stop"] == 1


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


LOADED = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
print("loaded", *(name for name in sys.modules if name.startswith("inferscope")))
"""


@pytest.mark.conformance("vLLM", "imports nothing unless switched on")
@pytest.mark.parametrize("is_on", ["0", "1"])
def test_vllm_loads_nothing_of_ours_unless_asked(tmp_path: Path, is_on: str) -> None:
    done = subprocess.run(
        [VLLM.parent / "python", "-c", LOADED],
        env={**environment(tmp_path), "INFERSCOPE": is_on},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("loaded"))
    loaded = set(line.split()[1:])
    assert "inferscope.adapters.vllm.plugin" in loaded
    assert ("inferscope.adapters.vllm.hooks" in loaded) == (is_on == "1")
    if is_on == "0":
        assert not any(name.startswith("inferscope.probe") for name in loaded)
        assert not (tmp_path / "rings").exists()


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
