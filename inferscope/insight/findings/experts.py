"""Finding on a mixture of experts: few experts get most tokens."""

from __future__ import annotations

from inferscope.insight.findings.finding import Finding, Number
from inferscope.insight.findings.formatting import percent
from inferscope.insight.findings.run_summary import RunSummary

_UNEVEN = 2.0
"""Minimum load of the busiest experts over that of an even router."""
_FEWEST_TOKENS = 1000
"""Minimum mean tokens of an expert, over all steps and layers."""


def expert_imbalance(run: RunSummary) -> Finding | None:
    """Find whether the busiest experts get far more tokens than an even router would give them.

    The time that this costs is not known: one device loses little by it. With experts on several
    devices, all wait in each layer for the device of the busiest.
    """
    loads, hottest = run.experts, run.experts.hottest
    if hottest is None or loads.mean_tokens < _FEWEST_TOKENS:
        return None
    ratio = loads.busiest_tokens / loads.even_tokens
    if ratio < _UNEVEN:
        return None
    imbalance, even = (
        tokens / loads.mean_tokens for tokens in (loads.busiest_tokens, loads.even_tokens)
    )
    layer, expert, of_layer = hottest
    num_ranks = 1 if run.info is None else max(1, run.info.sizes[3])
    where = (
        f"its {num_ranks} expert-parallel ranks wait for the rank of the busiest"
        if num_ranks > 1
        else "with expert parallelism, all ranks would wait for the rank of the busiest"
    )
    return Finding(
        id="expert_imbalance",
        title="Few experts get most tokens",
        lost_share=0.0,
        sentences=(
            f"In each layer and step the busiest of {loads.num_experts} experts gets "
            f"{imbalance:.1f} times the mean load, where an even router would give it "
            f"{even:.1f} times: {where}.",
            f"Layer {layer} is the most uneven: expert {expert} has {percent(of_layer)} of its "
            "busiest experts' load.",
        ),
        evidence=(
            Number("busiest_over_mean", imbalance, "measured"),
            Number("even_router_over_mean", even, "modelled"),
            Number("layer", layer, "measured"),
            Number("expert", expert, "measured"),
            Number("expert_share_of_busiest", of_layer, "measured"),
            Number("expert_ranks", num_ranks, "measured"),
        ),
        advice=(
            "Compare with other traffic: repeated text routes alike. With expert parallelism, "
            "replicate the busiest experts (enable_eplb), or run fewer expert-parallel ranks."
        ),
    )
