"""Explanation of one request's ledger in sentences: a pure function of its facts.

Each row is one cause in plain words, the largest first, with the evidence that the records hold.
The rows sum to the request's duration; if they do not, the report states the difference and why.
Meanings of causes are in `inferscope.records.causes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferscope.attribution import OWN_WORK, PromptPart
from inferscope.cost import TIME_ONLY, split_verdict
from inferscope.insight import Facts
from inferscope.text.cache_misses import miss_sentences
from inferscope.text.evidence import UNBOOKED, UNSEEN, many, named, of_tokens, sentence
from inferscope.text.labels import BAD_FINISHES, CAUSE_MEANINGS, SYNTHETIC, more_or_less
from inferscope.text.plots import closed, count, duration, share
from inferscope.text.verdicts import verdicts

NS_PER_TENTH_MS = 100_000
_ENOUGH = 0.8
"""Share of a wait that the named causes must explain."""
_MOST_CAUSES = 3
_MOST_PARTS = 4


@dataclass(frozen=True)
class CauseRow:
    """One cause of a request's latency."""

    cause: str
    ns: int
    tenths_ms: int
    """Tenths of a millisecond, rounded so that the rows add up to the rounded sum."""
    mills: int
    """Share of the whole in mills; they add up to 1000."""
    sentence: str


@dataclass(frozen=True)
class WhyResult:
    """Explanation of one request."""

    title: str
    summary: str
    verdicts: tuple[str, ...]
    """Sentences on each objective given."""
    split: str
    """Reason why modelled rows are not reliable; empty where they are."""
    rows: tuple[CauseRow, ...]
    """Rows, the largest first; unobserved time is the last row."""
    conclusions: tuple[str, ...]
    """Main causes up to the first token and after it."""
    caveats: tuple[str, ...]
    """Methods of the numbers, and what they leave out."""
    sum_ns: int
    """Sum of the causes, without unobserved time."""
    life_ns: int


def why(facts: Facts) -> WhyResult:
    """Return the explanation of a request."""
    row = facts.row
    life_ns, sum_ns = row.age_ns, sum(row.ledger_ns.values())
    ranked = sorted(row.ledger_ns.items(), key=lambda item: (-item[1], item[0]))
    rest_ns = life_ns - sum_ns
    if rest_ns > 0 and not row.ledger_missing:
        ranked.append((UNSEEN if row.joined_late else UNBOOKED, rest_ns))
    amounts = [ns for _, ns in ranked]
    tenths = closed(amounts, round(sum(amounts) / NS_PER_TENTH_MS))
    mills = closed(amounts, 1000)
    return WhyResult(
        title=_title(facts),
        summary=_summary(facts),
        verdicts=verdicts(facts),
        split="" if row.ledger_missing else split_verdict(facts.residual),
        rows=tuple(
            CauseRow(cause, ns, tenth, mill, sentence(cause, ns, facts))
            for (cause, ns), tenth, mill in zip(ranked, tenths, mills, strict=True)
        ),
        conclusions=_conclusions(facts),
        caveats=(_closing(facts, sum_ns, life_ns), *_caveats(facts)),
        sum_ns=sum_ns,
        life_ns=life_ns,
    )


# --- identity and totals -------------------------------------------------------------------------


def _title(facts: Facts) -> str:
    row = facts.row
    name = row.request_id
    if row.external_id is not None and row.external_id != row.request_id:
        name = f"{row.external_id} ({row.request_id})"
    where = f" on {facts.model}" if facts.model else ""
    tokens = f"{count(row.prompt_tokens)} tokens in, {count(row.output_tokens)} out"
    return f"{name}{where}, engine {facts.engine_id}: {_ending(facts)}, {tokens}"


def _ending(facts: Facts) -> str:
    finish = facts.row.finish
    if finish == "engine_lost":
        return "lost with its engine"
    if not facts.is_over:
        return f"still under way ({facts.row.state})"
    return f"{'failed' if finish in BAD_FINISHES else 'finished'} ({finish})"


def _summary(facts: Facts) -> str:
    row = facts.row
    took = "It took" if facts.is_over else "So far it has taken"
    sentences = [f"{took} {duration(row.age_ns)}"]
    if row.ttft_ns is not None:
        sentences.append(f"its first token came after {duration(row.ttft_ns)}")
    elif row.joined_late:
        sentences.append("its first token was not observed")
    else:
        sentences.append("it produced no token")
    if row.tbt_mean_ns is not None:
        p99 = duration(row.tbt_p99_ns)
        sentences.append(f"then one every {duration(row.tbt_mean_ns)} on average (p99 {p99})")
    if row.reasoning_tokens:
        answer = "there was no answer"
        if row.ttfot_ns is not None:
            answer = f"the answer began after {duration(row.ttfot_ns)}"
        sentences.append(f"{count(row.reasoning_tokens)} tokens were reasoning, and {answer}")
    return "; ".join(sentences) + "."


# --- conclusions ----------------------------------------------------------------------------------


def _conclusions(facts: Facts) -> tuple[str, ...]:
    row = facts.row
    sentences: list[str] = []
    if row.ttft_ns and not row.ledger_missing:
        sentences.append(f"Up to the first token: {_largest(row.ttft_ledger_ns)}.")
        after = {
            cause: ns - row.ttft_ledger_ns.get(cause, 0) for cause, ns in row.ledger_ns.items()
        }
        if row.output_tokens > 1:
            sentences.append(f"After it: {_largest(after)}.")
    sentences += _prompt(facts)
    if facts.cache is not None and not row.ledger_missing:
        sentences += miss_sentences(facts.cache)
    gap = facts.longest_gap
    if gap is not None and row.tbt_mean_ns and gap.gap_ns > 2 * row.tbt_mean_ns:
        sentences.append(_longest_gap(facts))
    return tuple(sentences)


def _largest(spent_ns: dict[str, int]) -> str:
    """Return the causes that explain most of a wait."""
    known = {cause: ns for cause, ns in spent_ns.items() if ns > 0}
    whole_ns = sum(known.values())
    if not whole_ns:
        return "unknown"
    sentences: list[str] = []
    listed_ns = 0
    for cause, ns in sorted(known.items(), key=lambda item: (-item[1], item[0])):
        sentences.append(f"{share(ns / whole_ns)} {cause} ({CAUSE_MEANINGS.get(cause, '?')})")
        listed_ns += ns
        if listed_ns >= _ENOUGH * whole_ns or len(sentences) == _MOST_CAUSES:
            break
    own_ns = sum(known.get(cause, 0) for cause in OWN_WORK)
    verdict = "mostly its own work: " if own_ns > whole_ns / 2 else ""
    return f"{verdict}{', '.join(sentences)}"


def _prompt(facts: Facts) -> list[str]:
    """Return the cost of each part of a prompt, if it has several."""
    whole_ns = sum(part.compute_ns for part in facts.parts)
    if len(facts.parts) < 2 or not whole_ns:
        return []
    paying = sorted(
        (part for part in facts.parts if part.compute_ns),
        key=lambda part: (-part.compute_ns, part.name),
    )
    costs = [f"{share(part.compute_ns / whole_ns)} {_of_part(part)}" for part in paying]
    if len(costs) > _MOST_PARTS:
        costs[_MOST_PARTS:] = [f"the rest {many(len(costs) - _MOST_PARTS, 'other part')}"]
    costs[0] = costs[0].replace(" ", " was ", 1)
    free = [
        part
        for part in facts.parts
        if 0 < part.tokens == part.cached_tokens and not part.compute_ns
    ]
    sentences = f"Of its prompt's compute, {', '.join(costs)}"
    sentences += f"; {', '.join(map(_of_part, free))} came from the cache." if free else "."
    first, ttft_ns = paying[0], facts.row.ttft_ns
    if not ttft_ns or not first.ttft_ns:
        return [sentences]
    of_wait = share(first.ttft_ns / ttft_ns)
    return [f"{sentences} Computing {first.name} was {of_wait} of the wait for the first token."]


def _of_part(part: PromptPart) -> str:
    tokens = f"{part.tokens:,} token{'' if part.tokens == 1 else 's'}" if part.tokens else ""
    if 0 < part.cached_tokens < part.tokens:
        tokens += f", {part.cached_tokens:,} of them cached"
    if part.recomputed_tokens:
        again = f"{part.recomputed_tokens:,} computed again"
        tokens = f"{tokens}, {again}" if tokens else again
    return f"{part.name} ({tokens})"


def _longest_gap(facts: Facts) -> str:
    gap = facts.longest_gap
    assert gap is not None
    sentences = f"The longest gap was {duration(gap.gap_ns)}, before token {gap.before_token}"
    if gap.was_preempted:
        return f"{sentences}: it was preempted."
    if gap.prefills:
        return f"{sentences}, while {named(gap.prefills, of_tokens)} had their prompts computed."
    return f"{sentences}; no other request's prompt was computed meanwhile."


# --- methods and caveats -------------------------------------------------------------------------


def _closing(facts: Facts, sum_ns: int, life_ns: int) -> str:
    if facts.row.ledger_missing:
        return (
            f"It has no ledger ({facts.row.ledger_missing}): its time cannot be attributed. Its"
            " arrival, first token and end are measured."
        )
    if sum_ns == life_ns:
        return f"Every nanosecond is accounted for: the rows sum to {sum_ns:,} ns."
    missing = f"the rows sum to {sum_ns:,} of {life_ns:,} ns."
    if facts.row.joined_late:
        return f"Part of it was not observed: {missing}"
    if not facts.is_over:
        return f"It is still in flight: {missing}"
    return f"The ledger does not close, which is an InferScope bug: {missing}"


def _caveats(facts: Facts) -> tuple[str, ...]:
    row = facts.row
    edge = (
        "where the client's bytes are written" if facts.delivered_at == "http" else "at the engine"
    )
    clock = "the device's clock" if facts.clock == "device" else "the host's clock"
    sentences = [SYNTHETIC] if facts.is_synthetic else []
    sentences.append(f"Measured: arrival, steps and delivery ({edge}; steps by {clock}).")
    if facts.fit_ids and facts.residual is not None:
        fits = ", ".join(fit for fit in facts.fit_ids[-2:] if fit)
        steps = many(facts.num_modelled, "step")
        sentences.append(
            "Modelled: how a step's time divides into own, co-batched, interference and slowdown"
            f" (cost model {fits or 'none'}; in the median its {steps} took"
            f" {more_or_less(facts.residual)} than modelled)."
        )
    if any(one.request_id is not None for one in facts.blame):
        sentences.append(
            "Apportioned: how each wait divides among other requests (by resources held or work"
            " done)."
        )
    if facts.breaches:
        sentences.append(
            "What would have met the objective is a first-order estimate: a cause is removed, and"
            " its consequences are left as they were."
        )
    if len(facts.parts) > 1:
        sentences.append(
            "Modelled as well: how its prompt's compute divides over its parts (attention by pairs"
            " of positions, all else by tokens)."
        )
    if not facts.is_counted:
        sentences.append(
            f"Its FLOPs and bytes are unknown ({TIME_ONLY}): the cost model does not count the"
            " layers of this model, or they were not recorded."
        )
    if row.joined_late and facts.row.ttft_ns is None and row.output_tokens:
        sentences.append("It started before the records begin, so its first token is unknown.")
    if facts.num_lost:
        sentences.append(
            f"{many(facts.num_lost, 'record')} of this engine were lost (overwritten before they"
            " were read, or damaged); their content is missing here."
        )
    return tuple(sentences)
