"""Join of one device's samples with the steps that ran on it.

    pending samples ─► due ─► windows of one source ─► value per unit of the amounts expected
                                                       of the window's steps ─► buckets

Short samples are assigned to the steps in their windows. Long samples scale the modelled bytes, and
a regression over many of them divides SM time and energy (`attribution.regression`).

Ranks may share a device. Each rank runs one step at a time, but two ranks run at once:

    rank 0  ┌── 1 ──┐  ┌── 2 ──┐         a sample of the device is divided over all steps of
    rank 1     ┌─── 1 ───┐┌─── 2 ───┐    both ranks that overlap it
"""

from __future__ import annotations

from operator import add, mul

import numpy as np
from numpy.typing import NDArray

from inferscope.fold.join.counter_shares import (
    BUSY,
    ENERGY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
    WRITE,
    SettledBucket,
)
from inferscope.fold.join.fits import RollingFit
from inferscope.fold.join.sample_allocation import (
    MOVING,
    AllocatedSamples,
    Term,
    allocate_short,
    terms_of,
    terms_of_energy,
    terms_of_short,
)
from inferscope.fold.join.step_buffer import (
    BLURRED,
    BY_EXPECTED,
    BYTES_READ,
    BYTES_WRITTEN,
    FLOPS,
    KNOWN,
    NUM_EXPECTED,
    TIME,
    VALUES,
    Amounts,
    StepBuffer,
)
from inferscope.fold.join.windows import (
    SOURCES,
    SampleWindows,
    Window,
    are_short,
    concat,
    group_alike,
    num_windows_of,
    only,
    split_windows,
)
from inferscope.records import CounterSample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SILENT_NS = 1_000_000_000
"""Time without samples after which a source counts as absent."""
FOREIGN_SHARE = 0.01
"""Share of a device used by other processes above which its counters are not attributed."""
_FOREIGN_USE_SOURCE = "nvml"
_LONGEST_AWAITED_NS = 250_000_000
"""Longest window whose end finished requests wait for."""
_OF_ENERGY = ("idle", "prefill", "decode", "bytes", "flops")
_RANK = {source: rank for rank, source in enumerate(SOURCES)}
_TOTALS = [BY_EXPECTED[counted] + phase for phase in (0, 1) for counted in range(NUM_COUNTED)]
"""[phases · counted], column of the expected amounts that covers each quantity."""


class JoinTotals:
    """Totals of the join over all devices of an engine.

    Attributes:
        sm: fit of SM time per nanosecond of each phase.
        energy: fit of energy per nanosecond of idle time and each phase, per byte and per FLOP.
        sources: source of the newest value of each quantity.
        num_late: samples that arrived after their time was settled.
        num_doubled: samples that overlap earlier ones of their source.
    """

    def __init__(self) -> None:
        self.sm = RollingFit(("prefill", "decode"))
        self.energy = RollingFit(_OF_ENERGY)
        self.sources: dict[int, str] = {}
        self.num_late = self.num_doubled = 0


class DeviceJoin:
    """One device of an engine, with its ranks' steps and the unsettled samples.

    Attributes:
        steps: steps of the ranks on the device, by ring.
        through_ns: time through which samples are settled, by source.
        foreign_share: newest share of the device that other processes use.
        foreign_ns: time for which other processes used the device while the engine did not.
        idle_uj: energy not assigned to a step, in microjoules.
    """

    def __init__(self, found: JoinTotals) -> None:
        """Start without samples; add totals to `found`."""
        self._found = found
        self.steps: dict[int, StepBuffer] = {}
        self._pending: list[tuple[SampleWindows, float]] = []
        """Samples, each with the foreign share then: it is sampled once a second, and holds until
        the next sample."""
        self.through_ns: dict[str, int] = {}
        self._lasts_ns: dict[str, int] = {}
        """Length of the newest window, by source."""
        self._sample_ends_ns: dict[tuple[int, str], int] = {}
        """End of the newest sample, by quantity and source."""
        self.foreign_share = 0.0
        self.foreign_ns = 0
        self.idle_uj = 0.0

    def take(self, sample: SampleWindows) -> None:
        """Add a sample to the pending ones."""
        self._pending.append((sample, self.foreign_share))

    def settle(self, through_ns: int, *, since_ns: int, settled_ns: int) -> None:
        """Assign the samples that end by a time to steps.

        Args:
            through_ns: time through which all steps are known.
            since_ns: time from which steps are recorded.
            settled_ns: time through which buckets are settled.
        """
        for steps in self.steps.values():
            steps.read_in()
        due = self._due(through_ns, since_ns=since_ns, settled_ns=settled_ns)
        if not due:
            return
        groups = [(group, foreign, are_short(group)) for group, foreign in group_alike(due)]
        long = [
            sample
            for group, _, is_short in groups
            if not is_short
            for sample in split_windows(group)
        ]
        laid = AllocatedSamples(self.steps.values(), long) if long else None
        num_given = 0
        for group, foreign_share, is_short in groups:
            if is_short:
                self._settle_short(concat(group), foreign_share)
            elif laid is not None:
                samples = long[num_given : num_given + num_windows_of(group)]
                self._settle_long(samples, laid, num_given, foreign_share=foreign_share)
                num_given += len(samples)

    def bucket_values(self, number: int) -> SettledBucket:
        """Settle a bucket and return its values; it accepts no more samples."""
        given, expected = [0.0] * (3 * len(_TOTALS)), [0.0] * NUM_EXPECTED
        for steps in self.steps.values():
            settled = steps.settle(number)
            if settled is not None:
                given = list(map(add, given, settled[0].given))
                expected = list(map(add, expected, settled[1]))
        totals = [expected[column] for column in _TOTALS]
        # Windows overlap where one source takes over from another.
        known = list(map(min, given[KNOWN:BLURRED], totals))
        return SettledBucket(given[VALUES:KNOWN], known, totals, given[BLURRED:])

    def forget(self, before_ns: int) -> bool:
        """Drop the steps that no further sample can reach, and ranks without steps.

        Returns:
            whether a rank was dropped.
        """
        gone = []
        for ring, steps in self.steps.items():
            steps.forget(before_ns)
            if steps.is_empty and steps.until_ns < before_ns:
                gone.append(ring)
        for ring in gone:
            del self.steps[ring]
        return bool(gone)

    def has_all(self, end_ns: int, now_ns: int) -> bool:
        """Return whether every present source has samples up to a time."""
        for source, through_ns in self.through_ns.items():
            is_there = now_ns - through_ns < SILENT_NS
            is_soon = self._lasts_ns[source] <= _LONGEST_AWAITED_NS
            if through_ns < end_ns and is_there and is_soon:
                return False
        return True

    def _due(
        self, through_ns: int, *, since_ns: int, settled_ns: int
    ) -> list[tuple[SampleWindows, float]]:
        """Return the pending samples that end by a time, in order and without duplicates."""
        due: list[tuple[SampleWindows, float]] = []
        left: list[tuple[SampleWindows, float]] = []
        for each in self._pending:
            (due if each[0].end_ns <= through_ns else left).append(each)
        self._pending = left
        due.sort(key=_turn)
        news = []
        for sample, foreign_share in due:
            num_windows = num_windows_of([sample])
            if sample.end_ns < settled_ns:
                self._found.num_late += num_windows
                continue
            after_ns = self.through_ns.get(sample.source, 0)
            if isinstance(sample, CounterSample):
                self._found.num_doubled += sample.start_ns < after_ns
                new: SampleWindows | None = (
                    sample if sample.start_ns >= max(after_ns, since_ns) else None
                )
                lasts_ns = sample.end_ns - sample.start_ns
            else:
                is_new = sample.from_ns >= after_ns
                before_ns = np.maximum.accumulate(sample.to_ns)
                is_new[1:] &= sample.from_ns[1:] >= before_ns[:-1]
                self._found.num_doubled += num_windows - int(np.count_nonzero(is_new))
                new = only(sample, is_new & (sample.from_ns >= since_ns))
                lasts_ns = sample.end_ns - sample.from_ns.item(-1)
            if new is not None:
                self.through_ns[sample.source] = sample.end_ns
                self._lasts_ns[sample.source] = lasts_ns
                news.append((new, foreign_share))
        return news

    # --- long samples -------------------------------------------------------------------------

    def _settle_long(
        self, samples: list[CounterSample], laid: AllocatedSamples, at: int, *, foreign_share: float
    ) -> None:
        """Assign long samples of one source with the same values to steps, by a model.

        Args:
            samples: the samples.
            laid: allocation of all due long samples to steps.
            at: index of the first sample in `laid`.
            foreign_share: share of the device that other processes used.
        """
        source, end_ns, words = samples[0].source, samples[-1].end_ns, samples[0].values
        sums = laid.sums[at : at + len(samples)]
        idle_ns, theirs_ns = [], 0.0
        for sample, busy_ns in zip(samples, laid.busy_ns[at:], strict=False):
            lasted_ns = sample.end_ns - sample.start_ns
            idle_ns.append(max(lasted_ns - busy_ns, 0.0))
            theirs_ns += min(foreign_share * lasted_ns, idle_ns[-1])
        if source == _FOREIGN_USE_SOURCE:
            self.foreign_ns += int(theirs_ns)
        if foreign_share > FOREIGN_SHARE:
            return  # this engine's part of the device's work is unknown
        terms: list[list[Term]] = [[] for _ in samples]
        if "sm_active_share" in words and self._select_source(SM_ACTIVE, source, end_ns):
            self._rate_sm(samples, sums, terms)
        self._rate_bytes(samples, sums, terms)
        if "energy_uj" in words and self._select_source(ENERGY, source, end_ns):
            energies_uj = [sample.values["energy_uj"] for sample in samples]
            for rates, into in zip(
                self._rate_energy(energies_uj, idle_ns, sums), terms, strict=True
            ):
                into += terms_of_energy(rates, 1.0) if rates else ()
        for place, of_sample in enumerate(terms, at):
            if of_sample:
                laid.give(place, of_sample)

    def _rate_sm(
        self, samples: list[CounterSample], sums: list[Amounts], terms: list[list[Term]]
    ) -> None:
        amounts_ns = [
            sample.values["sm_active_share"] * (sample.end_ns - sample.start_ns)
            for sample in samples
        ]
        fits = self._found.sm.take([expected[TIME : TIME + 2] for expected in sums], amounts_ns)
        for amount_ns, expected, fit, into in zip(amounts_ns, sums, fits, terms, strict=True):
            of_phases = (1.0, 1.0) if fit is None else (fit.of(0), fit.of(1))
            prefill_ns, decode_ns = expected[TIME : TIME + 2]
            is_mixed = prefill_ns > 0 and decode_ns > 0
            whole = prefill_ns * of_phases[0] + decode_ns * of_phases[1]
            if whole <= 0 or (is_mixed and fit is None):
                continue
            for phase, unit in enumerate(of_phases):
                into += terms_of(SM_ACTIVE, phase, amount_ns / whole * unit, is_blurred=is_mixed)

    def _rate_bytes(
        self, samples: list[CounterSample], sums: list[Amounts], terms: list[list[Term]]
    ) -> None:
        words = samples[0].values
        are_apart = "dram_read_bytes" in words and "dram_write_bytes" in words
        if not are_apart and not ("dram_share" in words and "dram_peak_bytes_per_s" in words):
            return
        source, end_ns = samples[0].source, samples[-1].end_ns
        are_best = (
            self._select_source(READ, source, end_ns),
            self._select_source(WRITE, source, end_ns),
        )
        for sample, expected, into in zip(samples, sums, terms, strict=True):
            values = sample.values
            moved = (sum(expected[BYTES_READ:BYTES_WRITTEN]), sum(expected[BYTES_WRITTEN:FLOPS]))
            is_mixed = not are_apart or (expected[TIME] > 0 and expected[TIME + 1] > 0)
            if are_apart:
                counted_bytes = (values["dram_read_bytes"], values["dram_write_bytes"])
            else:  # the model divides the sum over both directions
                lasted_ns = sample.end_ns - sample.start_ns
                both = values["dram_share"] * values["dram_peak_bytes_per_s"] * lasted_ns / 1e9
                scale = both / sum(moved) if sum(moved) > 0 else 0.0
                counted_bytes = (moved[0] * scale, moved[1] * scale)
            for counted, is_best, amount, whole in zip(
                (READ, WRITE), are_best, counted_bytes, moved, strict=True
            ):
                if is_best and whole > 0:
                    for phase in (0, 1):
                        into += terms_of(counted, phase, amount / whole, is_blurred=is_mixed)

    def _rate_energy(
        self, energies_uj: list[float], idle_ns: list[float], sums: list[Amounts]
    ) -> list[list[float]]:
        """Return each sample's energy per unit of _OF_ENERGY without idle time; [] for none.

        Args:
            energies_uj: [samples], energy.
            idle_ns: [samples], idle time.
            sums: [samples], amounts expected of their steps.
        """
        found, columns = self._found, []
        for idle, expected in zip(idle_ns, sums, strict=True):
            num_bytes, flops = sum(expected[BYTES_READ:FLOPS]), sum(expected[FLOPS:NUM_EXPECTED])
            columns.append((idle, *expected[TIME:BYTES_READ], num_bytes, flops))
        left_uj = given_uj = 0.0
        rates: list[list[float]] = []
        fits = found.energy.take(columns, energies_uj)
        for energy_uj, amounts, fit in zip(energies_uj, columns, fits, strict=True):
            if fit is None:
                rates.append([])
                continue
            per_unit = [fit.of(column) for column in range(len(_OF_ENERGY))]
            idle_uj, *of_steps = map(mul, amounts, per_unit)
            busy_uj = sum(of_steps)
            rate = energy_uj / (busy_uj + idle_uj) if busy_uj > 0 else 0.0
            given_uj += rate * busy_uj
            left_uj += energy_uj - rate * busy_uj
            rates.append([rate * unit for unit in per_unit[1:]] if busy_uj > 0 else [])
        if given_uj > 0:
            self.idle_uj += left_uj
        return rates

    # --- short samples ------------------------------------------------------------------------

    def _settle_short(self, window: Window, foreign_share: float) -> None:
        """Assign short samples of one source to steps, by time."""
        sums, busy_ns, parts = allocate_short(self.steps.values(), window)
        values, source, end_ns = window.values, window.source, window.end_ns
        lasted_ns = (window.to_ns - window.from_ns).astype(np.float64)
        idle_ns = np.maximum(lasted_ns - busy_ns, 0)
        if source == _FOREIGN_USE_SOURCE:
            theirs_ns = np.minimum(foreign_share * lasted_ns, idle_ns)
            self.foreign_ns += int(np.add.reduce(theirs_ns))
        if foreign_share > FOREIGN_SHARE:
            return
        terms: list[tuple[int, Floats, int]] = []
        prefill_ns, decode_ns = sums[TIME : TIME + 2]
        took_ns = prefill_ns + decode_ns
        is_mixed = (prefill_ns > 0) & (decode_ns > 0)
        for counted, word in ((SM_ACTIVE, "sm_active_share"), (BUSY, "busy_share")):
            if word in values and self._select_source(counted, source, end_ns):
                rates = _ratio(values[word] * lasted_ns, took_ns)
                known = (took_ns > 0).astype(np.float64)
                terms += terms_of_short(counted, rates, known, rates * is_mixed, row=TIME)
        read, written = values.get("dram_read_bytes"), values.get("dram_write_bytes")
        share, peak = values.get("dram_share"), values.get("dram_peak_bytes_per_s")
        if (read is None or written is None) and share is not None and peak is not None:
            # The model divides the sum over both directions.
            modelled = sums[BYTES_READ:FLOPS]
            scale = _ratio(share * peak * lasted_ns / 1e9, np.add.reduce(modelled))
            read, written = (modelled[0] + modelled[1]) * scale, (modelled[2] + modelled[3]) * scale
            is_mixed = np.ones_like(is_mixed)
        if read is not None and written is not None:
            for counted, amounts, row in ((READ, read, MOVING), (WRITE, written, MOVING + 2)):
                if self._select_source(counted, source, end_ns):
                    moving_ns = sums[row] + sums[row + 1]
                    rates = _ratio(amounts, moving_ns)
                    known = (moving_ns > 0).astype(np.float64)
                    terms += terms_of_short(counted, rates, known, rates * is_mixed, row=row)
        if "energy_uj" in values and self._select_source(ENERGY, source, end_ns):
            energies_uj = values["energy_uj"].tolist()
            found = self._rate_energy(energies_uj, idle_ns.tolist(), sums.T.tolist())
            known = np.array([float(bool(rates)) for rates in found])
            of_samples = np.array([rates or [0.0] * (len(_OF_ENERGY) - 1) for rates in found])
            terms += terms_of_energy(list(of_samples.T), known)
        if not terms:
            return
        places, of_terms, rows = zip(*terms, strict=True)
        all_rates, all_rows = np.array(of_terms), list(rows)
        for given, these, part in parts:
            shares = np.add.reduce(all_rates[:, these] * part[all_rows], axis=1).tolist()
            for place, amount in zip(places, shares, strict=True):
                given[place] += amount

    def _select_source(self, counted: int, source: str, end_ns: int) -> bool:
        """Record a source for a quantity; return whether no better source is present."""
        self._sample_ends_ns[counted, source] = end_ns
        for better in SOURCES[: _RANK[source]]:
            if end_ns - self._sample_ends_ns.get((counted, better), -SILENT_NS) < SILENT_NS:
                return False
        self._found.sources[counted] = source
        return True


def _turn(each: tuple[SampleWindows, float]) -> tuple[int, int]:
    sample = each[0]
    return sample.end_ns, _RANK[sample.source]


def _ratio(amounts: Floats, whole: Floats) -> Floats:
    found: Floats = np.zeros(len(whole))
    return np.divide(amounts, whole, out=found, where=whole > 0)
