"""Limits of a change, such as `tbt_p99>+5%`, for a gate between two versions.

    tbt_p99 > +5%        B may be 5 % above A
    queue   > +20ms      B may be 20 ms above A
    goodput < -10%       B may be 10 % below A
    failed  > +1%        of a share, percent are points: B may be one point above A

A limit fails if the difference is beyond it and is shown: its interval excludes zero. A difference
that is beyond the limit by chance alone does not fail, and one within it does not either.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from inferscope.errors import BadInput
from inferscope.insight.compare.comparison import NO_DIFFERENCE, Difference
from inferscope.insight.compare.measures import Limits, Measure, latencies, of_recordings

_FORM = re.compile(
    r"\s*([a-z][a-z0-9_.]*)\s*([<>])\s*([+-])\s*(\d+(?:\.\d+)?)\s*(%|us|µs|ms|s|min)?\s*", re.ASCII
)
_UNITS_NS = {"us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
_HINT = "Give a measure, > with + or < with -, and an amount, such as tbt_p99>+5% or queue>+20ms."


class ChangeLimit(msgspec.Struct, frozen=True):
    """Largest change of a measure that a gate lets pass."""

    text: str
    """Limit as it was given."""
    measure: str
    """Name of the measure."""
    amount: float
    """Amount of the change: below zero for a fall, a share of A if relative, else in the unit."""
    is_relative: bool
    """Whether the amount is a share of A."""


class LimitOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A limit and the difference that it was held against."""

    limit: str
    """Limit as it was given."""
    outcome: Literal["failed", "met", "not shown"]
    """failed: the difference is beyond the limit and its interval excludes zero; not shown: it is
    beyond the limit, and its interval includes zero; met: it is within the limit."""
    allowed: float
    """Difference that the limit allows, in the unit of the row."""
    row: Difference
    """Difference, with the interval of this limit."""


def known_measures(limits: Limits) -> list[Measure]:
    """Return all measures that a limit can name."""
    shown = of_recordings(limits)
    names = {measure.name for measure in shown}
    return [*shown, *(measure for measure in latencies() if measure.name not in names)]


def parse_limit(text: str) -> ChangeLimit:
    """Parse a limit.

    Raises:
        BadInput: the text is not a limit, or its measure is unknown.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise BadInput(f"--fail-on {text!r} is not a limit. {_HINT}")
    name, comparison, sign, digits, unit = found.groups()
    known = {measure.name: measure for measure in known_measures(Limits(0, None))}
    if name not in known:
        raise BadInput(f"--fail-on {text}: unknown measure {name}. There are: {', '.join(known)}.")
    if (comparison, sign) not in ((">", "+"), ("<", "-")):
        raise BadInput(f"--fail-on {text}: {comparison}{sign} is not a limit. {_HINT}")
    of_what, amount = known[name].unit, float(digits)
    if unit == "%":
        amount /= 100
    elif (of_what == "ns") != (unit is not None):
        wanted = "a time such as 20ms" if of_what == "ns" else f"a number of {of_what}"
        raise BadInput(f"--fail-on {text}: {name} takes {wanted}, or percent such as 5%.")
    elif unit is not None:
        amount *= _UNITS_NS[unit]
    return ChangeLimit(
        text.strip(),
        name,
        amount if sign == "+" else -amount,
        is_relative=unit == "%" and of_what != "share",
    )


def outcome_of(limit: ChangeLimit, row: Difference) -> LimitOutcome:
    """Hold a difference against a limit."""
    allowed = limit.amount * row.a if limit.is_relative else limit.amount
    is_fall = limit.text.partition("<")[1] == "<"
    is_beyond = row.difference < allowed if is_fall else row.difference > allowed
    shown = row.verdict != NO_DIFFERENCE
    return LimitOutcome(
        limit=limit.text,
        outcome="met" if not is_beyond else "failed" if shown else "not shown",
        allowed=allowed,
        row=row,
    )
