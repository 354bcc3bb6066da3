"""One device's steps while samples of it come in: what each is expected to take, what it is given.

A step stands here from when it is booked until the samples of its time have come, which is half a
second at most. What is expected of it: its time by phase, and the bytes and FLOPs of the model.

Ranks may share a device. Each does one thing after the other, but two of them run at once:

    rank 0  ┌── 1 ──┐  ┌── 2 ──┐         a sample of the device is divided over all steps that it
    rank 1     ┌─── 1 ───┐┌─── 2 ───┐    touches, of both
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.samples import Touching, in_lanes, of_one_kind, touching
from inferscope.collector.accounts import NUM_COUNTED, READ, WRITE, Settled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Moved = tuple[int, int, int, int, int, int]
"""Bytes read, bytes written and FLOPs, each of prefill and of decode."""
NOTHING_MOVED: Moved = (0, 0, 0, 0, 0, 0)


class StepRun(NamedTuple):
    """One execution of a step on one device."""

    ring: int
    """Whose steps follow each other."""
    tenth: int
    start_ns: int
    end_ns: int
    prefill_ns: int
    decode_ns: int
    moved: Moved
    num_ranks: int
    """That what is modelled is divided over."""


class CountedSteps:
    """The steps of one device that wait for its samples."""

    def __init__(self) -> None:
        self._new: list[StepRun] = []
        self._ring = np.zeros(0, dtype=np.int64)
        self._lanes: list[Ints] = []
        """The places of each rank's steps."""
        self._tenth = np.zeros(0, dtype=np.int64)
        self.starts_ns = np.zeros(0, dtype=np.int64)
        self.ends_ns = np.zeros(0, dtype=np.int64)
        self.phase_ns = np.zeros((0, 2))
        """[steps, phases]; the same of all that follows."""
        self.flops = np.zeros((0, 2))
        self.totals = np.zeros((0, 2, NUM_COUNTED))
        """Time or modelled bytes, by what is counted; the samples' parts are given by these."""
        self._values = self.totals
        self._known = self.totals
        self._blurred = self.totals

    def add(self, run: StepRun) -> None:
        """Take a step."""
        self._new.append(run)

    def read_in(self) -> None:
        """Work out what is expected of the steps that came since the last call."""
        new, self._new = self._new, []
        if not new:
            return
        columns = np.array([run[:6] for run in new], dtype=np.int64)
        moved = np.array([[each / run.num_ranks for each in run.moved] for run in new])
        self._ring = np.concatenate([self._ring, columns[:, 0]])
        self._tenth = np.concatenate([self._tenth, columns[:, 1]])
        self.starts_ns = np.concatenate([self.starts_ns, columns[:, 2]])
        self.ends_ns = np.concatenate([self.ends_ns, columns[:, 3]])
        self._lanes = _lanes(self._ring)
        for lane in self._lanes:
            in_turn = _in_turn(self.starts_ns[lane], self.ends_ns[lane])
            self.starts_ns[lane], self.ends_ns[lane] = in_turn
        phase_ns = columns[:, 4:6].astype(np.float64)
        totals = np.repeat(phase_ns[:, :, None], NUM_COUNTED, axis=2)
        totals[:, :, READ], totals[:, :, WRITE] = moved[:, 0:2], moved[:, 2:4]
        self.phase_ns = np.concatenate([self.phase_ns, phase_ns])
        self.flops = np.concatenate([self.flops, moved[:, 4:6]])
        self.totals = np.concatenate([self.totals, totals])
        none = np.zeros_like(totals)
        self._values = np.concatenate([self._values, none])
        self._known = np.concatenate([self._known, none])
        self._blurred = np.concatenate([self._blurred, none])

    def under(self, from_ns: Ints, to_ns: Ints) -> tuple[Touching, NDArray[np.bool_]]:
        """Pair samples with steps, and tell which samples are of one phase only."""
        pairs = in_lanes(self.starts_ns, self.ends_ns, self._lanes, from_ns, to_ns)
        kinds = (self.phase_ns > 0) @ np.array([1, 2])
        return pairs, of_one_kind(pairs, kinds)

    def busy_ns(self, pairs: Touching, from_ns: Ints, to_ns: Ints) -> Floats:
        """Return for how long any step ran within each sample: [samples]."""
        if len(self._lanes) > 1:
            order = np.argsort(self.starts_ns, kind="stable")
            in_turn = _in_turn(self.starts_ns[order], self.ends_ns[order])
            pairs = touching(*in_turn, from_ns, to_ns)
        return pairs.by_sample(pairs.overlap_ns.astype(np.float64))

    def give(
        self, counted: int, pairs: Touching, amounts: Floats, expected: Floats, is_pure: Floats
    ) -> Floats:
        """Divide samples over steps and phases.

        Args:
            counted: what it is.
            pairs: of samples and steps.
            amounts: [samples].
            expected: [steps, phases], what each is divided by.
            is_pure: [samples], 1 where the sample is of one phase only.

        Returns:
            [samples], what was given away of each: all or nothing.
        """
        within, num = pairs.within, len(self.starts_ns)
        weights = within[:, None] * expected[pairs.step]
        parts = pairs.spread(amounts, weights)
        is_given = pairs.by_sample(weights.sum(axis=1)) > 0
        covered = within * is_given[pairs.sample]
        blur = 1.0 - is_pure[pairs.sample]
        for phase in (0, 1):
            of_phase = parts[:, phase]
            self._values[:, phase, counted] += np.bincount(pairs.step, of_phase, num)
            self._blurred[:, phase, counted] += np.bincount(pairs.step, of_phase * blur, num)
        share = np.minimum(np.bincount(pairs.step, covered, num), 1.0)
        known = self._known[:, :, counted] + share[:, None] * self.totals[:, :, counted]
        self._known[:, :, counted] = np.minimum(known, self.totals[:, :, counted])
        return np.where(is_given, amounts, 0.0)

    def of_tenth(self, number: int) -> Settled:
        """Sum the steps of a tenth."""
        there = self._tenth == number
        sums = (self._values, self._known, self.totals, self._blurred)
        return Settled(*(each[there].sum(axis=0) for each in sums))

    def forget(self, number: int, before_ns: int) -> None:
        """Let go of the steps up to a tenth that no sample can reach any more."""
        kept = (self._tenth > number) | (self.ends_ns >= before_ns)
        if kept.all():
            return
        self._ring, self._tenth = self._ring[kept], self._tenth[kept]
        self.starts_ns, self.ends_ns = self.starts_ns[kept], self.ends_ns[kept]
        self.phase_ns, self.flops = self.phase_ns[kept], self.flops[kept]
        self.totals, self._values = self.totals[kept], self._values[kept]
        self._known, self._blurred = self._known[kept], self._blurred[kept]
        self._lanes = _lanes(self._ring)


def _lanes(rings: Ints) -> list[Ints]:
    return [np.flatnonzero(rings == ring) for ring in np.unique(rings)]


def _in_turn(starts_ns: Ints, ends_ns: Ints) -> tuple[Ints, Ints]:
    """Return spans one after the other: where they overlap the later is cut, as in `devices`."""
    ends_ns = np.maximum.accumulate(ends_ns)
    starts_ns = starts_ns.copy()
    starts_ns[1:] = np.maximum(starts_ns[1:], ends_ns[:-1])
    return np.minimum(starts_ns, ends_ns), ends_ns
