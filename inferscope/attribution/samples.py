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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_SHORT_NS = 20_000_000
"""Sources either sample faster than steps (at most 1 ms), or cannot before 100 ms are over."""


class Touching(NamedTuple):
    """Pairs of a sample and a step that share time, by sample: for samples shorter than steps."""

    sample: Ints
    """[pairs], positions."""
    step: Ints
    overlap_ns: Ints
    within: Floats
    """[pairs], the same as a share of the step."""
    num_samples: int
    num_steps: int

    def by_sample(self, amounts: Floats) -> Floats:
        """Sum an amount of the pairs: [samples]."""
        sums = np.bincount(self.sample, weights=amounts, minlength=self.num_samples)
        return sums.astype(np.float64)  # of no pairs numpy counts instead

    def busy_ns(self) -> Floats:
        """Return for how long steps ran within each sample: [samples]."""
        return self.by_sample(self.overlap_ns.astype(np.float64))

    def sums(self, columns: Floats) -> Floats:
        """Sum how much of the steps' amounts lies in each sample.

        Args:
            columns: [columns, steps].

        Returns:
            [columns, samples]
        """
        found = [self.by_sample(self.within * column[self.step]) for column in columns]
        return np.array(found)

    def shares(self, rates: Floats) -> Floats:
        """Sum what each step has of the samples' amounts, by how much of it lies in each.

        Args:
            rates: [rates, samples].

        Returns:
            [rates, steps]
        """
        found = np.zeros((len(rates), self.num_steps))
        for into, rate in zip(found, rates, strict=True):
            if rate.any():
                weights = self.within * rate[self.sample]
                into += np.bincount(self.step, weights=weights, minlength=self.num_steps)
        return found


class Covering(NamedTuple):
    """How much of each step lies in each sample: for samples longer than steps, of which are few.

    Sums go step by step and sample by sample, never by a library for matrices: its last digits are
    another processor's others.
    """

    overlap_ns: Ints
    """[samples, steps]."""
    within: Floats
    """[samples, steps], the same as a share of the step."""

    def busy_ns(self) -> Floats:
        """Return for how long steps ran within each sample: [samples]."""
        busy_ns: Ints = np.add.reduce(self.overlap_ns, axis=1)
        return busy_ns.astype(np.float64)

    def sums(self, columns: Floats) -> Floats:
        """Sum how much of the steps' amounts lies in each sample; see `Touching.sums`."""
        found: Floats = np.add.reduce(self.within[:, None] * columns, axis=2).T
        return found

    def shares(self, rates: Floats) -> Floats:
        """Sum what each step has of the samples' amounts; see `Touching.shares`."""
        found: Floats = np.add.reduce(rates[:, :, None] * self.within, axis=1)
        return found


def covering(starts_ns: Ints, ends_ns: Ints, from_ns: Ints, to_ns: Ints) -> Covering:
    """Lay samples over all steps, in whatever order these are.

    Args:
        starts_ns: [steps].
        ends_ns: [steps].
        from_ns: [samples], where each begins.
        to_ns: [samples], where it ends.
    """
    overlap_ns = np.minimum(ends_ns, to_ns[:, None])
    overlap_ns -= np.maximum(starts_ns, from_ns[:, None])
    np.maximum(overlap_ns, 0, out=overlap_ns)
    return Covering(overlap_ns, overlap_ns / np.maximum(ends_ns - starts_ns, 1))


def touching(starts_ns: Ints, ends_ns: Ints, from_ns: Ints, to_ns: Ints) -> Touching:
    """Pair samples with the steps that they share time with.

    Args:
        starts_ns: [steps], ascending.
        ends_ns: [steps], ascending: a device does one thing after the other.
        from_ns: [samples], where each begins.
        to_ns: [samples], where it ends.
    """
    first = np.searchsorted(ends_ns, from_ns, side="right")
    num = np.maximum(np.searchsorted(starts_ns, to_ns, side="left") - first, 0)
    sample = np.repeat(np.arange(len(from_ns)), num)
    step = first[sample] + np.arange(len(sample)) - np.repeat(np.cumsum(num) - num, num)
    overlap_ns = np.minimum(ends_ns[step], to_ns[sample])
    overlap_ns -= np.maximum(starts_ns[step], from_ns[sample])
    within = overlap_ns / np.maximum(ends_ns - starts_ns, 1)[step]
    return Touching(sample, step, overlap_ns, within, len(from_ns), len(starts_ns))


def in_lanes(
    starts_ns: Ints, ends_ns: Ints, lanes: Sequence[Ints], from_ns: Ints, to_ns: Ints
) -> Touching:
    """Pair samples with steps of which some run at once: those of several ranks on one device.

    Args:
        starts_ns: [steps].
        ends_ns: [steps].
        lanes: places of steps that follow each other, as `touching` needs them.
        from_ns: [samples], where each begins.
        to_ns: [samples], where it ends.
    """
    if len(lanes) == 1:
        return touching(starts_ns, ends_ns, from_ns, to_ns)
    found = [touching(starts_ns[lane], ends_ns[lane], from_ns, to_ns) for lane in lanes]
    none = np.zeros(0, dtype=np.int64)
    sample = np.concatenate([none, *(each.sample for each in found)])
    order = np.argsort(sample, kind="stable")
    step = [none, *(lane[each.step] for lane, each in zip(lanes, found, strict=True))]
    overlap_ns = np.concatenate([none, *(each.overlap_ns for each in found)])[order]
    within = np.concatenate([np.zeros(0), *(each.within for each in found)])[order]
    step_of = np.concatenate(step)[order]
    return Touching(sample[order], step_of, overlap_ns, within, len(from_ns), len(starts_ns))
