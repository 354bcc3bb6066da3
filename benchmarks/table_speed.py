"""Cost of pricing, splitting and explaining steps as tables, by the number of steps in a table.

Each variant does the same steps: decodes, every tenth step with a chunk of a prompt among them, in
every hundredth two. A table is made anew from columns for each window. The variants take turns in
every round; processor time, the median over rounds and the best.

    python benchmarks/table_speed.py --out benchmarks/results/table_speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attribution_speed import BUSY_NS, LLAMA_8B, padding_model
from numpy.typing import NDArray
from probe_cost import machine

from inferscope.attribution.counterfactual import delays
from inferscope.attribution.marginal import blame_weights
from inferscope.attribution.split import price, shares_ns
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.step_table import StepTable

Ints = NDArray[np.int64]
BATCHES, WINDOWS = (8, 64, 256), (1, 25, 250)


class Steps:
    """Consecutive steps of a batch, as columns."""

    def __init__(self, batch: int, num: int) -> None:
        """Draw contexts and chunks."""
        draw = np.random.default_rng(0)
        first = draw.integers(300, 3000, batch)
        self.batch, self.num = batch, num
        tokens = np.ones((num, batch), dtype=np.int64)
        for step in range(5, num, 10):
            num_chunks = 2 if step % 100 == 55 else 1
            tokens[step, :num_chunks] = draw.integers(16, 1024, num_chunks)
        self.tokens = tokens.reshape(-1)
        self.context = (first + np.arange(num)[:, None]).reshape(-1)
        self.sampled = np.ones(len(self.tokens), dtype=np.int64)
        self.is_prefill = self.tokens > 1

    def as_tables(self, model: StepModel, window: int, *, with_blame: bool = False) -> None:
        """Process the steps one window at a time, with blame if requested."""
        for start in range(0, self.num, window):
            num = min(window, self.num - start)
            at = slice(start * self.batch, (start + num) * self.batch)
            sizes = np.full(num, self.batch)
            table = StepTable(
                self.tokens[at], self.context[at], self.sampled[at], self.is_prefill[at], sizes
            )
            priced, busy_ns = price(model, table), np.full(num, BUSY_NS)
            shares_ns(priced, busy_ns)
            delays(priced, busy_ns, np.ones(num))
            if with_blame:
                blame_weights(priced)


def measure(batch: int, *, rounds: int, num: int) -> dict[str, dict[str, float]]:
    """Return µs per step by variant: best and median round."""
    steps = Steps(batch, num)
    compared: dict[str, Callable[[], None]] = {}
    plain = roofline(LLAMA_8B, peaks_of("NVIDIA H200"))
    for name, model in (("", plain), (", padded attention", padding_model(plain))):
        for window in WINDOWS:
            compared[f"window of {window}{name}"] = partial(steps.as_tables, model, window)
            compared[f"window of {window}{name}, with blame"] = partial(
                steps.as_tables, model, window, with_blame=True
            )
    costs: dict[str, list[float]] = {name: [] for name in compared}
    for work in compared.values():  # once, to fill caches
        work()
    for _ in range(rounds):
        for name, work in compared.items():
            began_ns = time.process_time_ns()
            work()
            costs[name].append((time.process_time_ns() - began_ns) / num / 1e3)
    return {
        name: {"min": round(min(found), 2), "median": round(statistics.median(found), 2)}
        for name, found in costs.items()
    }


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500, help="of a variant in a round")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    about, found = machine(), {}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for batch in BATCHES:
        rows: dict[str, Any] = measure(batch, rounds=options.rounds, num=options.steps)
        found[batch] = rows
        print(f"{f'µs per step of {batch}':<40}{'median':>9}{'min':>9}")
        for name, row in rows.items():
            print(f"{name:<40}{row['median']:>9.1f}{row['min']:>9.1f}")
    if options.out is not None:
        result = {"machine": about, "rounds": options.rounds, "us_per_step": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
