"""Scores of every splitting rule against a step's measured coalition costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ablation import Coalitions, Runs, StepShape, costs_ns
from exact_shapley import filled, of_classes, of_subsets
from naive_rules import by_tokens, equal
from numpy.typing import NDArray
from served import Frozen

from inferscope.attribution.counterfactual import delays
from inferscope.attribution.split import Priced, parts_ns, price, to_whole_ns
from inferscope.cost.step_table import StepTable

Floats = NDArray[np.float64]

SURE = 0.05
"""Largest difference of a request's halves for which its measured share counts as reliable."""
MOST_MEDIAN, MOST_P95, MOST_MISALLOCATED, MOST_OF_NAIVE = 0.05, 0.15, 0.04, 1 / 3


@dataclass(frozen=True)
class Truth:
    """Measurements of a step.

    Attributes:
        shares_ns: [requests], the Shapley value, chunks first.
        halves_ns: [2, requests], the same from every other repeat.
        decodes_only_ns: the step without its chunks.
    """

    shares_ns: Floats
    halves_ns: Floats
    decodes_only_ns: float

    @property
    def step_ns(self) -> float:
        """Return the duration of the whole step."""
        return float(self.shares_ns.sum())


def truth(shape: StepShape, run: Coalitions, runs: Runs) -> Truth:
    """Compute the measured shares of a step's requests."""
    cost_ns = costs_ns(runs)
    chunks_alone = 2 ** len(shape.chunks)
    if run.decodes_at is None:
        decodes_only_ns = cost_ns[-chunks_alone]
    else:
        decodes_only_ns = cost_ns[len(run.decodes_at) - 1]
    halves = [shares_ns(shape, run, costs_ns(runs.half(half))) for half in (0, 1)]
    return Truth(shares_ns(shape, run, cost_ns), np.stack(halves), float(decodes_only_ns))


def shares_ns(shape: StepShape, run: Coalitions, cost_ns: Floats) -> Floats:
    """Return the Shapley value of the coalitions' costs: [requests]."""
    if run.decodes_at is None:
        return of_subsets(cost_ns)
    table = cost_ns.reshape(2 ** len(shape.chunks), len(run.decodes_at))
    chunks, decodes = of_classes(filled(table, run.decodes_at))
    num_decodes = len(shape.decodes)
    return np.concatenate([chunks, np.full(num_decodes, decodes / num_decodes)])


def priced(frozen: Frozen, shape: StepShape) -> Priced:
    """Return a step priced by the cost model."""
    tokens, sampled, contexts = (
        np.array(column, dtype=np.int64)
        for column in zip(
            *((part.num_tokens, part.is_sampled, part.context) for part in shape.parts),
            strict=True,
        )
    )
    table = StepTable.of(tokens, contexts, sampled, range(len(shape.chunks)))
    return price(frozen.model, table)


def by_ours(frozen: Frozen, shape: StepShape) -> Floats:
    """Return the fair split in the model's nanoseconds: [requests]."""
    return parts_ns(priced(frozen, shape))


RULES = ("fair", "tokens", "equal")


def divided(frozen: Frozen, shape: StepShape, step_ns: float) -> dict[str, Floats]:
    """Divide a step by every rule: [requests] each, whole nanoseconds."""
    tokens = np.array([part.num_tokens for part in shape.parts])
    whole_ns = round(step_ns)
    return {
        "fair": to_whole_ns(by_ours(frozen, shape), whole_ns).astype(np.float64),
        "tokens": by_tokens(tokens, whole_ns).astype(np.float64),
        "equal": equal(tokens, whole_ns).astype(np.float64),
    }


def judge(frozen: Frozen, shape: StepShape, run: Coalitions, runs: Runs) -> dict[str, Any]:
    """Compare every rule with the measured shares of one step."""
    true = truth(shape, run, runs)
    num_chunks = len(shape.chunks)
    step_ns = true.step_ns
    scaled = divided(frozen, shape, step_ns)
    true_groups = grouped(true.shares_ns, num_chunks)
    half_groups = [grouped(half, num_chunks) for half in true.halves_ns]
    return {
        "chunks": [[part.num_tokens, part.context, part.is_sampled] for part in shape.chunks],
        "decodes": len(shape.decodes),
        "decode_contexts": sorted({part.context for part in shape.decodes}),
        "coalitions": len(run.members) - 1,
        "is_pooled": shape.is_pooled,
        "step_ms": step_ns / 1e6,
        "modelled_ms": float(by_ours(frozen, shape).sum()) / 1e6,
        "truth_ms": (true_groups / 1e6).tolist(),
        "fair_ms": (grouped(scaled["fair"], num_chunks) / 1e6).tolist(),
        "split_half": differing(*half_groups).tolist(),
        "split_half_misallocated": misallocated(*true.halves_ns),
        "error": {
            name: relative(grouped(shares, num_chunks), true_groups).tolist()
            for name, shares in scaled.items()
        },
        "misallocated": {
            name: misallocated(shares, true.shares_ns) for name, shares in scaled.items()
        },
        "request_error": {
            name: relative(shares, true.shares_ns)[is_sure(true)].tolist()
            for name, shares in scaled.items()
        },
        "interference": interference(frozen, shape, true),
    }


def grouped(shares: Floats, num_chunks: int) -> Floats:
    """Return each chunk's share, and that of all decodes: [chunks + 1]."""
    return np.append(shares[:num_chunks], shares[num_chunks:].sum())


def relative(found: Floats, true: Floats) -> Floats:
    """Return errors relative to the measured shares."""
    return np.abs(found - true) / true


def differing(one: Floats, other: Floats) -> Floats:
    """Return the difference of two halves relative to their mean."""
    return 2 * np.abs(one - other) / (one + other)


def misallocated(found: Floats, true: Floats) -> float:
    """Return the part of a step assigned to the wrong requests."""
    return float(0.5 * np.abs(found - true).sum() / true.sum())


def is_sure(true: Truth) -> NDArray[np.bool_]:
    """Return which requests' shares are reliable; one decode represents all like it."""
    sure: NDArray[np.bool_] = differing(*true.halves_ns) <= SURE
    same = np.zeros(len(sure), dtype=np.bool_)
    same[1:] = true.shares_ns[1:] == true.shares_ns[:-1]
    return sure & ~same


def interference(frozen: Frozen, shape: StepShape, true: Truth) -> dict[str, float]:
    """Return what the decodes wait for the chunks, in ms: measured, and by the ledger.

    Where a step took longer than a healthy one, the ledger books the excess as slowdown. So as to
    judge the model apart from that, `ledger_at_speed_ms` takes the moment's speed for healthy.
    """
    of = priced(frozen, shape)

    def waited_ms(healthy_ratio: float) -> float:
        (delay,) = delays(of, np.array([round(true.step_ns)]), np.array([healthy_ratio]))
        return delay.decode_interference_ns / 1e6

    return {
        "measured_ms": (true.step_ns - true.decodes_only_ns) / 1e6,
        "ledger_ms": waited_ms(frozen.healthy_ratio),
        "ledger_at_speed_ms": waited_ms(true.step_ns / of.modelled_ns.item()),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each rule's scores over all steps, and the error of the ledger's interference."""
    scores = {
        "split_half": spread([error for row in rows for error in row["split_half"]]),
        "split_half_misallocated": spread([row["split_half_misallocated"] for row in rows]),
    }
    rules = {
        name: {
            "shares": spread([error for row in rows for error in row["error"][name]]),
            "prefills": spread([error for row in rows for error in row["error"][name][:-1]]),
            "decodes": spread([row["error"][name][-1] for row in rows]),
            "misallocated": spread([row["misallocated"][name] for row in rows]),
            "requests": spread([error for row in rows for error in row["request_error"][name]]),
        }
        for name in RULES
    }
    waits = [row["interference"] for row in rows]
    return {
        "truth": scores,
        "rules": rules,
        "interference": {
            name: spread([abs(wait[name] / wait["measured_ms"] - 1) for wait in waits])
            for name in ("ledger_ms", "ledger_at_speed_ms")
        },
    }


def spread(errors: list[float]) -> dict[str, float]:
    """Return statistics of some errors."""
    if not errors:
        return {"num": 0}
    return {
        "num": len(errors),
        "mean": float(np.mean(errors)),
        "median": float(np.median(errors)),
        "p95": float(np.quantile(errors, 0.95)),
        "max": float(np.max(errors)),
    }


def targets(scores: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the reached value and the bound of each target."""
    ours, naive = scores["rules"]["fair"], scores["rules"]["tokens"]
    noise = scores["truth"]["split_half"]["median"]
    return {
        "a: shares, median": (ours["shares"]["median"], max(MOST_MEDIAN, 1.5 * noise)),
        "a: shares, p95": (ours["shares"]["p95"], MOST_P95),
        "b: misallocated, mean": (ours["misallocated"]["mean"], MOST_MISALLOCATED),
        "b: of that by tokens": (
            ours["misallocated"]["mean"] / naive["misallocated"]["mean"],
            MOST_OF_NAIVE,
        ),
    }
