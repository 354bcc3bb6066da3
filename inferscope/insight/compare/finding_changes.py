"""Findings of two recordings side by side: those of one side only, and those of both.

A finding is a rule with a threshold, and has no interval. One that is near its threshold may come
and go by chance, so that it counts as shown only if a ledger row that it names differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferscope.insight.compare.comparison import NO_DIFFERENCE, Difference
from inferscope.insight.findings import EngineFindings, Finding


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One finding on either side."""

    id: str
    """Name of the rule that found it; `docs/findings.md` lists them."""
    title: str
    """Finding in one sentence, on B if B has it."""
    a_lost_share: float | None
    """Share of all answers' time that it took on A, roughly; null without it."""
    b_lost_share: float | None
    """The same on B."""
    differs: tuple[str, ...]
    """Ledger rows that it names and that differ; without any, the change may be by chance."""


def finding_changes(
    a: Sequence[EngineFindings], b: Sequence[EngineFindings], rows: Sequence[Difference]
) -> tuple[FindingChange, ...]:
    """Return the findings of both sides, the largest change first.

    Args:
        a: findings of A by engine; of several engines, the costliest of each rule counts.
        b: findings of B, likewise.
        rows: rows of the comparison.
    """
    of_a, of_b = _costliest(a), _costliest(b)
    moved = {row.name for row in rows if row.group == "ledger" and row.verdict != NO_DIFFERENCE}
    changes = [
        FindingChange(
            id=rule,
            title=(of_b.get(rule) or of_a[rule]).title,
            a_lost_share=of_a[rule].lost_share if rule in of_a else None,
            b_lost_share=of_b[rule].lost_share if rule in of_b else None,
            differs=tuple(
                cause
                for cause in dict.fromkeys(
                    cause
                    for side in (of_a, of_b)
                    for cause in (side[rule].causes if rule in side else ())
                )
                if cause in moved
            ),
        )
        for rule in sorted(of_a.keys() | of_b.keys())
    ]
    return tuple(sorted(changes, key=lambda change: -_size(change)))


def _costliest(engines: Sequence[EngineFindings]) -> dict[str, Finding]:
    found = [finding for engine in engines for finding in engine.findings or ()]
    return {finding.id: finding for finding in sorted(found, key=lambda each: each.lost_share)}


def _size(change: FindingChange) -> float:
    return abs((change.b_lost_share or 0.0) - (change.a_lost_share or 0.0))
