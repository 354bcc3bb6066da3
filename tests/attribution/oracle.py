"""The ledger once more, as slowly and plainly as its definition: a partition by clipping.

A life is cut into stretches; each has one cause. Steps are taken whole (see `Step.parts`), in the
order of their starts, and none may begin before the one before it has ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Step:
    """One execution, with what it means for each member: cause → nanoseconds."""

    start_ns: int
    end_ns: int
    parts: dict[int, dict[str, int]]


@dataclass
class Life:
    """What happened to one request."""

    arrived_ns: int
    queued_ns: int
    stays: list[tuple[int, int]] = field(default_factory=list)
    """Times in the batch: from admission to preemption or the end."""
    emitted_ns: list[int] = field(default_factory=list)
    finished_ns: int = 0
    delivered_ns: int = 0


def ledger(request: int, life: Life, steps: list[Step]) -> Counter[str]:
    """Return a request's ledger, cause by cause."""
    rows: Counter[str] = Counter(frontend=life.queued_ns - life.arrived_ns)
    admitted_ns = life.stays[0][0] if life.stays else life.finished_ns
    busy_ns = sum(overlap(step, life.queued_ns, admitted_ns) for step in steps)
    rows["queue"] += busy_ns
    rows["queue_idle"] += admitted_ns - life.queued_ns - busy_ns
    for (_, left_ns), (back_ns, _) in zip(life.stays, life.stays[1:], strict=False):
        rows["preempted"] += back_ns - left_ns
    for stay in life.stays:
        rows.update(in_batch(request, life, stay, steps))
    last_ns = life.emitted_ns[-1] if life.emitted_ns else life.finished_ns
    rows["delivery"] += life.delivered_ns - max(last_ns, life.finished_ns)
    return +rows


def in_batch(request: int, life: Life, stay: tuple[int, int], steps: list[Step]) -> Counter[str]:
    """Return one stay's rows: steps of its own, steps of others, and the time between."""
    rows: Counter[str] = Counter()
    at_ns, until_ns = stay
    for step in steps:
        if step.end_ns <= at_ns or step.start_ns >= until_ns:
            continue
        rows.update(between(life, at_ns, max(at_ns, step.start_ns), is_last=False))
        if request in step.parts:
            rows.update(step.parts[request])
        else:
            rows["not_scheduled"] += overlap(step, at_ns, until_ns)
        at_ns = min(step.end_ns, until_ns)
    rows.update(between(life, at_ns, until_ns, is_last=until_ns == life.finished_ns))
    return rows


def between(life: Life, from_ns: int, until_ns: int, *, is_last: bool) -> Counter[str]:
    """Return a stretch without a step: writing out up to an emission, then the host's gap."""
    emitted = [ns for ns in life.emitted_ns if from_ns <= ns <= until_ns]
    if emitted and is_last:
        return Counter(output=until_ns - from_ns)
    output_ns = emitted[-1] - from_ns if emitted else 0
    return Counter(output=output_ns, cpu_gap=until_ns - from_ns - output_ns)


def overlap(step: Step, from_ns: int, until_ns: int) -> int:
    return max(0, min(step.end_ns, until_ns) - max(step.start_ns, from_ns))
