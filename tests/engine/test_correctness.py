"""Tests that greedy fp32 output equals transformers' under chunks, prefix hits, preemptions and
overlap."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from inferscope.engine import Engine, EngineOptions, Request, Sampling, load_model
from inferscope.engine.core import Output
from tests.engine.checkpoints import VOCAB, Checkpoint, prompts

PROMPTS = prompts(10, vocab=VOCAB)
NUM_OUTPUT = [6 + 8 * (idx % 5) for idx in range(len(PROMPTS))]
TIE_SHARE = 1e-4
"""Logit margin below which two tokens tie, and either one is correct."""

WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {"token_budget": 1024, "prefix_cache": False},
    "chunks of 7": {"token_budget": 7, "prefix_cache": False},
    "chunks of 64": {"token_budget": 64, "prefix_cache": False},
    "prefix hits": {"token_budget": 1024, "max_running": 2},
    "preemption": {"num_blocks": 46, "block_tokens": 4, "prefix_cache": False},
    "all together": {"token_budget": 40, "num_blocks": 50, "block_tokens": 4},
    "all together, odd blocks": {"token_budget": 13, "num_blocks": 30, "block_tokens": 5},
}
AHEAD = {f"{way}, overlap": {**options, "overlap": True} for way, options in WAYS.items()}


def generated(reference: Any, prompt: list[int], num_output: int) -> list[int]:
    """Return the output of transformers' greedy generation."""
    ids = torch.tensor([prompt])
    output = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
    )
    return list(output[0, len(prompt) :].tolist())


@lru_cache
def expected_outputs(reference: Any) -> list[list[int]]:
    return [
        generated(reference, prompt, num_output)
        for prompt, num_output in zip(PROMPTS, NUM_OUTPUT, strict=True)
    ]


def assert_greedy(reference: Any, prompt: list[int], output: list[int]) -> None:
    """Assert that each token is the reference's choice after the same tokens, except at ties."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = logits.amax(dim=1) - chosen
    assert (behind < TIE_SHARE * logits.std(dim=1)).all()


def serve(engine: Engine) -> tuple[list[list[int]], list[Request]]:
    ids = [
        engine.submit(prompt, Sampling(max_tokens=num_output))
        for prompt, num_output in zip(PROMPTS, NUM_OUTPUT, strict=True)
    ]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    requests: dict[str, Request] = {}
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, Output)
            tokens[output.request.request_id] += output.tokens
            requests[output.request.request_id] = output.request
    return [tokens[i] for i in ids], [requests[i] for i in ids]


@pytest.mark.parametrize("way", [*WAYS, *AHEAD])
def test_output_equals_transformers(checkpoint: Checkpoint, way: str) -> None:
    options = EngineOptions(dtype="float32", **(WAYS | AHEAD)[way])
    engine = Engine(load_model(str(checkpoint.folder), options), options)
    outputs, requests = serve(engine)

    expected = expected_outputs(checkpoint.reference)
    for prompt, output, wanted in zip(PROMPTS, outputs, expected, strict=True):
        assert len(output) == len(wanted)
        if output != wanted:
            assert_greedy(checkpoint.reference, prompt, output)

    assert engine.pool.num_used == 0
    assert not any(engine.pool.references(block) for block in range(engine.pool.num_blocks))
    was_cached = any(request.cached_tokens for request in requests)
    was_preempted = any(request.recomputed_tokens for request in requests)
    assert was_cached == ("prefix" in way or "all" in way)
    assert was_preempted == ("preemption" in way or "all" in way)
