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
    """Pairs of a sample and a step that share time, by sample."""

    sample: Ints
    """[pairs], positions."""
    step: Ints
    overlap_ns: Ints
    within: Floats
    """[pairs], the same as a share of the step."""
    num_samples: int

    def by_sample(self, amounts: Floats) -> Floats:
        """Sum an amount of the pairs: [samples]."""
        sums = np.bincount(self.sample, weights=amounts, minlength=self.num_samples)
        return sums.astype(np.float64)  # of no pairs numpy counts instead

    def by_phase(self, amounts: Floats) -> Floats:
        """Sum how much of the steps' amounts lies in each sample.

        Args:
            amounts: [steps, phases].

        Returns:
            [samples, phases]
        """
        parts = self.within[:, None] * amounts[self.step]
        return np.stack([self.by_sample(column) for column in parts.T], axis=1)

    def spread(self, amounts: Floats, weights: Floats) -> Floats:
        """Divide each sample's amount over its pairs.

        Args:
            amounts: [samples].
            weights: [pairs, parts], not negative. A sample whose weights are all 0 is kept back.

        Returns:
            [pairs, parts]
        """
        whole = self.by_sample(weights.sum(axis=1))
        scale = np.zeros(self.num_samples)
        np.divide(amounts, whole, out=scale, where=whole > 0)
        spread: Floats = weights * scale[self.sample][:, None]
        return spread


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
    return Touching(sample, step, overlap_ns, within, len(from_ns))


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
    return Touching(sample[order], np.concatenate(step)[order], overlap_ns, within, len(from_ns))


def of_one_kind(pairs: Touching, kinds: Ints) -> NDArray[np.bool_]:
    """Tell which samples touch steps of one kind only: [samples].

    Args:
        pairs: of samples and steps.
        kinds: [steps], a bit for each phase that is in it.
    """
    seen = np.zeros(pairs.num_samples, dtype=np.int64)
    np.bitwise_or.at(seen, pairs.sample, kinds[pairs.step])
    is_of_one: NDArray[np.bool_] = (seen & (seen - 1)) == 0
    return is_of_one
