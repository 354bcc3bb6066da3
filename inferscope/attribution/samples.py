"""Allocation of counter samples to steps: counts of a window, over the steps that ran in it.

    steps      ┌────── 1 ──────┐ ┌─ 2 ─┐      ┌─ 3 ─┐
    samples  a │ b │ c │ d │ e │ f │ g │ h │ i │ j │ k

A short sample goes to the step it lies in; one that two steps share (f) is divided by the time that
it lies in each. Between steps a device of one engine is idle, so a sample that reaches into a gap
is all its step's. Every sample that touches a step is given away whole: the parts sum to it.

A long sample covers many steps, and by time each of them would get the same: then two phases that
take turns look alike whatever they do. Such a sample is divided by what a model expects of each
step instead, so that it only says how far off the model was; where there is no such model,
`attribution.regression` finds out over many samples.

Both need the same of the steps: how much of their expected amount lies in a window. That is the
amount before its end less the amount before its start, so there is no need to determine which steps
a sample touches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_SHORT_NS = 20_000_000
"""Longest short sample in nanoseconds: sources sample at most every 1 ms, or not before 100 ms."""


def amounts_until(starts_ns: Ints, ends_ns: Ints, amounts: Floats, until_ns: Ints) -> Floats:
    """Return the sum of steps' amounts before each time; a step that runs then counts in part.

    Args:
        starts_ns: [steps], ascending.
        ends_ns: [steps], ascending: a device does one thing after the other.
        amounts: [columns, steps], not negative; 0 for steps of no length.
        until_ns: [times].

    Returns:
        [columns, times]
    """
    if not len(ends_ns):
        return np.zeros((len(amounts), len(until_ns)))
    whole = np.zeros(amounts.shape)
    np.add.accumulate(amounts[:, :-1], axis=1, out=whole[:, 1:])
    step = ends_ns.searchsorted(until_ns, "right")
    np.minimum(step, len(ends_ns) - 1, out=step)
    start_ns = starts_ns[step]
    part = (until_ns - start_ns) / np.maximum(ends_ns[step] - start_ns, 1)
    np.minimum(part, 1.0, out=part)
    np.maximum(part, 0.0, out=part)
    found: Floats = amounts.take(step, axis=1)
    found *= part
    found += whole.take(step, axis=1)
    return found


def one_by_one(starts_ns: Ints, ends_ns: Ints) -> tuple[Ints, Ints]:
    """Return spans without overlap, in order: where two overlap the later is cut."""
    order = np.argsort(starts_ns, kind="stable")
    ends_ns = np.maximum.accumulate(ends_ns[order])
    starts_ns = starts_ns[order]
    starts_ns[1:] = np.maximum(starts_ns[1:], ends_ns[:-1])
    return np.minimum(starts_ns, ends_ns), ends_ns
