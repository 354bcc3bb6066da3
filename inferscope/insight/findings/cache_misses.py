"""Findings on the prefix cache: why prompts that were seen before are computed again."""

from __future__ import annotations

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.records import CACHE_CLASS_BY_NAME

_OFTEN = 0.1
"""Minimum share of prompt tokens that have the cause."""
_MATTERS = 0.01
"""Minimum share of all responses' time that computing them before the first token takes."""
_GAIN = 0.05
"""Minimum rise of the hit share that a larger cache must promise, if the curve is known."""
_PREFILL = ("prefill_own",)


def prompt_changes_early(run: RunSummary) -> Finding | None:
    """Find whether text that changes keeps the text behind it from being reused."""
    cache = run.cache
    tokens = _tokens(run, "changed") - cache.reordered_tokens
    share_of = tokens / max(1, _tokens(run, "changed"))
    found = _if_it_matters(run, tokens, _ttft_ns(run, "changed") * share_of)
    if found is None:
        return None
    worst = cache.worst_divergences(1)
    sentence = (
        f"{percent(found.share)} of the prompt tokens were seen before and computed again, since"
        " text before them differs."
    )
    where = ""
    if worst:
        part = f" (part `{worst[0].part}`)" if worst[0].part else ""
        where = (
            f"The most expensive place is near token {worst[0].position:,}{part}:"
            f" {worst[0].num_requests:,} requests differ there from an earlier one, such as"
            f" {worst[0].example}."
        )
    return _finding(
        run,
        found,
        "prompt_changes_early",
        "Prompts change early, and the text behind is computed again",
        (sentence, where),
        "changed",
        "Put what changes (times, identifiers, the user's text) behind what stays the same.",
        [Number("worst_position_tokens", worst[0].position, "measured")] if worst else [],
    )


def cache_too_small(run: RunSummary) -> Finding | None:
    """Find whether tokens are evicted that a larger KV cache would have kept."""
    tokens, ttft_ns = _tokens(run, "evicted"), _ttft_ns(run, "evicted")
    found = _if_it_matters(run, tokens, ttft_ns + run.cache.queue_evicted_ns)
    if found is None:
        return None
    curve = run.cache_accounts.curve()
    known = {} if curve is None else {each.size: each.hit_share for each in curve.points}
    now, largest = known.get(1.0), known.get(4.0)
    if now is not None and largest is not None and largest - now < _GAIN:
        return None
    sizes = [(size, hit) for size, hit in known.items() if hit is not None and size >= 1]
    promise = "; ".join(
        f"{'KV now' if size == 1 else f'{size:g}×:'} {percent(hit)}" for size, hit in sizes
    )
    return _finding(
        run,
        found,
        "cache_too_small",
        "The KV cache evicts prefixes that are needed again",
        (
            f"{percent(found.share)} of the prompt tokens had been evicted, and were computed"
            " again.",
            f"Hit share by size of the KV cache: {promise}." if promise else "",
        ),
        "evicted",
        CACHE_CLASS_BY_NAME["evicted"].advice,
        [
            Number(f"hit_share_at_{size:g}x".replace(".", "_"), hit, "modelled")
            for size, hit in sizes
        ],
    )


def prefix_below_block(run: RunSummary) -> Finding | None:
    """Find whether shared prefixes are too short to fill a KV block."""
    cache, tokens = run.cache, run.cache.below_block_tokens
    ttft_ns = _ttft_ns(run, "rounding") * min(1.0, tokens / max(1, _tokens(run, "rounding")))
    found = _if_it_matters(run, tokens, ttft_ns)
    if found is None or not cache.block_tokens:
        return None
    return _finding(
        run,
        found,
        "prefix_below_block",
        "Shared prefixes do not fill a KV block",
        (
            f"{percent(found.share)} of the prompt tokens are shared with an earlier prompt and lie"
            f" in a block that differs, in {cache.num_below_block:,} requests: a block here is"
            f" {cache.block_tokens:,} tokens.",
        ),
        "",
        CACHE_CLASS_BY_NAME["rounding"].advice,
        [Number("block_tokens", cache.block_tokens, "measured")],
    )


def namespace_splits(run: RunSummary) -> Finding | None:
    """Find whether salts, adapters or images keep equal prompts apart."""
    found = _if_it_matters(run, _tokens(run, "namespace"), _ttft_ns(run, "namespace"))
    if found is None:
        return None
    apart = ", ".join(name for name, _ in run.cache.differs.most_common(3)) or "namespace"
    return _finding(
        run,
        found,
        "namespace_splits",
        "Equal prompts are cached apart",
        (
            f"{percent(found.share)} of the prompt tokens are equal to an earlier prompt's, which"
            f" has another {apart}.",
        ),
        "namespace",
        CACHE_CLASS_BY_NAME["namespace"].advice,
    )


def duplicates_in_flight(run: RunSummary) -> Finding | None:
    """Find whether requests that arrive together compute one prefix several times."""
    found = _if_it_matters(run, _tokens(run, "pending"), _ttft_ns(run, "pending"))
    if found is None:
        return None
    return _finding(
        run,
        found,
        "duplicates_in_flight",
        "Requests compute the same prefix at the same time",
        (
            f"{percent(found.share)} of the prompt tokens were being computed by another request"
            " when theirs was admitted.",
        ),
        "pending",
        CACHE_CLASS_BY_NAME["pending"].advice,
    )


def documents_reordered(run: RunSummary) -> Finding | None:
    """Find whether prompts hold the same documents in other orders."""
    cache = run.cache
    ttft_ns = _ttft_ns(run, "changed") * cache.reordered_tokens / max(1, _tokens(run, "changed"))
    found = _if_it_matters(run, cache.reordered_tokens, ttft_ns)
    if found is None:
        return None
    return _finding(
        run,
        found,
        "documents_reordered",
        "Prompts hold the same documents in other orders",
        (
            f"{percent(found.share)} of the prompt tokens were seen before in another order or in"
            f" several prompts, in {cache.num_reordered:,} requests.",
        ),
        "",
        "Put documents in a fixed order, the most frequent first. Only prompts that begin with the"
        " same documents gain from it.",
    )


class _Found:
    """Tokens that matter, and their part of prompts and time."""

    def __init__(self, tokens: int, share: float, ttft_ns: float, lost_share: float) -> None:
        self.tokens = tokens
        self.share = share
        self.ttft_ns = ttft_ns
        self.lost_share = lost_share


def _if_it_matters(run: RunSummary, tokens: int, ttft_ns: float) -> _Found | None:
    whole, life_ns = run.cache.whole.prompt_tokens, run.requests.life_ns.total()
    if not whole or not life_ns:
        return None
    share, lost_share = tokens / whole, ttft_ns / life_ns
    if share < _OFTEN or lost_share < _MATTERS:
        return None
    return _Found(tokens, share, ttft_ns, lost_share)


def _finding(
    run: RunSummary,
    found: _Found,
    finding_id: str,
    title: str,
    sentences: tuple[str, ...],
    cache: str,
    advice: str,
    evidence: list[Number] | None = None,
) -> Finding:
    """Return a finding with its tokens, its price and the TTFT without it.

    Args:
        run: the run.
        found: what was found.
        finding_id: ID of the finding.
        title: title of the finding.
        sentences: sentences; empty ones are left out.
        cache: class whose device time is its price; empty if it is a part of a class.
        advice: what to try.
        evidence: further numbers.
    """
    numbers = [
        Number("affected_prompt_tokens", found.tokens, "measured"),
        Number("prompt_tokens", run.cache.whole.prompt_tokens, "measured"),
    ]
    use = run.cache.whole.by_class.get(cache)
    if use is not None:
        numbers.append(Number("gpu_ns", use.gpu_ns, "apportioned"))
    numbers.append(Number("ttft_ns", round(found.ttft_ns), "modelled"))
    actual_ns = run.requests.ttft.mean_ns or 0.0
    without_ns = max(0.0, actual_ns - found.ttft_ns / max(1, run.requests.ttft.num))
    counterfactual = None
    if actual_ns and cache:
        counterfactual = Counterfactual(
            f"With these tokens cached, the mean TTFT would be {duration(without_ns)} instead of"
            f" {duration(actual_ns)}.",
            "ttft_mean",
            round(actual_ns),
            round(without_ns),
        )
    return Finding(
        id=finding_id,
        title=title,
        lost_share=found.lost_share,
        sentences=tuple(filter(None, sentences)),
        evidence=(*numbers, *(evidence or ())),
        advice=advice,
        counterfactual=counterfactual,
        causes=_PREFILL,
    )


def _tokens(run: RunSummary, name: str) -> int:
    use = run.cache.whole.by_class.get(name)
    return 0 if use is None else use.tokens


def _ttft_ns(run: RunSummary, name: str) -> int:
    use = run.cache.whole.by_class.get(name)
    return 0 if use is None else use.ttft_ns
