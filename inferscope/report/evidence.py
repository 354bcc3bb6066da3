"""What a cause means, and the evidence for it that the records of one life hold.

The meaning stands in `tui.words`, once for the screens and for this; here it is joined by who was
there, how often and for how long.
"""

from __future__ import annotations

from collections.abc import Callable

from inferscope.report.facts import Facts, OddStep, Overlap
from inferscope.tui.labels import BINDINGS, CAUSE_MEANINGS
from inferscope.tui.plots import duration, share

NUM_NAMED = 3
"""Companions worth naming: where more are to blame, none of them is the cause."""
UNSEEN, UNBOOKED = "not_seen", "not_booked"
"""No causes: what the records do not explain, and what the fold has not decided yet."""
_HOLDING = {
    "slots": "the slots were held by",
    "blocks": "the KV blocks were held by",
    "budget": "the token budget went to",
}
_GAPS = {
    UNSEEN: "before the first record of it, or where records were lost",
    UNBOOKED: "not decided yet: the step under way, or a token not out yet",
}


def sentence(cause: str, ns: int, facts: Facts) -> str:
    """Say what a cause means, and what the records know of it in this life."""
    meaning = CAUSE_MEANINGS.get(cause) or _GAPS.get(cause) or "a cause of a newer version"
    tell = _EVIDENCE.get(cause)
    evidence = tell(ns, facts) if tell is not None else ""
    return f"{meaning}: {evidence}" if evidence else meaning


def _frontend(ns: int, facts: Facts) -> str:
    tokens = facts.row.prompt_tokens
    return "" if tokens is None else f"{many(tokens, 'prompt token')}"


def _queue(ns: int, facts: Facts) -> str:
    waiting = facts.waiting
    if waiting is None:
        return ""
    said = []
    if waiting.bindings:
        said.append(f"behind {_some(waiting.num_running, 'running request')}")
        binding, part = next(iter(waiting.bindings.items()))
        if binding != "none":
            words = BINDINGS.get(binding, binding)
            said.append(f"{words} in {_part(part)} of the scheduler's plans meanwhile")
    busy_ns = waiting.prefill_ns + waiting.decode_ns
    whom = blamed("queue", facts, len(waiting.behind))
    if whom:
        scarce, part = next(iter(waiting.bindings.items()), ("", 0.0))
        holding = _HOLDING.get(scarce) if part == 1 else None
        said.append(f"{holding or 'it was held up by'} {whom}")
    if waiting.behind and busy_ns:
        said.append(f"{share(waiting.prefill_ns / busy_ns)} of the device's work was prefill")
    return "; ".join(said)


def _not_booked(ns: int, facts: Facts) -> str:
    return _queue(ns, facts) if facts.row.state == "waiting" else ""


def _prefill_own(ns: int, facts: Facts) -> str:
    own, cached = facts.prefill, facts.row.cached_tokens
    if not own.num_steps:
        return ""
    said = f"{many(own.num_tokens - own.num_recomputed, 'token')} in {many(own.num_steps, 'step')}"
    if not cached:
        return said
    said += f", {many(cached, 'token')} came from the prefix cache"
    if not facts.saved_ns:
        return said
    return f"{said}, which would have taken about {duration(facts.saved_ns)} (modelled)"


def _prefill_co_batched(ns: int, facts: Facts) -> str:
    return blamed("prefill_co_batched", facts, len(facts.prefill.same), facts.prefill.same)


def _prefill_interference(ns: int, facts: Facts) -> str:
    own = facts.prefill
    if not own.num_mixed:
        return ""
    steps = f"{_of(own.num_mixed, own.num_steps)} prefill steps"
    return (
        f"{_some(own.mean_other, 'request')} on average decoded in {steps}"
        f"{_among_them('prefill_interference', facts, own.other)}"
    )


def _decode_own(ns: int, facts: Facts) -> str:
    own = facts.decode
    if not own.num_steps:
        return ""
    return f"{many(own.num_steps, 'step')} at {duration(ns / own.num_steps)} each"


def _decode_co_batched(ns: int, facts: Facts) -> str:
    own = facts.decode
    if not own.same:
        return ""
    return (
        f"{_mean(own.mean_same)} decoded together on average, {own.most_same} at most"
        f"{_among_them('decode_co_batched', facts, own.same)}"
    )


def _decode_interference(ns: int, facts: Facts) -> str:
    own = facts.decode
    if not own.num_mixed:
        return ""
    whom = blamed("decode_interference", facts, len(own.other), own.other)
    return (
        f"{_of(own.num_mixed, own.num_steps)} decode steps also computed prompts,"
        f" of {whom or named(own.other, of_tokens)}"
    )


def _slowdown(ns: int, facts: Facts) -> str:
    worst = facts.slowest
    if worst is None:
        return ""
    return (
        f"over {many(facts.num_slow, 'step')}; the worst, {_odd(worst)}"
        f" where a healthy one takes {duration(worst.healthy_ns)}"
    )


def _cold_start(ns: int, facts: Facts) -> str:
    if not facts.cold:
        return ""
    longest = max(facts.cold, key=lambda odd: odd.duration_ns)
    return f"{many(len(facts.cold), 'step')}, the longest {_odd(longest)}"


def _cpu_gap(ns: int, facts: Facts) -> str:
    num_steps = facts.prefill.num_steps + facts.decode.num_steps
    return f"{duration(ns / num_steps)} for each of {num_steps}" if num_steps else ""


def _not_scheduled(ns: int, facts: Facts) -> str:
    return f"{many(facts.num_left_out, 'step')} of others" if facts.num_left_out else ""


def _preempted(ns: int, facts: Facts) -> str:
    said = []
    for one in facts.preemptions[:NUM_NAMED]:
        held = "not resumed" if one.held_ns is None else f"for {duration(one.held_ns)}"
        reason = BINDINGS.get(one.reason, one.reason)
        kv = f", {share(one.kv_share)} of the KV cache in use" if one.kv_share is not None else ""
        said.append(f"{duration(one.into_life_ns)} into its life {held} ({reason}{kv})")
    whom = blamed("preempted", facts)
    holders = f"; the blocks were with {whom}" if whom else ""
    return _and_more(said, len(facts.preemptions)) + holders


def _recompute(ns: int, facts: Facts) -> str:
    num_tokens = facts.prefill.num_recomputed + facts.decode.num_recomputed
    return many(num_tokens, "token") if num_tokens else ""


def _output(ns: int, facts: Facts) -> str:
    num_tokens = facts.row.output_tokens
    return f"{duration(ns / num_tokens)} a token" if num_tokens else ""


_EVIDENCE: dict[str, Callable[[int, Facts], str]] = {
    "frontend": _frontend,
    "queue": _queue,
    "prefill_own": _prefill_own,
    "prefill_co_batched": _prefill_co_batched,
    "prefill_interference": _prefill_interference,
    "decode_own": _decode_own,
    "decode_co_batched": _decode_co_batched,
    "decode_interference": _decode_interference,
    "slowdown": _slowdown,
    "cold_start": _cold_start,
    "cpu_gap": _cpu_gap,
    "not_scheduled": _not_scheduled,
    "preempted": _preempted,
    "recompute": _recompute,
    "output": _output,
    UNBOOKED: _not_booked,
}


# --- words ----------------------------------------------------------------------------------------


def named(companions: tuple[Overlap, ...], tell: Callable[[Overlap], str]) -> str:
    """Name those most concerned, and say how many more there were."""
    said = [f"{one.name} ({tell(one)})" for one in companions[:NUM_NAMED]]
    return _and_more(said, len(companions))


def _among_them(cause: str, facts: Facts, companions: tuple[Overlap, ...]) -> str:
    whom = blamed(cause, facts, len(companions))
    return f", among them {whom}" if whom else ""


def blamed(cause: str, facts: Facts, num: int = 0, companions: tuple[Overlap, ...] = ()) -> str:
    """Name who is most to blame for a cause, and for what part of it.

    Args:
        cause: one that lies with others.
        facts: of the request.
        num: how many answer for it, named or not; 0 where that is not known.
        companions: those whose tokens are to be told as well.
    """
    told = [one for one in facts.blame if one.cause == cause]
    whole_ns = sum(one.ns for one in told)
    tokens = {one.name: f", {of_tokens(one)}" for one in companions}
    said = [
        f"{one.request_id} ({share(one.ns / whole_ns)}{tokens.get(one.request_id, '')})"
        for one in told
        if one.request_id is not None
    ]
    if not said:
        return ""
    if num:
        return _and_more(said[:NUM_NAMED], max(num, len(said)))
    others = " and others" if len(told) > min(len(said), NUM_NAMED) else ""
    return f"{', '.join(said[:NUM_NAMED])}{others}"


def _and_more(said: list[str], num: int) -> str:
    more = f" and {num - len(said)} more" if num > len(said) else ""
    return f"{', '.join(said)}{more}"


def of_tokens(one: Overlap) -> str:
    """Say how much of a companion's work there was."""
    return f"{many(one.num_tokens, 'token')} in {many(one.num_steps, 'step')}"


def _odd(odd: OddStep) -> str:
    return f"step {odd.step} at {duration(odd.into_life_ns)}, took {duration(odd.duration_ns)}"


def many(num: int, noun: str) -> str:
    """Write a count with its noun."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _some(num: float, noun: str) -> str:
    return f"{_mean(num)} {noun}{'' if num == 1 else 's'}"


def _of(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def _part(part: float) -> str:
    return "all" if part == 1 else share(part)


def _mean(value: float) -> str:
    return f"{value:.0f}" if value == round(value) or value >= 10 else f"{value:.1f}"
