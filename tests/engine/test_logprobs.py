"""Tests that log probabilities are transformers', whatever else a step does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferscope.engine import BadRequest, Engine, EngineOptions, Request, Sampling, load_engine
from inferscope.engine.request import TokenLogprobs
from tests.engine.checkpoints import VOCAB, Checkpoint, prompts

Build = Callable[..., Engine]
TOLERANCE = 2e-4
"""Difference of log probabilities from float32 sums in another order; they reach -20 here."""
PROMPTS = prompts(8, vocab=VOCAB)
SAMPLINGS = [
    Sampling(max_tokens=20, logprobs=5),
    Sampling(max_tokens=20),
    Sampling(max_tokens=20, logprobs=20, temperature=1.3, seed=3),
    Sampling(max_tokens=20, logprobs=0, temperature=0.7, top_k=4, top_p=0.9, seed=4),
    Sampling(max_tokens=20, logprobs=1, min_tokens=20, stop_token_ids=tuple(range(200))),
]
"""Every second request asks for other log probabilities, and one of five for none."""
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {"prefix_cache": False},
    "chunks": {"token_budget": 11},
    "prefix hits": {"max_running": 2},
    "preemption": {"num_blocks": 46, "block_tokens": 4},
    "drafts": {"speculative": "ngram"},
    "draft model": {
        **{"speculative": "draft", "draft_model": f"random:tiny,layers=1,vocab={VOCAB}"},
    },
    "overlap": {"overlap": True, "token_budget": 24, "num_blocks": 46, "block_tokens": 4},
    "all together": {
        **{"speculative": "ngram", "num_speculative_tokens": 3, "token_budget": 24},
        **{"num_blocks": 50, "block_tokens": 4},
    },
}


def serve(engine: Engine) -> list[tuple[Request, list[TokenLogprobs]]]:
    """Serve each prompt with its sampling; return the requests and their log probabilities."""
    ids = [
        engine.submit(prompt, SAMPLINGS[idx % len(SAMPLINGS)]) for idx, prompt in enumerate(PROMPTS)
    ]
    requests: dict[str, Request] = {}
    found: dict[str, list[TokenLogprobs]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            requests[output.request.request_id] = output.request
            found[output.request.request_id] += output.logprobs
            assert len(output.logprobs) in (0, len(output.tokens))
    return [(requests[request_id], found[request_id]) for request_id in ids]


def assert_those_of(reference: Any, request: Request, found: list[TokenLogprobs]) -> None:
    """Assert that log probabilities are the reference's after the same tokens."""
    num = request.sampling.logprobs
    if num is None:
        assert found == []
        return
    output = request.tokens[request.num_prompt :]
    assert [one.token for one in found] == output
    with torch.inference_mode():
        logits = reference(torch.tensor([request.tokens])).logits[0, request.num_prompt - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    for row, one in zip(expected, found, strict=True):
        assert one.logprob == pytest.approx(row[one.token].item(), abs=TOLERANCE)
        likeliest = row.topk(num).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(likeliest, abs=TOLERANCE)
        of_tokens = [row[token].item() for token, _ in one.top]
        assert of_tokens == pytest.approx(likeliest, abs=TOLERANCE)
        assert len({token for token, _ in one.top}) == num


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_equal_transformers(checkpoint: Checkpoint, way: str) -> None:
    engine = load_engine(str(checkpoint.folder), EngineOptions(dtype="float32", **WAYS[way]))
    try:
        served = serve(engine)
    finally:
        engine.close()  # with overlap it has a worker
    for request, found in served:
        assert_those_of(checkpoint.reference, request, found)
    assert engine.pool.num_used == 0


@pytest.mark.thorough
def test_a_worker_returns_the_same_log_probabilities(llama: Checkpoint) -> None:
    options = EngineOptions(dtype="float32", **WAYS["all together"])
    remote = load_engine(str(llama.folder), options, in_worker=True)
    try:
        found = [logprobs for _, logprobs in serve(remote)]
    finally:
        remote.close()
    local = load_engine(str(llama.folder), options)
    assert found == [logprobs for _, logprobs in serve(local)]


def test_accepted_drafts_have_log_probabilities_and_those_behind_a_stop_have_none(
    tiny_engine: Build,
) -> None:
    prompt = [5, 6, 7, 8] * 4
    sampling = Sampling(max_tokens=40, logprobs=2)
    alone = tiny_engine()
    alone.submit(prompt, sampling)
    expected = drained(alone)
    engine = tiny_engine(speculative="ngram")
    engine.submit(prompt, sampling)
    assert_close(drained(engine), expected)
    stop = expected[random.Random(2).randrange(10, 30)].token
    engine.submit(prompt, Sampling(max_tokens=40, logprobs=2, stop_token_ids=(stop,)))
    ends = [one.token for one in expected].index(stop) + 1
    assert_close(drained(engine), expected[:ends])


def drained(engine: Engine) -> list[TokenLogprobs]:
    found = []
    while engine.has_work:
        for output in engine.step():
            assert len(output.logprobs) == len(output.tokens)
            found += output.logprobs
    return found


def assert_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def test_log_probabilities_change_no_token(tiny_engine: Build) -> None:
    given = prompts(6, vocab=64)
    for plain in SAMPLINGS:
        asked = Sampling(
            max_tokens=20,
            temperature=plain.temperature,
            top_k=plain.top_k,
            top_p=plain.top_p,
            seed=plain.seed,
            logprobs=7,
        )
        unasked = Sampling(**{**vars(asked), "logprobs": None})
        assert tiny_engine().generate(given, asked) == tiny_engine().generate(given, unasked)


def test_requests_without_log_probabilities_compute_none(
    tiny_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **given: object) -> None:
        raise AssertionError("log probabilities are computed")

    engine = tiny_engine()
    monkeypatch.setattr(torch.Tensor, "log_softmax", fail)
    engine.generate([[1, 2, 3]], Sampling(max_tokens=4))
    engine.submit([1, 2, 3], Sampling(max_tokens=4, logprobs=0))
    (output,) = engine.step()
    assert output.finish == "error"


@pytest.mark.parametrize("num", [-1, 21])
def test_numbers_out_of_bounds_are_refused(num: int) -> None:
    with pytest.raises(BadRequest, match="Give 0 to 20"):
        Sampling(logprobs=num)
