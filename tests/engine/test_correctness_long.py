"""Slow comparison with transformers under random options, run by `make test-engines`."""

from __future__ import annotations

import random

import pytest

from inferscope.engine import EngineOptions, Sampling, load_engine
from tests.engine.checkpoints import VOCAB, Checkpoint, prompts
from tests.engine.test_correctness import assert_greedy, generated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ROUNDS = 12
NUM_PROMPTS = 24


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_output_equals_transformers_under_random_options(checkpoint: Checkpoint, seed: int) -> None:
    draw = random.Random(seed)
    block_tokens = draw.choice([3, 4, 8, 16])
    options = EngineOptions(
        dtype="float32",
        token_budget=draw.choice([5, 16, 48, 300]),
        max_running=draw.choice([2, 6, 32]),
        block_tokens=block_tokens,
        num_blocks=draw.choice([260, 400, 1000]) // block_tokens,
        prefix_cache=draw.random() < 0.7,
    )
    engine = load_engine(str(checkpoint.folder), options)
    limit = engine.max_model_tokens
    submitted = []
    for prompt in prompts(NUM_PROMPTS, vocab=VOCAB, seed=seed):
        num_output = draw.randint(1, 40)
        fitting = prompt[: limit - num_output - 1]
        submitted.append((fitting, num_output))
    waiting = list(submitted)
    tokens: dict[str, list[int]] = {}
    ids = []
    while waiting or engine.has_work:
        for _ in range(draw.randint(0, 3)):  # these arrive while others run
            if waiting:
                prompt, num_output = waiting.pop(0)
                ids.append(engine.submit(prompt, Sampling(max_tokens=num_output)))
        if engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request.request_id, []).extend(output.tokens)
    for request_id, (prompt, num_output) in zip(ids, submitted, strict=True):
        output = tokens[request_id]
        assert len(output) == num_output
        if output != generated(checkpoint.reference, prompt, num_output):
            assert_greedy(checkpoint.reference, prompt, output)
    assert engine.pool.num_used == 0
