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
_HATCHES = ("", "////", "xxxx", "----", "\\\\\\\\", "++++")


class CauseStyle(NamedTuple):
    """Colour and hatch of a cause in a plot."""

    colour: str
    hatch: str


def role_of(cause: str) -> Role:
    """Return the role of a cause: its phase, alarm for lost work, or none."""
    role = cause_role(cause)
    return role if role in ("prefill", "decode", "alarm") else ""


def cause_styles(causes: list[str]) -> dict[str, CauseStyle]:
    """Return a style for each of some causes; no two are equal as long as hatches last."""
    used: dict[Role, int] = {}
    styles = {}
    for cause in causes:
        role = role_of(cause)
        number = used[role] = used.get(role, -1) + 1
        styles[cause] = CauseStyle(_COLOURS.get(role, BAR), _HATCHES[number % len(_HATCHES)])
    return styles


def in_order(causes: set[str]) -> list[str]:
    """Return causes in the order of a request's life; unknown ones last."""
    place = {cause: at for at, cause in enumerate(CAUSES)}
    return sorted(causes, key=lambda cause: (place.get(cause, len(place)), cause))


def cause_cell(cause: str) -> Marked:
    """Return a cause's name in its colour."""
    return Marked(cause, role_of(cause))
