"""Counter samples → steps: what a device counted in a window, over the steps that ran in it.

    steps      ┌────── 1 ──────┐ ┌─ 2 ─┐      ┌─ 3 ─┐
    samples  a │ b │ c │ d │ e │ f │ g │ h │ i │ j │ k

A short sample goes to the step it lies in; one that two steps share (f) is divided by the time that
it lies in each. Between steps a device of one engine is idle, so a sample that reaches into a gap
is all its step's. Every sample that touches a step is given away whole: the parts sum to it.

A long sample covers many steps, and by time each of them would get the same: then two phases that
take turns look alike whatever they do. Such a sample is divided by what a model expects of each
step instead, so that it only says how far off the model was; where there is no such model,
`attribution.regression` finds out over many samples.

Both need the same of the steps: how much of what is expected of them lies in a window. That is what
lies before its end without what lies before its start, and so nobody has to ask which steps a
sample touches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_SHORT_NS = 20_000_000
"""Sources either sample faster than steps (at most 1 ms), or cannot before 100 ms are over."""


def amounts_until(starts_ns: Ints, ends_ns: Ints, amounts: Floats, until_ns: Ints) -> Floats:
    """Sum how much of some steps' amounts lies before times; of a step that runs then, its part.

    Args:
        starts_ns: [steps], ascending.
        ends_ns: [steps], ascending: a device does one thing after the other.
        amounts: [columns, steps], not negative; 0 of steps of no length.
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
    """Return spans that follow each other, of any: where they overlap the later is cut."""
    order = np.argsort(starts_ns, kind="stable")
    ends_ns = np.maximum.accumulate(ends_ns[order])
    starts_ns = starts_ns[order]
    starts_ns[1:] = np.maximum(starts_ns[1:], ends_ns[:-1])
    return np.minimum(starts_ns, ends_ns), ends_ns
