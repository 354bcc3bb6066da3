"""Cost of splitting a step: alone, within the fold, by naive rules, and as spans.

The split alone covers everything from a step's contexts to its requests' whole nanoseconds: a table
of this one step, its attention, the fair shares, scaling and rounding; `table_speed.py` measures
tables of many steps. The comparison covers the other rules, the naive ones (which need no model),
and one OpenTelemetry span per slice, with three attributes and no exporter. The variants alternate
in every round, so that other load affects all of them alike. Results are processor time: median,
best and worst round.

    python benchmarks/attribution_speed.py --out benchmarks/results/attribution_speed.json
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
from collector_speed import LLAMA_8B, busy_engine, fold_rates
from naive_rules import by_tokens, equal, whole_step
from numpy.typing import NDArray
from opentelemetry.sdk.trace import TracerProvider
from probe_cost import machine

from inferscope.attribution.split import price
from inferscope.attribution.split_rules import COLUMNS, column_ns, rule_shares_ns
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.step_table import StepTable
from inferscope.records import encode

Ints = NDArray[np.int64]
Variant = Callable[[], object]
"""Function that processes a number of steps."""

BUSY_NS = 9_000_000
CHUNKS = {0: (), 1: ((5, 512, 1),), 2: ((5, 512, 1), (40, 256, 0))}
"""Position, tokens and sampled rows of each prefill, by the number of prefills."""


def padding_model(model: StepModel) -> StepModel:
    """Return a cost model that pads decode attention to the longest context."""
    return StepModel(
        "padded", model.source, model.f_ns, model.g_ns, model.single_ns, model.single_ns, 0.0,
        model.pair_ns, model.context_ns,
    )  # fmt: skip


class Steps:
    """Consecutive steps of a batch."""

    def __init__(self, batch: int, num_prefills: int, num: int) -> None:
        """Draw contexts, each of which grows by one per step."""
        draw = np.random.default_rng(0)
        first = draw.integers(300, 3000, batch)
        self.contexts = [first + step for step in range(num)]
        self.chunks = CHUNKS[num_prefills]
        self.tokens, sampled = np.ones(batch, dtype=np.int64), np.ones(batch, dtype=np.int64)
        for at, tokens, rows in self.chunks:
            self.tokens[at], sampled[at] = tokens, rows
        self.sampled, self.prefills = sampled, [at for at, _, _ in self.chunks]

    def by_rule(self, model: StepModel, rule: str) -> None:
        """Split steps one by one by a rule, from contexts to shares."""
        divide = column_ns if rule in COLUMNS else rule_shares_ns
        for contexts in self.contexts:
            table = StepTable.of(self.tokens, contexts, self.sampled, self.prefills)
            divide(rule, price(model, table), np.array([BUSY_NS]))

    def naively(self, rule: Callable[[Ints, int], Ints]) -> None:
        """Split steps by a rule without a cost model."""
        for _ in self.contexts:
            rule(self.tokens, BUSY_NS)

    def as_spans(self) -> None:
        """Create a span for every slice."""
        tracer, now_ns = TracerProvider(shutdown_on_exit=False).get_tracer("benchmark"), 10**18
        for contexts in self.contexts:
            for tokens, context in zip(self.tokens.tolist(), contexts.tolist(), strict=True):
                attributes = {"request": "request-17", "tokens": tokens, "context": context}
                tracer.start_span("slice", attributes=attributes, start_time=now_ns).end(
                    now_ns + BUSY_NS
                )


def variants(batch: int, num: int) -> dict[str, tuple[Variant, int]]:
    """Return the variants, each with its number of steps."""
    model = roofline(LLAMA_8B, peaks_of("NVIDIA H200"))
    padded = padding_model(model)
    none, one, two = (Steps(batch, num_prefills, num) for num_prefills in CHUNKS)
    found: dict[str, tuple[Variant, int]] = {}
    for num_prefills, steps in enumerate((none, one, two)):
        found[f"fair, {num_prefills} prefills"] = (partial(steps.by_rule, model, "fair"), num)
    found["fair, 2 prefills, padded"] = (partial(two.by_rule, padded, "fair"), num)
    for rule in ("phase", "token", *COLUMNS):
        found[f"{rule}, 2 prefills"] = (partial(two.by_rule, model, rule), num)
    for naive in (by_tokens, equal, whole_step):
        found[f"naive: {naive.__name__}"] = (partial(two.naively, naive), num)
    few = Steps(batch, 2, max(1, num // 10))
    found["one span per slice"] = (few.as_spans, len(few.contexts))
    return found


def measure(batch: int, *, rounds: int, num: int) -> dict[str, dict[str, float]]:
    """Return µs per step by variant: best, median and worst round."""
    compared = variants(batch, num)
    costs: dict[str, list[float]] = {name: [] for name in compared}
    for work, _ in compared.values():  # once, to fill caches
        work()
    for _ in range(rounds):
        for name, (work, steps) in compared.items():
            began_ns = time.process_time_ns()
            work()
            costs[name].append((time.process_time_ns() - began_ns) / steps / 1e3)
    return {name: spread(found) for name, found in costs.items()}


def spread(costs: list[float]) -> dict[str, float]:
    """Return the best, the median and the worst value."""
    return {
        "min": round(min(costs), 2),
        "median": round(statistics.median(costs), 2),
        "max": round(max(costs), 2),
    }


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200, help="steps per variant and round")
    parser.add_argument("--fold-steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    options = parser.parse_args()

    rows = measure(options.batch, rounds=options.rounds, num=options.steps)
    frames = [(r.CODE, encode(r)) for r in busy_engine(options.fold_steps, options.batch)]
    _, fold_us = fold_rates(frames, options.fold_steps)
    rows["the whole fold, a step"] = spread(fold_us)
    of_ours = rows["fair, 2 prefills"]["median"]
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{f'µs per step of {options.batch}':<40}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}")
    table: list[dict[str, Any]] = []
    for name, row in rows.items():
        ratio = round(row["median"] / of_ours, 2)
        table.append({"what": name, "us_per_step": row, "ratio_to_fair_2_prefills": ratio})
        print(f"{name:<40}{row['median']:>9.1f}{row['min']:>9.1f}{row['max']:>9.1f}{ratio:>8.2f}")
    if options.out is not None:
        result = {
            "machine": about,
            "batch": options.batch,
            "rounds": options.rounds,
            "rows": table,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
