"""Meaning of each cause, with the evidence that one request's records hold.

The meanings are in `inferscope.records.causes`; this module adds the other requests
involved, how often and for how long.
"""

from __future__ import annotations

from collections.abc import Callable

from inferscope.insight import Facts, OddStep, Overlap
from inferscope.records import cause_named
from inferscope.text.cache_misses import recomputed_share
from inferscope.text.labels import BINDINGS
from inferscope.text.plots import duration, share

NUM_NAMED = 3
"""Maximum number of requests named; if more contributed, none of them is the cause."""
UNSEEN, UNBOOKED = "not_seen", "not_booked"
"""Rows that are not causes: unobserved time, and time that the fold has not booked yet."""
_HOLDING = {
    "slots": "the slots were held by",
    "blocks": "the KV blocks were held by",
    "budget": "the token budget went to",
}
_GAPS = {
    UNSEEN: "not observed: before its first record, or records lost",
    UNBOOKED: "not booked yet: the step in progress, or a token not delivered",
}


def sentence(cause: str, ns: int, facts: Facts) -> str:
    """Return the meaning of a cause and its evidence in this request."""
    meaning = _GAPS.get(cause) or cause_named(cause).label
    describe = _EVIDENCE.get(cause)
    evidence = describe(ns, facts) if describe is not None else ""
    return f"{meaning}: {evidence}" if evidence else meaning


def _frontend(ns: int, facts: Facts) -> str:
    tokens = facts.row.prompt_tokens
    return "" if tokens is None else f"{many(tokens, 'prompt token')}"


def _queue(ns: int, facts: Facts) -> str:
    waiting = facts.waiting
    if waiting is None:
        return ""
    phrases = []
    if waiting.bindings:
        phrases.append(f"behind {_some(waiting.num_running, 'running request')}")
        binding, part = next(iter(waiting.bindings.items()))
        if binding != "none":
            words = BINDINGS.get(binding, binding)
            phrases.append(f"{words} in {_part(part)} of the scheduler's plans meanwhile")
    busy_ns = waiting.prefill_ns + waiting.decode_ns
    holders = blamed("queue", facts, len(waiting.behind))
    if holders:
        scarce, part = next(iter(waiting.bindings.items()), ("", 0.0))
        holding = _HOLDING.get(scarce) if part == 1 else None
        phrases.append(f"{holding or 'it was held up by'} {holders}")
    if waiting.behind and busy_ns:
        phrases.append(f"{share(waiting.prefill_ns / busy_ns)} of the device's work was prefill")
    recomputed = recomputed_share(None if facts.cache is None else facts.cache.queue_evicted_ns)
    return "; ".join(filter(None, [*phrases, recomputed]))


def _not_booked(ns: int, facts: Facts) -> str:
    return _queue(ns, facts) if facts.row.state == "waiting" else ""


def _prefill_own(ns: int, facts: Facts) -> str:
    own, cached = facts.prefill, facts.row.cached_tokens
    if not own.num_steps:
        return ""
    phrases = (
        f"{many(own.num_tokens - own.num_recomputed, 'token')} in {many(own.num_steps, 'step')}"
    )
    ttft_ns = None if facts.cache is None else facts.cache.ttft_ns
    recomputed = recomputed_share((ttft_ns or {}).get("evicted"))
    if recomputed:
        phrases += f", {recomputed}"
    if not cached:
        return phrases
    origin = "another engine or the prefix cache" if facts.prefill_legs else "the prefix cache"
    phrases += f", {many(cached, 'token')} came from {origin}"
    if not facts.saved_ns:
        return phrases
    return f"{phrases}, which would have taken about {duration(facts.saved_ns)} (modelled)"


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
    steps = f"{many(own.num_steps, 'step')} at {duration(ns / own.num_steps)} each"
    if facts.row.proposed_tokens:
        steps += f"; {_accepted(facts)}"
    if not facts.rejected_tokens:
        return steps
    rejected = many(facts.rejected_tokens, "draft token")
    return f"{steps}; {duration(facts.rejected_ns)} of its decode verified {rejected} in vain"


def _draft(ns: int, facts: Facts) -> str:
    return _accepted(facts) if facts.row.proposed_tokens else ""


def _accepted(facts: Facts) -> str:
    num, accepted = facts.row.proposed_tokens, facts.row.accepted_tokens
    return f"{accepted} of {many(num, 'draft token')} accepted ({share(accepted / num)})"


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
    holders = blamed("decode_interference", facts, len(own.other), own.other)
    return (
        f"{_of(own.num_mixed, own.num_steps)} decode steps also computed prompts,"
        f" of {holders or named(own.other, of_tokens)}"
    )


def _slowdown(ns: int, facts: Facts) -> str:
    worst = facts.slowest
    if worst is None:
        return ""
    return (
        f"over {many(facts.num_slow, 'step')}; the worst, {_odd(worst)}"
        f" where a healthy one takes {duration(worst.healthy_ns)}"
    )


def _rank_wait(ns: int, facts: Facts) -> str:
    if not facts.ranks:
        return ""
    slowest, fastest = facts.ranks[0], facts.ranks[-1]
    return (
        f"rank {slowest.rank} took {duration(slowest.busy_ns / slowest.num_steps)} a step, "
        f"rank {fastest.rank} {duration(fastest.busy_ns / fastest.num_steps)}"
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
    phrases = []
    for one in facts.preemptions[:NUM_NAMED]:
        held = "not resumed" if one.held_ns is None else f"for {duration(one.held_ns)}"
        reason = BINDINGS.get(one.reason, one.reason)
        kv = f", {share(one.kv_share)} of the KV cache in use" if one.kv_share is not None else ""
        phrases.append(f"{duration(one.into_life_ns)} into its life {held} ({reason}{kv})")
    holders = blamed("preempted", facts)
    holders = f"; blocks held by {holders}" if holders else ""
    return _and_more(phrases, len(facts.preemptions)) + holders


def _recompute(ns: int, facts: Facts) -> str:
    num_tokens = facts.prefill.num_recomputed + facts.decode.num_recomputed
    return many(num_tokens, "token") if num_tokens else ""


def _kv_transfer(ns: int, facts: Facts) -> str:
    return "; ".join(
        f"{leg.num_bytes:,} bytes from engine {leg.engine_id}{_spent_there(leg.ledger_ns)}"
        for leg in facts.prefill_legs[:NUM_NAMED]
    )


def _spent_there(ledger_ns: dict[str, int]) -> str:
    ranked = sorted(ledger_ns.items(), key=lambda item: (-item[1], item[0]))
    phrases = [f"{duration(ns)} {cause}" for cause, ns in ranked[:NUM_NAMED] if ns]
    if not phrases:
        return ""
    return f", which took {duration(sum(ledger_ns.values()))} ({', '.join(phrases)})"


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
    "draft": _draft,
    "rank_wait": _rank_wait,
    "slowdown": _slowdown,
    "cold_start": _cold_start,
    "cpu_gap": _cpu_gap,
    "not_scheduled": _not_scheduled,
    "preempted": _preempted,
    "recompute": _recompute,
    "kv_transfer": _kv_transfer,
    "output": _output,
    UNBOOKED: _not_booked,
}


# --- formatting --------------------------------------------------------------------------------


def named(companions: tuple[Overlap, ...], describe: Callable[[Overlap], str]) -> str:
    """Return the requests that contributed most by name, and the number of the others."""
    phrases = [f"{one.name} ({describe(one)})" for one in companions[:NUM_NAMED]]
    return _and_more(phrases, len(companions))


def _among_them(cause: str, facts: Facts, companions: tuple[Overlap, ...]) -> str:
    holders = blamed(cause, facts, len(companions))
    return f", among them {holders}" if holders else ""


def blamed(cause: str, facts: Facts, num: int = 0, companions: tuple[Overlap, ...] = ()) -> str:
    """Return the main contributors to a cause, with their shares.

    Args:
        cause: one that is blamed on other requests.
        facts: of the request.
        num: number of contributors, named or not; 0 if unknown.
        companions: requests whose token counts are added.
    """
    ranked = [one for one in facts.blame if one.cause == cause]
    whole_ns = sum(one.ns for one in ranked)
    tokens = {one.name: f", {of_tokens(one)}" for one in companions}
    phrases = [
        f"{one.request_id} ({share(one.ns / whole_ns)}{tokens.get(one.request_id, '')})"
        for one in ranked
        if one.request_id is not None
    ]
    if not phrases:
        return ""
    if num:
        return _and_more(phrases[:NUM_NAMED], max(num, len(phrases)))
    others = " and others" if len(ranked) > min(len(phrases), NUM_NAMED) else ""
    return f"{', '.join(phrases[:NUM_NAMED])}{others}"


def _and_more(phrases: list[str], num: int) -> str:
    more = f" and {num - len(phrases)} more" if num > len(phrases) else ""
    return f"{', '.join(phrases)}{more}"


def of_tokens(one: Overlap) -> str:
    """Return the tokens and steps of another request."""
    return f"{many(one.num_tokens, 'token')} in {many(one.num_steps, 'step')}"


def _odd(odd: OddStep) -> str:
    return f"step {odd.step} at {duration(odd.into_life_ns)}, took {duration(odd.duration_ns)}"


def many(num: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _some(num: float, noun: str) -> str:
    return f"{_mean(num)} {noun}{'' if num == 1 else 's'}"


def _of(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole else f"{part} of {whole}"


def _part(part: float) -> str:
    return "all" if part == 1 else share(part)


def _mean(value: float) -> str:
    return f"{value:.0f}" if value == round(value) or value >= 10 else f"{value:.1f}"
