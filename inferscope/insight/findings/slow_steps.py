"""Reasons for steps slower than predicted: co-tenant, clocks, model misfit, cold shapes.

Each alternative gets the part of the excess that its own evidence covers:

    co_tenant       time that the engine waited for a CPU used by others, second by second; or
                    how much slower steps are in seconds with others on the host or device
    own_threads     time that its threads waited for a CPU while no other process used one
    throttling      time held back by a CPU quota; or how much slower steps are while the driver
                    throttles clocks
    cold_shapes     how much slower the first step of a shape is than later ones of its kind
    model_misfit    one kind of step is slow throughout, also while the host is idle
    unexplained     none of them covers half

Parts are estimated independently, so they may overlap and need not sum to the whole.
"""

from __future__ import annotations

from statistics import median
from typing import Literal

import msgspec

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.insight.findings.slowness import KindStats, Slowness, SlownessBucket, StepKind
from inferscope.insight.findings.tail import Tail

Why = Literal[
    "co_tenant", "own_threads", "throttling", "cold_shapes", "model_misfit", "unexplained"
]
Confidence = Literal["high", "medium", "low"]

_MATTERS = 0.15
"""Minimum share of all responses' time for a finding, or..."""
_MATTERS_IN_ONE = 0.25
"""... of the time to the first token, or of that after it."""
_UNEXPLAINED = 0.25
"""Minimum share of all responses' time for a finding without a reason.

A busy neighbour's use of caches and memory costs less: 0.09 to 0.25 measured with 1.5 of 2 CPUs in
use.
"""
_TAIL = 0.05
_STARVED, _LACKING = 0.3, 0.25
"""Minimum shares of the time in which threads want a CPU, and of all time, spent without one."""
_NAMED, _SURE = 0.5, 0.7
"""Minimum parts of the excess that evidence covers, to name it and to name it with confidence."""
_RIVAL = 0.5
"""Share of the best covered part from which another alternative is a rival."""
_BASELINE = 0.1
"""Minimum share of the steps' time that is undisturbed to serve as a baseline."""
_USED = 0.1
"""Share of all CPUs used by others from which the host is not idle."""
_FREE_OF_WAITS = 0.2
"""Maximum ratio of waits to excess for a second to count as undisturbed."""
_THROTTLED = 0.5
_FOREIGN = 0.05
"""Shares of a second from which clocks count as throttled, and a device as shared."""
_IN_ONE_KIND = 0.7
_ABOVE_OTHERS = 2.0
_STEADY = 0.8
"""Minimum share of the seconds in which a kind's residual is at least half its median."""
_FEWEST_SECONDS = 4
_FEWEST_LATER = 0.1
"""Minimum share of a kind's time in steps whose shape is not new."""

_ADVICE: dict[Why, str] = {
    "co_tenant": "Give the engine's processes CPUs or a device of their own (cpuset, exclusive "
    "node, no other pod on the GPU), or move the neighbour.",
    "own_threads": "Run fewer threads than the engine has CPUs (`OMP_NUM_THREADS`, the server's "
    "workers), or give it more CPUs.",
    "throttling": "Raise the limit that holds it back: the CPU quota of its control group, the "
    "power limit, or the cooling.",
    "cold_shapes": "Warm the server up before it receives traffic, with each batch size and prompt "
    "length that occurs.",
    "model_misfit": "The machine is healthy: such steps take this long here, and the "
    "cost model does not predict it. Run `inferscope calibrate`, or let the server run until the "
    "fit has seen such steps; until then read their `slowdown` as their own work.",
    "unexplained": "Profile such a step (`inferscope profile`), and check the host and the "
    "device at that time.",
}
_TITLES: dict[Why, str] = {
    "co_tenant": "Steps are slow: other processes use the engine's CPUs or device",
    "own_threads": "Steps are slow: the engine's own threads compete for its CPUs",
    "throttling": "Steps are slow: the CPU or the device is throttled",
    "cold_shapes": "Steps are slow: first uses of shapes that the engine does not mark",
    "model_misfit": "Steps are slower than predicted: the cost model does not fit them",
    "unexplained": "Steps are slower than predicted, without evidence of a reason",
}


class Reason(msgspec.Struct, frozen=True):
    """Reason for steps slower than predicted, with the evidence for each alternative."""

    why: Why
    confidence: Confidence
    sentences: tuple[str, ...]
    evidence: tuple[Number, ...]

    @property
    def advice(self) -> str:
        """Return the advice on the reason."""
        return _ADVICE[self.why]


class _ExcessPart(msgspec.Struct, frozen=True):
    """Part of the excess that one alternative's evidence covers."""

    share: float
    sentence: str
    is_sure: bool = True
    """Whether the evidence alone rules the other alternatives out."""


_NONE = _ExcessPart(0.0, "")


def slow_steps(run: RunSummary) -> Finding | None:
    """Find whether steps are slower than predicted, and why."""
    requests = run.requests
    sides = (requests.before_ns, requests.after_ns)
    of_one = max(side["slowdown"] / side.total() if side else 0.0 for side in sides)
    lost_share = requests.share_of_life("slowdown")
    starved = _starved(run.slowness)
    if lost_share < _MATTERS and of_one < _MATTERS_IN_ONE and starved < _STARVED:
        return None
    found = reason(run.slowness)
    if found is None or (found.why == "unexplained" and lost_share < _UNEXPLAINED):
        return None
    after_ns, num_tokens = requests.after_ns, requests.num_tokens_after
    counterfactual = None
    if num_tokens:
        actual_ns = after_ns.total() / num_tokens
        without_ns = (after_ns.total() - after_ns["slowdown"]) / num_tokens
        counterfactual = Counterfactual(
            f"Without `slowdown`, the mean TPOT would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "tpot_mean",
            round(actual_ns),
            round(without_ns),
        )
    sentences = [f"{percent(lost_share)} of the time is `slowdown`.", *found.sentences]
    if starved >= _STARVED:
        sentences.insert(
            1,
            f"The engine's busy threads had no CPU for {percent(starved)} of the time in which "
            "they wanted one; waits from the start are part of the model's normal.",
        )
    if requests.ttft.num and requests.tbt.num:
        ttft_ns, tbt_ns = requests.ttft.quantile_ns(0.95), requests.tbt.quantile_ns(0.99)
        sentences.insert(
            1,
            f"TTFT is {duration(ttft_ns or 0)} at p95 and TBT {duration(tbt_ns or 0)} at p99; of "
            f"the slowest requests' time it is {percent(_in_tail(requests.slow_first))} before the "
            f"first token and {percent(_in_tail(requests.slow_later))} after it.",
        )
    return Finding(
        id="slow_steps",
        title=_TITLES[found.why],
        lost_share=lost_share,
        sentences=tuple(sentences),
        evidence=(Number("slowdown_share", lost_share, "modelled"), *found.evidence),
        advice=found.advice,
        counterfactual=counterfactual,
        causes=("slowdown",),
    )


def _in_tail(tail: Tail) -> float:
    """Return the share of `slowdown` in the ledgers of the slowest requests."""
    _, rows = tail.slowest(_TAIL)
    whole_ns = rows.total()
    return rows["slowdown"] / whole_ns if whole_ns else 0.0


def _starved(slowness: Slowness) -> float:
    """Return the share of the time wanting a CPU in which threads had none.

    Every step may include such waits without any `slowdown`: the model learns the usual.
    """
    buckets = [bucket for bucket in slowness.buckets if bucket.steps and bucket.of("sampled")]
    lacking_ns = sum(_stolen_ns(bucket) + bucket.of("quota") for bucket in buckets)
    wanted_ns = lacking_ns + sum(bucket.of("cpu") for bucket in buckets)
    sampled_ns = sum(bucket.of("sampled") for bucket in buckets)
    return lacking_ns / wanted_ns if lacking_ns >= _LACKING * sampled_ns > 0 else 0.0


def reason(slowness: Slowness) -> Reason | None:
    """Return the reason for steps slower than predicted; None if none are."""
    kinds = slowness.kinds
    excess_ns = sum(of.excess_ns for of in kinds.values())
    if not excess_ns:
        return None
    parts: dict[Why, _ExcessPart] = {
        "co_tenant": _co_tenant(slowness, excess_ns),
        "own_threads": _own_threads(slowness, excess_ns),
        "throttling": _throttling(slowness, excess_ns),
        "cold_shapes": _cold_shapes(slowness, excess_ns),
        "model_misfit": _model_misfit(slowness, excess_ns),
    }
    ranked: list[Why] = sorted(parts, key=lambda why: -parts[why].share)
    best, second = parts[ranked[0]], parts[ranked[1]]
    why: Why = ranked[0] if best.share >= _NAMED else "unexplained"
    confidence: Confidence = "low"
    if why != "unexplained":
        is_alone = best.is_sure and second.share < _RIVAL * best.share
        confidence = "high" if is_alone and best.share >= _SURE else "medium"
    top = max(kinds, key=lambda kind: kinds[kind].excess_ns)
    of_top = kinds[top]
    sentences = [_largest(top, of_top, excess_ns)]
    if why == "unexplained":
        sentences.append(f"Evidence covers less than half of it{_neighbours(slowness)}.")
    else:
        sentences.append(f"{best.sentence} Confidence: {confidence}.")
    sentences.append(_unseen(slowness))
    evidence = [
        Number("why", why, "modelled"),
        Number("confidence", confidence, "modelled"),
        *(Number(f"{each}_share", part.share, "modelled") for each, part in parts.items()),
        Number("largest_residual_kind", str(top), "modelled"),
        Number("largest_residual", of_top.excess_ns / max(1, of_top.explained_ns), "modelled"),
        *_measured(slowness),
    ]
    stated = tuple(sentence for sentence in sentences if sentence)
    return Reason(why, confidence, stated, tuple(evidence))


def _largest(kind: StepKind, of_kind: KindStats, excess_ns: int) -> str:
    rate = of_kind.excess_ns / max(1, of_kind.explained_ns)
    by_size = of_kind.by_size
    digits = max(by_size, key=lambda each: by_size[each].excess_ns)
    size = ""
    if by_size[digits].excess_ns >= _IN_ONE_KIND * of_kind.excess_ns and len(by_size) > 1:
        size = f", most of it in steps of {1 << digits - 1} to {(1 << digits) - 1} tokens"
    return (
        f"{percent(of_kind.excess_ns / excess_ns)} of the excess is in {kind}, which take "
        f"{percent(rate)} longer than modelled{size}."
    )


def _neighbours(slowness: Slowness) -> str:
    """Return a clause on CPUs used by others throughout; empty if none are."""
    buckets = [bucket for bucket in slowness.buckets if bucket.steps]
    shared = [bucket for bucket in buckets if _are_cpus_shared(bucket, slowness)]
    if len(shared) < _STEADY * len(buckets):
        return ""
    return (
        f"; others used {_others(_totals(slowness)):.2g} CPUs throughout, so what they take of "
        "caches, memory bandwidth and sibling threads cannot be told"
    )


def _unseen(slowness: Slowness) -> str:
    """Return a sentence on missing evidence; empty if all is present."""
    amounts = _totals(slowness)
    unseen = []
    if not amounts["sampled"]:
        unseen.append("the host's CPUs (an older probe, or /proc is not readable)")
    if not amounts["device"] and any(kind.mode for kind in slowness.kinds):
        unseen.append("device clocks (no GPU, or no `inferscope sampler`)")
    return f"Not observed: {'; '.join(unseen)}." if unseen else ""


def _measured(slowness: Slowness) -> list[Number]:
    amounts = _totals(slowness)
    found = []
    if amounts["sampled"]:
        of_time = {word: amounts[word] / amounts["sampled"] for word in ("wait", "quota", "steal")}
        found = [
            Number("run_queue_wait_share", of_time["wait"], "measured"),
            Number("cpu_quota_share", of_time["quota"], "measured"),
            Number("cpu_steal_share", of_time["steal"], "apportioned"),
            Number("cpus_used_by_others", _others(amounts), "measured"),
        ]
    if amounts["device"]:
        throttled = amounts["throttled"] / amounts["device"]
        found.append(Number("device_throttled_share", throttled, "measured"))
    if amounts["watched"]:
        foreign = amounts["foreign"] / amounts["watched"]
        found.append(Number("device_used_by_others_share", foreign, "measured"))
    if slowness.hottest_c is not None:
        found.append(Number("device_temperature_max_c", slowness.hottest_c, "measured"))
    return found


_WORDS = (
    "sampled", "wait", "quota", "steal", "cpu", "host", "device", "throttled", "watched", "foreign",
)  # fmt: skip


def _totals(slowness: Slowness) -> dict[str, float]:
    return {word: sum(bucket.of(word) for bucket in slowness.buckets) for word in _WORDS}


def _others(amounts: dict[str, float]) -> float:
    """Return the mean number of CPUs used by processes other than the engine's."""
    return max(0.0, amounts["host"] - amounts["cpu"]) / amounts["sampled"]


def _are_cpus_shared(bucket: SlownessBucket, slowness: Slowness) -> bool:
    """Return whether other processes use the host's CPUs in this bucket."""
    others, sampled = bucket.of("host") - bucket.of("cpu"), bucket.of("sampled")
    return sampled > 0 and others > _USED * max(1, slowness.num_cpus) * sampled


def _is_device_shared(bucket: SlownessBucket) -> bool:
    """Return whether other processes use the device in this bucket."""
    return bucket.of("foreign") > _FOREIGN * bucket.of("watched") > 0


def _is_shared(bucket: SlownessBucket, slowness: Slowness) -> bool:
    return _are_cpus_shared(bucket, slowness) or _is_device_shared(bucket)


def _stolen_ns(bucket: SlownessBucket) -> float:
    return bucket.of("wait") + bucket.of("steal")


def _waits(bucket: SlownessBucket) -> bool:
    return _stolen_ns(bucket) + bucket.of("quota") > _FREE_OF_WAITS * bucket.excess_ns


def _is_throttled(bucket: SlownessBucket) -> bool:
    return bucket.of("throttled") > _THROTTLED * bucket.of("device") > 0


def _rate_of(buckets: list[SlownessBucket], slowness: Slowness) -> float | None:
    """Return the excess over modelled time in undisturbed time; None if there is too little."""
    explained_ns = sum(bucket.explained_ns for bucket in buckets)
    whole_ns = sum(of.explained_ns for of in slowness.kinds.values())
    if not explained_ns or explained_ns < _BASELINE * whole_ns:
        return None
    return sum(bucket.excess_ns for bucket in buckets) / explained_ns


def _beyond_ns(buckets: list[SlownessBucket], rate: float) -> float:
    return sum(max(0.0, bucket.excess_ns - rate * bucket.explained_ns) for bucket in buckets)


def _usual(slowness: Slowness) -> float | None:
    """Return the excess over modelled time in seconds without others and without waits."""
    free = [
        bucket
        for bucket in slowness.buckets
        if bucket.steps and not (_is_shared(bucket, slowness) or _waits(bucket))
    ]
    return _rate_of(free, slowness)


def _covered_ns(slowness: Slowness, *words: str) -> float:
    """Return the excess covered by amounts, second by second.

    The baseline excess of undisturbed seconds is not attributed to waits.
    """
    rate = _usual(slowness) or 0.0
    return sum(
        min(
            max(0.0, bucket.excess_ns - rate * bucket.explained_ns),
            sum(bucket.of(word) for word in words),
        )
        for bucket in slowness.buckets
        if bucket.steps
    )


def _compete(amounts: dict[str, float]) -> bool:
    """Return whether the engine's threads wait for each other: others use too few CPUs for it."""
    return amounts["wait"] > 0 and _others(amounts) < _RIVAL * amounts["wait"] / amounts["sampled"]


def _own_threads(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    amounts = _totals(slowness)
    if not _compete(amounts):
        return _NONE
    share, own = _covered_ns(slowness, "wait") / excess_ns, amounts["cpu"] / amounts["sampled"]
    return _ExcessPart(
        share,
        f"{percent(share)} of it is time in which the engine's threads were ready to run and had "
        f"no CPU, while no other process used one: its own threads, which used {own:.2g} CPUs, "
        "compete.",
    )


def _co_tenant(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    buckets = [bucket for bucket in slowness.buckets if bucket.steps]
    usual, amounts = _usual(slowness), _totals(slowness)
    words = ("steal",) if _compete(amounts) else ("wait", "steal")
    waited_ns = _covered_ns(slowness, *words)
    shared = [each for each in buckets if _is_shared(each, slowness)]
    slower_ns = 0.0 if usual is None else _beyond_ns(shared, usual)
    if slower_ns > waited_ns:
        share = min(1.0, slower_ns / excess_ns)
        return _ExcessPart(
            share,
            f"{percent(share)} of it is what steps take longer in seconds in which others use the "
            "host's CPUs or the device than in those without.",
        )
    if not waited_ns:
        return _NONE
    share = waited_ns / excess_ns
    while_ = f"while others used {_others(amounts):.2g} CPUs"
    if amounts["steal"] > amounts["wait"] or len(words) == 1:
        while_ = "most of it because the hypervisor gave the CPU away"
    return _ExcessPart(
        share,
        f"{percent(share)} of it is time in which the engine's threads were ready to run and had "
        f"no CPU, {while_}.",
    )


def _throttling(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    buckets = [bucket for bucket in slowness.buckets if bucket.steps]
    held_ns = sum(min(float(each.excess_ns), each.of("quota")) for each in buckets)
    of_quota = _ExcessPart(
        held_ns / excess_ns,
        f"{percent(held_ns / excess_ns)} of it is time in which the CPU quota of the engine's "
        "control group held it back.",
    )
    throttled = [each for each in buckets if _is_throttled(each)]
    if not throttled:
        return of_quota
    rate = _rate_of([each for each in buckets if not _is_throttled(each)], slowness)
    slower_ns = sum(each.excess_ns for each in throttled)
    if rate is not None:
        slower_ns = round(_beyond_ns(throttled, rate))
    share = slower_ns / excess_ns
    if share < of_quota.share:
        return of_quota
    reasons: dict[str, float] = {}
    for each in throttled:
        for word, amount in each.amounts.items():
            if word.startswith("throttled_"):
                reasons[word] = reasons.get(word, 0.0) + amount
    named = max(reasons, key=lambda word: reasons[word], default="")
    why = named.removeprefix("throttled_")
    hot = "" if slowness.hottest_c is None else f", up to {slowness.hottest_c:.0f} °C"
    how = (
        "all of the time, so the steps' time without it is unknown"
        if rate is None
        else "and steps are as modelled while it does not"
    )
    return _ExcessPart(
        share,
        f"{percent(share)} of it falls into seconds in which the driver holds the device's clocks "
        f"down (`{why}`{hot}), {how}.",
        is_sure=rate is not None,
    )


def _cold_shapes(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    slower_ns, num = 0.0, 0
    for of in slowness.kinds.values():
        if of.later.explained_ns < _FEWEST_LATER * of.explained_ns:
            continue  # every step is a new shape: no baseline
        slower_ns += max(0.0, of.first.excess_ns - of.later.rate * of.first.explained_ns)
        num += of.first.num
    share = min(1.0, slower_ns / excess_ns)
    return _ExcessPart(
        share,
        f"{percent(share)} of it is in the {num} steps that were the first of their shape, beyond "
        "what later ones of the same kinds take.",
    )


def _model_misfit(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    unlearned = slowness.unlearned_ns / excess_ns
    steady = _steady_kind(slowness, excess_ns)
    if unlearned <= steady.share:
        return steady
    return _ExcessPart(
        unlearned,
        f"{percent(unlearned)} of it is in steps that were priced before the model had learned "
        "from this engine.",
        is_sure=False,
    )


def _steady_kind(slowness: Slowness, excess_ns: int) -> _ExcessPart:
    """Return the part of one kind of step that is slow throughout; None without one."""
    is_sampled = any(bucket.of("sampled") for bucket in slowness.buckets)
    quiet = [
        bucket
        for bucket in slowness.buckets
        if bucket.steps
        and (bucket.of("sampled") or not is_sampled)
        # Shared caches, memory bandwidth and sibling threads slow down one kind of step most, as a
        # wrong model does, without any wait: only an idle host separates them.
        and not (_waits(bucket) or _is_throttled(bucket) or _is_shared(bucket, slowness))
    ]
    excess: dict[StepKind, int] = {}
    explained: dict[StepKind, int] = {}
    for bucket in quiet:
        for kind, of in bucket.steps.items():
            excess[kind] = excess.get(kind, 0) + of.excess_ns
            explained[kind] = explained.get(kind, 0) + of.explained_ns
    whole_ns = sum(excess.values())
    if not whole_ns:
        return _NONE
    top = max(excess, key=lambda kind: excess[kind])
    if excess[top] < _IN_ONE_KIND * whole_ns or not explained[top]:
        return _NONE
    rate = excess[top] / explained[top]
    others_ns = sum(explained.values()) - explained[top]
    if others_ns and rate < _ABOVE_OTHERS * (whole_ns - excess[top]) / others_ns:
        return _NONE
    rates = [bucket.steps[top].rate for bucket in quiet if top in bucket.steps]
    if len(rates) < _FEWEST_SECONDS:
        return _NONE
    usual = median(rates)
    num_steady = sum(each >= 0.5 * usual for each in rates)
    of_top = slowness.kinds[top]
    is_usual = of_top.median_residual() >= 0.25 * rate  # not a few stalls among healthy steps
    if num_steady < _STEADY * len(rates) or not usual or not is_usual:
        return _NONE
    # In disturbed seconds the same steps have at least the same excess.
    share = min(of_top.excess_ns, rate * of_top.explained_ns) / excess_ns
    idle = "also while the host is idle" if is_sampled else "and the host was not observed"
    return _ExcessPart(
        share,
        f"{percent(share)} of it is what {top} take longer in every second ({percent(rate)} more "
        f"than modelled), {idle}; the model does not fit them.",
        is_sure=is_sampled and len(explained) > 1,
    )
