"""Injected causes: whether the ledger names the injected cause, and with which duration.

    python benchmarks/ledger_causes.py [--only CAUSE] [--requests N] [--seed N] [--out FILE]

For each cause, the product's own server and load generator run three times over in one life of the
server (see `injecting` for how a fault gets into it):

    calibrate   sets the objective: 1.25 times the 99th percentile of the metric
    clean       what breaches here and is named with a fault's cause is a false accusation
    fault       the same requests at the same times as in `clean`, and the fault strikes

What was injected into each request is known by the fault's own clock. A request that was struck and
missed its objective counts; the top cause that `attribution.breach` names has to be the injected
one. Its row has to have grown by what was injected, from the request's twin in the clean part to
the request, and all other rows by nothing.

Other load takes the step loop's core away, which the loop's own clock shows (elapsed time minus its
thread's time). A request that lost more time this way than by the fault has two causes and is not
judged. If a clean request exceeded its objective by such a loss, `slowdown` or `cpu_gap` is true.
Both are counted separately. Frequent losses make the objectives meaningless: run this while
`others' cores` stays below 0.1.

The rules were tuned with seeds below 100; reported results use seeds from 100 on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cause_runs import SCENARIOS, Parts, Scenario, Truth, run
from probe_cost import machine

from inferscope import __version__
from inferscope.attribution.breach import LatencyLimit, breaches
from inferscope.attribution.metric_breakdown import breakdown
from inferscope.attribution.peers import Peers
from inferscope.fold.final_records import FinalRequest
from inferscope.records import CAUSES

SLACK = 1.25
"""Frozen factor of the objectives over the calibration's 99th percentile."""
FAULTS = frozenset(
    {"frontend", "preempted", "recompute", "cpu_gap", "slowdown", "cold_start", "output",
     "delivery", "decode_interference"}
)  # fmt: skip
"""Causes whose naming is an accusation, which is false if nothing was injected."""
ROBBERY = frozenset({"slowdown", "cpu_gap"})
"""Causes of a step loop without its core. If its own clock shows that for as long as the request
exceeded its objective, the accusation is true although no fault was injected."""
LEAST_STRUCK_NS = 1_000_000
NAMED_SHARE, MAGNITUDE, OTHERS, FALSE_SHARE = 0.95, 0.15, 0.05, 0.02


def metric_rows(request: FinalRequest, scenario: Scenario) -> list[int]:
    """Return a request's ledger in the span of the scenario's metric: [causes]."""
    within = breakdown(request, scenario.metric)
    return [0 if within is None else within.by_cause.get(cause, 0) for cause in CAUSES]


def metric_ns(request: FinalRequest, scenario: Scenario) -> float:
    """Return the metric; for gaps between tokens, the longest."""
    within = breakdown(request, scenario.metric)
    if within is None:
        return 0.0
    return max(request.tbt_ns) if scenario.metric == "tbt" else within.whole_ns / within.num_gaps


def score(scenario: Scenario, parts: Parts, truth: Truth) -> dict[str, Any]:
    """Judge one scenario's run."""
    calibrated = [metric_ns(request, scenario) for request in parts["calibrate"].values()]
    objective = LatencyLimit(scenario.metric, round(SLACK * float(np.quantile(calibrated, 0.99))))
    peers = Peers([request for part in parts.values() for request in part.values()])

    clean = {name: breaches(r, [objective], peers) for name, r in parts["clean"].items()}
    accused, deserved = 0, 0
    for name, missed in clean.items():
        if missed and missed[0].top in FAULTS:
            is_robbed = truth.robbed_ns(parts["clean"][name]) >= missed[0].over_ns
            deserved += is_robbed and missed[0].top in ROBBERY
            accused += 1

    named: Counter[str] = Counter()
    growths, injected = [], []
    num_unstruck = num_robbed = 0
    for name, request in parts["fault"].items():
        missed = breaches(request, [objective], peers)
        injected_ns = truth.injected_ns(request)
        if injected_ns < LEAST_STRUCK_NS:
            num_unstruck += bool(missed)
            continue
        if not missed:
            continue
        if not scenario.co_tenants and truth.robbed_ns(request) > injected_ns:
            num_robbed += 1
            continue
        named[str(missed[0].top)] += 1
        twin = parts["clean"].get(name)
        if twin is not None:
            row, before = metric_rows(request, scenario), metric_rows(twin, scenario)
            growths.append(np.subtract(row, before).tolist())
            injected.append(injected_ns - truth.injected_ns(twin))
    right = sum(num for cause, num in named.items() if cause in scenario.accepted)
    grown = np.array(growths, dtype=np.float64).reshape(-1, len(CAUSES))
    mine = [CAUSES.index(cause) for cause in sorted(scenario.rows)]
    whole_ns = sum(injected) or 1
    others = dict(zip(CAUSES, (grown.sum(axis=0) / whole_ns).tolist(), strict=True))
    growth = sum(others.pop(cause) for cause in scenario.rows) - 1
    each = grown[:, mine].sum(axis=1) / np.array(injected) - 1
    return {
        "cause": scenario.name,
        "metric": scenario.metric,
        "accepted": sorted(scenario.accepted),
        "rows": sorted(scenario.rows),
        "objective_ms": objective.limit_ns / 1e6,
        "requests": len(parts["fault"]),
        "breaching": sum(named.values()),
        "named": dict(named.most_common()),
        "named_share": right / max(1, sum(named.values())),
        "injected_ms_each": whole_ns / 1e6 / max(1, len(injected)),
        "growth": growth,
        "within_15_percent": float(np.sum(np.abs(each) <= MAGNITUDE)) / max(1, len(injected)),
        "others": {cause: grown for cause, grown in others.items() if grown},
        "breaching_unstruck": num_unstruck,
        "breaching_robbed": num_robbed,
        "clean_requests": len(parts["clean"]),
        "clean_breaching": sum(map(bool, clean.values())),
        "clean_named": dict(Counter(str(b[0].top) for b in clean.values() if b)),
        "accused": accused,
        "falsely_accused": accused - deserved,
        **truth.notes,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    other, grown = max(row["others"].items(), key=lambda one: float(one[1]))
    return (
        f"{row['cause']:<18}{row['metric']:<6}{row['objective_ms']:>8.1f}{row['breaching']:>8}"
        f"{row['named_share']:>8.1%}{row['injected_ms_each']:>9.1f}{row['growth']:>+9.1%}"
        f"{row['within_15_percent']:>8.0%}  {other + f' {grown:+.1%}':<26}"
        f"{row['falsely_accused']:>4} of {row['clean_requests']:<6}{row['foreign_cores']:.2f}"
    )


def passes(row: dict[str, Any]) -> bool:
    """Return whether a row meets all targets."""
    return (
        row["breaching"] >= 100
        and row["named_share"] >= NAMED_SHARE
        and abs(row["growth"]) <= MAGNITUDE
        and all(grown < OTHERS for grown in row["others"].values())
        and row["falsely_accused"] <= FALSE_SHARE * row["clean_requests"]
    )


def measure(scenario: Scenario, *, seed: int, requests: int | None) -> dict[str, Any]:
    """Run a scenario and judge it."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        parts, truth, foreign = run(scenario, Path(folder), seed=seed, requests=requests)
        row = score(scenario, parts, truth)
    return row | {"load_before": load_before, "foreign_cores": foreign, "passes": passes(row)}


def main() -> int:
    """Measure, print a table and write JSON; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[one.name for one in SCENARIOS], metavar="CAUSE")
    parser.add_argument("--requests", type=int, help="of the faulty part (default: by cause)")
    parser.add_argument("--seed", type=int, default=100, help="below 100: for tuning (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    about = machine()
    print(
        f"{'injected':<18}{'metric':<6}{'goal ms':>8}{'missed':>8}{'named':>8}{'inj. ms':>9}"
        f"{'its row':>9}{'≤ 15 %':>8}  {'most of the others':<26}falsely     others' cores"
    )
    rows: list[dict[str, Any]] = []
    for scenario in SCENARIOS:
        if options.only in (None, scenario.name):
            row = measure(scenario, seed=options.seed, requests=options.requests)
            print(line(row) + ("" if row["passes"] else "  MISSED"), flush=True)
            rows.append(row)
            if options.out is not None:
                write(options.out, rows, seed=options.seed, about=about)
    num_clean = sum(row["clean_requests"] for row in rows)
    num_accused = sum(row["falsely_accused"] for row in rows)
    is_met = all(row["passes"] for row in rows)
    print(
        f"{', '.join(f'{key} {value}' for key, value in about.items())}\n"
        f"falsely accused on clean runs: {num_accused} of {num_clean}; targets (named >= 95 %, its "
        f"row ± 15 %, others < 5 %, false <= 2 %): {'met' if is_met else 'MISSED'}"
    )
    return 0 if is_met else 1


def write(path: Path, rows: list[dict[str, Any]], *, seed: int, about: dict[str, Any]) -> None:
    """Write the results so far."""
    result = {
        "machine": about,
        "versions": {
            "inferscope": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seed": seed,
        "tuned_with_seeds": "below 100",
        "objective": f"{SLACK} x p99 of the calibration",
        "rows": rows,
        "met": all(row["passes"] for row in rows),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
