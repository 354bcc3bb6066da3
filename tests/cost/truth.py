"""A made-up device that differs from the model in what real ones do, and traffic for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from inferscope.cost.step_table import StepTable
from inferscope.records import Shape

SMALL = Shape(12, 768, 12, 4, 64, 2048, 8192, 32, 32, 32)


class Truth:
    """A smooth knee, tiles of 8 tokens, attention padded to the longest, its own efficiencies."""

    def __init__(self, draw: random.Random, *, noise: float = 0.0, padded_share: float = 0.5):
        self.draw = draw
        self.noise = noise
        self.launch_ns = 4e5 * draw.uniform(0.7, 1.3)
        self.token_ns = 3e4 * draw.uniform(0.7, 1.3)
        self.weights_ns = 2e6 * draw.uniform(0.7, 1.3)
        self.key_ns = 300 * draw.uniform(0.7, 1.3)
        self.pair_ns = 25 * draw.uniform(0.7, 1.3)
        self.padded_share = padded_share

    def step_ns(self, batch: StepTable) -> int:
        num_single, num_rows = batch.num_single.item(), batch.num_rows.item()
        tiles = -(-batch.num_tokens.item() // 8) * 8
        products = ((self.token_ns * tiles) ** 4 + self.weights_ns**4) ** 0.25
        own = self.key_ns * (1 - self.padded_share) * batch.sum_visible.item()
        own += self.key_ns * self.padded_share * num_single * batch.longest.item()
        own += self.pair_ns * float(np.sum(batch.chunk_pairs))
        whole = self.launch_ns + products + own + 1e4 * num_rows
        return max(1, round(whole * (1 + self.noise * self.draw.gauss(0, 1))))


def traffic(draw: random.Random, num_steps: int) -> Iterator[StepTable]:
    """Requests come, are prefilled in chunks of a budget, decode and go."""
    budget = 128
    running: list[list[int]] = []  # context, prompt left, tokens left
    for _ in range(num_steps):
        if len(running) < 16 and (draw.random() < 0.12 or not running):
            running.append([0, draw.randint(20, 900), draw.randint(10, 120)])
        left = budget - sum(1 for r in running if not r[1])
        slices = []
        for request in running:
            tokens = 1 if not request[1] else min(request[1], left)
            if not tokens:
                continue
            left -= tokens if request[1] else 0
            ends = tokens >= request[1]
            slices.append((tokens, request[0], int(ends)))
            request[0] += tokens
            request[1] = max(0, request[1] - tokens)
            request[2] -= ends
        running = [r for r in running if r[2] > 0]
        tokens, contexts, sampled = (np.array(column) for column in zip(*slices, strict=True))
        yield StepTable.of(tokens, contexts, sampled)
