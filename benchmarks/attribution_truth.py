"""The fair split against measured costs of a real engine's step with subsets of its batch.

1. The engine serves a varied load. Its records are folded, and the cost model that they taught is
   frozen and hashed: it never sees a step of what follows (`served.py`).
2. Steps are drawn, of 4 to 64 requests. With at most six, every subset of them is measured; with
   more, every set of the prefill chunks with a ladder of numbers of decodes (`ablation.py`). The
   repeats are interleaved in random order, each after some steps of its decodes, as in a server; a
   coalition costs their median, each corrected by how slow the machine was around it.
3. The Shapley value of these costs is the truth (`exact_shapley.py`). Beside every error stands by
   how much two halves of the repeats differ. No step is dropped.

Scored are (a) each prefill's share and that of all decodes, (b) the part of the step that goes to
the wrong request, (c) each request's share where the halves agree to 5 %; beside ours, division by
tokens and by heads (`truth_score.py`). And the interference: what decodes wait for prefills,
measured, against the ledger's.

One thread on one core computes everything. Other load distorts both the cost model and the
measurements, so the benchmark needs a quiet machine.

    python benchmarks/attribution_truth.py --model builtin --gap 1 --out truth.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ablation import Scene, coalitions, measure
from probe_cost import machine
from served import Frozen, learn, open_engine, step_shapes
from truth_score import RULES, judge, summary, targets


def take_apart(options: argparse.Namespace) -> tuple[Frozen, list[dict[str, Any]]]:
    """Serve, freeze the model, then measure and judge each step, printing it at once."""
    engine, runner = open_engine(options.model, options.dtype)
    frozen = learn(engine, options.model, random.Random(f"load {options.seed}"), options.served)
    print(
        f"{options.model} {options.dtype}: {frozen.num_steps} steps served, fit "
        f"{frozen.model.fit_id}, residual {frozen.residual:+.1%}, "
        f"coefficients {frozen.sha256[:16]}\n\n{HEAD}",
        flush=True,
    )
    draw = random.Random(f"steps {options.seed}")
    rows = []
    for shape in step_shapes(draw, options.steps):
        scene = Scene(engine, runner, shape, draw)
        run = coalitions(shape, options.gap)
        runs = measure(scene, run.members, repeats=options.repeats, draw=draw)
        scene.close()
        rows.append(judge(frozen, shape, run, runs))
        print(line(rows[-1]), flush=True)
    return frozen, rows


HEAD = (
    f"{'batch':>5} {'prefills':>16} {'context':>8} {'step ms':>8} {'model':>7} {'halves':>7} | "
    f"{'worst share':>12} | misallocated: {'fair':>6} {'tokens':>7} {'equal':>7} | interference"
)


def line(row: dict[str, Any]) -> str:
    """Return a step as a row of the table."""
    chunks = "+".join(f"{tokens}@{context}" for tokens, context, _ in row["chunks"])
    contexts, wrong, waits = row["decode_contexts"], row["misallocated"], row["interference"]
    return (
        f"{row['decodes'] + len(row['chunks']):>5} {chunks:>16} {contexts[-1]:>8} "
        f"{row['step_ms']:>8.2f} {row['modelled_ms'] / row['step_ms'] - 1:>+7.0%} "
        f"{max(row['split_half']):>7.1%} | {max(row['error']['fair']):>12.1%} | "
        f"{'':>13} {wrong['fair']:>6.1%} {wrong['tokens']:>7.1%} {wrong['equal']:>7.1%} | "
        f"{waits['ledger_ms']:.1f} of {waits['measured_ms']:.1f} ms"
    )


def report(scores: dict[str, Any], reached: dict[str, tuple[float, float]]) -> None:
    """Print the totals over all steps."""
    print(f"\n{'':<8} {'shares (a)':>22} {'misallocated (b)':>22} {'requests (c)':>22}")
    for name in RULES:
        rule = scores["rules"][name]
        shares, wrong, requests = rule["shares"], rule["misallocated"], rule["requests"]
        print(
            f"{name:<8} {shares['median']:>8.1%} p95 {shares['p95']:>7.1%}   "
            f"{wrong['mean']:>8.1%} max {wrong['max']:>7.1%}   "
            f"{requests['median']:>8.1%} p95 {requests['p95']:>7.1%}"
        )
    of = scores["truth"]
    print(
        f"{'halves':<8} {of['split_half']['median']:>8.1%} p95 {of['split_half']['p95']:>7.1%}"
        f"   {of['split_half_misallocated']['mean']:>8.1%} max "
        f"{of['split_half_misallocated']['max']:>7.1%}"
    )
    for name, waits in scores["interference"].items():
        print(f"interference, {name}: off by {waits['median']:.1%}, p95 {waits['p95']:.1%}")
    for name, (is_at, most) in reached.items():
        print(f"{name:<24} {is_at:>7.1%}  (at most {most:.1%}) {'' if is_at <= most else 'MISSED'}")


def main() -> int:
    """Measure steps, print a table and write JSON; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="random:small-100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--served", type=int, default=3000, help="steps to fit the model on")
    parser.add_argument("--steps", type=int, default=30, help="steps to measure")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each coalition")
    parser.add_argument(
        "--gap", type=float, default=2.0, help="between numbers of decodes, as a factor; 1: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    about = machine() | {"torch": torch.__version__, "num_threads": 1}
    began_s = time.monotonic()
    frozen, rows = take_apart(options)
    scores = summary(rows)
    reached = targets(scores)
    report(scores, reached)
    if options.out is not None:
        result = {
            "machine": about,
            "took_s": round(time.monotonic() - began_s),
            "options": {name: str(value) for name, value in vars(options).items()},
            "coefficients": {
                "fit_id": frozen.model.fit_id,
                "sha256": frozen.sha256,
                "served_steps": frozen.num_steps,
                "residual": frozen.residual,
                "healthy_ratio": frozen.healthy_ratio,
            },
            "scores": scores,
            "targets": {
                name: {"reached": is_at, "at_most": most, "is_met": is_at <= most}
                for name, (is_at, most) in reached.items()
            },
            "steps": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(is_at <= most for is_at, most in reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
