"""Colours, hatches and cells of ledger causes, the same on every page.

A hue is a phase's or that of lost work; hatches tell the causes of one hue apart, so that a picture
reads without colours too.
"""

from __future__ import annotations

from typing import NamedTuple

from inferscope.records import CAUSES
from inferscope.report.blocks import Marked, Role
from inferscope.report.plots import ALARM, BAR, DECODE, PREFILL
from inferscope.text import cause_role

_COLOURS = {"prefill": PREFILL, "decode": DECODE, "alarm": ALARM}
_HATCHES = (
    *("", "////", "xxxx", "----", "\\\\\\\\", "++++", "||||", "//", "xx", "--", "\\\\", "++"),
    *("||", "///", "xxx", "---", "+++"),
)
_FREQUENT = ("queue", "queue_idle", "cpu_gap", "output", "delivery", "frontend", "cold_start")
"""Causes of no phase that take the hatches which differ most."""


class CauseStyle(NamedTuple):
    """Colour and hatch of a cause in a plot."""

    colour: str
    hatch: str


def role_of(cause: str) -> Role:
    """Return the role of a cause: its phase, alarm for lost work, or none."""
    role = cause_role(cause)
    return role if role in ("prefill", "decode", "alarm") else ""


def cause_style(cause: str) -> CauseStyle:
    """Return the style of a cause; no two causes have the same."""
    role = role_of(cause)
    same = [each for each in (*_FREQUENT, *CAUSES) if role_of(each) == role]
    number = list(dict.fromkeys(same)).index(cause) if cause in same else len(_HATCHES) - 1
    return CauseStyle(_COLOURS.get(role, BAR), _HATCHES[number])


def in_order(causes: set[str]) -> list[str]:
    """Return causes in the order of a request's life; unknown ones last."""
    place = {cause: at for at, cause in enumerate(CAUSES)}
    return sorted(causes, key=lambda cause: (place.get(cause, len(place)), cause))


def cause_cell(cause: str) -> Marked:
    """Return a cause's name in its colour."""
    return Marked(cause, role_of(cause))
