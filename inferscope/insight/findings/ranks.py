"""Finding on tensor-parallel ranks: one is slow, and all others wait for it."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent
from inferscope.insight.findings.run_summary import RunSummary

_SLOWER = 1.1
"""Minimum ratio to the median of the others; equal ranks differ by a few percent."""
_FEWEST_STEPS = 20


def slow_rank(run: RunSummary) -> Finding | None:
    """Find the rank that takes longest over the same steps, if it stands out.

    None if ranks wait for each other within the measured time: then all take as long as the
    slowest. Spans exclude such waits where the engine reports them. Pipeline stages are not
    compared, because their work differs.
    """
    tensor_ranks = 1 if run.info is None else max(1, run.info.sizes[0])
    groups: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for (dp_rank, rank), time in run.steps.of_rank.items():
        if time.num >= _FEWEST_STEPS:
            groups[dp_rank, rank // tensor_ranks][rank] = time.mean_ns
    worst: tuple[float, int, int, float, float] | None = None
    for (dp_rank, _), means_ns in groups.items():
        if len(means_ns) < 2:
            continue
        rank = max(means_ns, key=lambda each: (means_ns[each], -each))
        usual_ns = median(ns for each, ns in means_ns.items() if each != rank)
        ratio = means_ns[rank] / usual_ns if usual_ns else 0.0
        if ratio >= _SLOWER and (worst is None or ratio > worst[0]):
            worst = (ratio, dp_rank, rank, means_ns[rank], usual_ns)
    if worst is None:
        return None
    ratio, dp_rank, rank, mean_ns, usual_ns = worst
    replica = f" of replica {dp_rank}" if any(each for each, _ in run.steps.of_rank) else ""
    return Finding(
        id="slow_rank",
        title=f"Rank {rank}{replica} is slow, and the others wait for it",
        lost_share=run.requests.share_of_life("rank_wait"),
        causes=("rank_wait",),
        sentences=(
            f"Over the same steps it takes {duration(mean_ns)} on average where the median of the "
            f"others is {duration(usual_ns)}, {percent(ratio - 1)} more.",
        ),
        evidence=(
            Number("dp_rank", dp_rank, "measured"),
            Number("rank", rank, "measured"),
            Number("step_mean_ns", round(mean_ns), "measured"),
            Number("step_mean_of_others_ns", round(usual_ns), "measured"),
            Number("rank_wait_share", run.requests.share_of_life("rank_wait"), "measured"),
        ),
        advice=(
            "Check its device and host: clock throttling, another process on the "
            "device, a slower link, or cores shared with others."
        ),
        counterfactual=Counterfactual(
            f"With a rank like the others, the mean step would take {duration(usual_ns)} instead "
            f"of {duration(mean_ns)}.",
            "step_mean",
            round(mean_ns),
            round(usual_ns),
            "measured",
        ),
    )
