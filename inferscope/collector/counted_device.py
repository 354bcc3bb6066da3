"""One device of an engine: the samples that are not settled yet, and the steps they are given to.

    pending samples ─► due ─► windows of one source ─► rates, per unit of what steps are expected
                              together                 to take ─► CountedSteps

Short samples go to the steps they lie in. Of long ones the bytes go by the model's, which they only
scale, and SM time and energy by what regression finds over many of them (`attribution.regression`).
"""

from __future__ import annotations

from operator import mul

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.samples import LONGEST_SHORT_NS
from inferscope.collector.accounts import BUSY, ENERGY, READ, SM_ACTIVE, WRITE
from inferscope.collector.counted_steps import (
    BLURRED,
    BUSY_OF_TIME,
    BYTES_READ,
    BYTES_WRITTEN,
    COVERED,
    ENERGY_OF_PREFILL,
    FLOPS,
    NUM_GIVEN,
    NUM_MEASURABLE,
    READ_OF_READ,
    SM_OF_DECODE,
    SM_OF_PREFILL,
    TIME,
    WRITE_OF_WRITE,
    CountedSteps,
    UnderLong,
)
from inferscope.collector.counter_fits import RollingFit
from inferscope.collector.counter_windows import (
    SOURCES,
    Told,
    Window,
    as_one,
    each_alone,
    only,
    together,
)
from inferscope.records import CounterSample

Floats = NDArray[np.float64]
Rates = list[list[float]]

SILENT_NS = 1_000_000_000
"""After which a source does not count as there."""
FOREIGN_SHARE = 0.01
"""Of a device, that others must use for its counters not to be the engine's alone."""
_TELLS_WHO = "nvml"
_LONGEST_AWAITED_NS = 250_000_000
"""Windows: of longer ones the end does not come while requests wait."""
_OF_ENERGY = ("idle", "prefill", "decode", "bytes", "flops")
_RANK = {source: rank for rank, source in enumerate(SOURCES)}


class Found:
    """What the samples of all of an engine's devices have come to.

    Attributes:
        sm: what a nanosecond of each phase takes of SM time.
        energy: likewise of energy; of idle time, bytes and FLOPs, too.
        sources: by what is counted, who told it last.
        idle_uj: energy that no step took.
        num_late: samples that came when their time was settled.
        num_doubled: samples told before.
    """

    def __init__(self) -> None:
        self.sm = RollingFit(("prefill", "decode"))
        self.energy = RollingFit(_OF_ENERGY)
        self.sources: dict[int, str] = {}
        self.idle_uj = 0.0
        self.num_late = self.num_doubled = 0


class CountedDevice:
    """One device of the engine, the steps of all ranks on it, and the samples not settled yet.

    Attributes:
        steps: of all ranks on it.
        pending: samples of it.
        through_ns: by source, up to where its samples are settled.
        foreign_share: that others use of it, as told last.
        foreign_ns: how long others have used it while the engine did not.
    """

    def __init__(self, found: Found) -> None:
        """Start without samples; what they come to is added to `found`."""
        self._found = found
        self.steps = CountedSteps()
        self.pending: list[Told] = []
        self.through_ns: dict[str, int] = {}
        self._lasts_ns: dict[str, int] = {}
        """By source, how long its newest window was."""
        self._heard_ns: dict[tuple[int, str], int] = {}
        """By what is counted and source, the end of its newest sample."""
        self.foreign_share = 0.0
        self.foreign_ns = 0

    def settle(self, through_ns: int, *, since_ns: int, settled_ns: int) -> None:
        """Give the samples up to a time to the steps.

        Args:
            through_ns: up to where all steps are known.
            since_ns: from when on steps are noted.
            settled_ns: up to where nothing can be given any more.
        """
        self.steps.read_in()
        due = self._due(through_ns, since_ns=since_ns, settled_ns=settled_ns)
        if not due:
            return
        groups = [(told, _are_short(told)) for told in together(due)]
        long = [sample for told, is_short in groups if not is_short for sample in each_alone(told)]
        num_given = 0
        if long:
            under = self.steps.under_long(
                [sample.start_ns for sample in long], [sample.end_ns for sample in long]
            )
            rates = [[0.0] * len(long) for _ in range(NUM_GIVEN)]
        for told, is_short in groups:
            if is_short:
                self._settle_short(as_one(told))
                continue
            begin, num_given = num_given, num_given + _num_windows(told)
            self._rate_long(long[begin:num_given], under, begin, rates)
        if long:
            self.steps.give(under, np.array(rates))

    def has_all(self, end_ns: int, now_ns: int) -> bool:
        """Tell whether every source that is there has told up to a time."""
        for source, through_ns in self.through_ns.items():
            is_there = now_ns - through_ns < SILENT_NS
            is_soon = self._lasts_ns[source] <= _LONGEST_AWAITED_NS
            if through_ns < end_ns and is_there and is_soon:
                return False
        return True

    def _due(self, through_ns: int, *, since_ns: int, settled_ns: int) -> list[Told]:
        """Return the pending samples up to a time, each source's in turn and none twice."""
        due: list[Told] = []
        left: list[Told] = []
        for told in self.pending:
            (due if told.end_ns <= through_ns else left).append(told)
        self.pending = left
        due.sort(key=_turn)
        news = []
        for told in due:
            num_windows = 1 if isinstance(told, CounterSample) else len(told.from_ns)
            if told.end_ns < settled_ns:
                self._found.num_late += num_windows
                continue
            after_ns = self.through_ns.get(told.source, 0)
            if isinstance(told, CounterSample):
                self._found.num_doubled += told.start_ns < after_ns
                new: Told | None = told if told.start_ns >= max(after_ns, since_ns) else None
                lasts_ns = told.end_ns - told.start_ns
            else:
                is_new = told.from_ns >= after_ns
                before_ns = np.maximum.accumulate(told.to_ns)
                is_new[1:] &= told.from_ns[1:] >= before_ns[:-1]
                self._found.num_doubled += num_windows - int(np.count_nonzero(is_new))
                new = only(told, is_new & (told.from_ns >= since_ns))
                lasts_ns = told.end_ns - told.from_ns.item(-1)
            if new is not None:
                self.through_ns[told.source] = told.end_ns
                self._lasts_ns[told.source] = lasts_ns
                news.append(new)
        return news

    # --- long samples -------------------------------------------------------------------------

    def _rate_long(
        self, samples: list[CounterSample], under: UnderLong, at: int, rates: Rates
    ) -> None:
        """Work out what steps are given of long samples of one source that tell the same.

        Args:
            samples: they.
            under: how they lie over the steps, and others before and behind them.
            at: the place of the first among these.
            rates: takes it, as `CountedSteps.give` does.
        """
        source, end_ns, words = samples[0].source, samples[-1].end_ns, samples[0].values
        sums = under.sums[at : at + len(samples)]
        idle_ns, theirs_ns = [], 0.0
        for sample, busy_ns in zip(samples, under.busy_ns[at:], strict=False):
            lasted_ns = sample.end_ns - sample.start_ns
            idle_ns.append(max(lasted_ns - busy_ns, 0.0))
            theirs_ns += min(self.foreign_share * lasted_ns, idle_ns[-1])
        if source == _TELLS_WHO:
            # Whose kernels run is asked once a second, and holds until it is asked again.
            self.foreign_ns += int(theirs_ns)
        if self.foreign_share > FOREIGN_SHARE:
            return  # of what the device does, nobody knows how much is this engine's
        if "sm_active_share" in words and self._is_best(SM_ACTIVE, source, end_ns):
            self._rate_sm(samples, sums, at, rates)
        self._rate_bytes(samples, sums, at, rates)
        if "energy_uj" in words and self._is_best(ENERGY, source, end_ns):
            told_uj = [sample.values["energy_uj"] for sample in samples]
            self._rate_energy(told_uj, idle_ns, sums, at, rates)

    def _rate_sm(self, samples: list[CounterSample], sums: Rates, at: int, rates: Rates) -> None:
        amounts_ns = []
        for sample, expected in zip(samples, sums, strict=True):
            lasted_ns = sample.end_ns - sample.start_ns
            amounts_ns.append(sample.values["sm_active_share"] * lasted_ns)
            self._found.sm.add(expected[TIME : TIME + 2], amounts_ns[-1])
        fit = self._found.sm.now()
        of_prefill, of_decode = (1.0, 1.0) if fit is None else (fit.of(0), fit.of(1))
        for place, (amount_ns, expected) in enumerate(zip(amounts_ns, sums, strict=True), at):
            prefill_ns, decode_ns = expected[TIME : TIME + 2]
            is_mixed = prefill_ns > 0 and decode_ns > 0
            whole = prefill_ns * of_prefill + decode_ns * of_decode
            if whole <= 0 or (is_mixed and fit is None):
                continue
            rate = amount_ns / whole
            rates[SM_OF_PREFILL][place] = rate * of_prefill
            rates[SM_OF_DECODE][place] = rate * of_decode
            rates[COVERED + SM_ACTIVE][place] = 1.0
            if is_mixed:
                rates[BLURRED + SM_OF_PREFILL][place] = rate * of_prefill
                rates[BLURRED + SM_OF_DECODE][place] = rate * of_decode

    def _rate_bytes(self, samples: list[CounterSample], sums: Rates, at: int, rates: Rates) -> None:
        words = samples[0].values
        are_apart = "dram_read_bytes" in words and "dram_write_bytes" in words
        if not are_apart and not ("dram_share" in words and "dram_peak_bytes_per_s" in words):
            return
        source, end_ns = samples[0].source, samples[-1].end_ns
        are_best = (self._is_best(READ, source, end_ns), self._is_best(WRITE, source, end_ns))
        for place, (sample, expected) in enumerate(zip(samples, sums, strict=True), at):
            values = sample.values
            moved = (sum(expected[BYTES_READ:BYTES_WRITTEN]), sum(expected[BYTES_WRITTEN:FLOPS]))
            is_mixed = not are_apart or (expected[TIME] > 0 and expected[TIME + 1] > 0)
            if are_apart:
                told = (values["dram_read_bytes"], values["dram_write_bytes"])
            else:  # the model says how the sum of both directions is made up
                lasted_ns = sample.end_ns - sample.start_ns
                both = values["dram_share"] * values["dram_peak_bytes_per_s"] * lasted_ns / 1e9
                scale = both / sum(moved) if sum(moved) > 0 else 0.0
                told = (moved[0] * scale, moved[1] * scale)
            for counted, row, is_best, amount, whole in zip(
                (READ, WRITE), (READ_OF_READ, WRITE_OF_WRITE), are_best, told, moved, strict=True
            ):
                if is_best and whole > 0:
                    rates[row][place] = amount / whole
                    rates[BLURRED + row][place] = amount / whole if is_mixed else 0.0
                    rates[COVERED + counted][place] = 1.0

    def _rate_energy(
        self, told_uj: list[float], idle_ns: list[float], sums: Rates, at: int, rates: Rates
    ) -> None:
        found, columns = self._found, []
        for energy_uj, idle, expected in zip(told_uj, idle_ns, sums, strict=True):
            num_bytes, flops = sum(expected[BYTES_READ:FLOPS]), sum(expected[FLOPS:])
            columns.append((idle, *expected[TIME:BYTES_READ], num_bytes, flops))
            found.energy.add(columns[-1], energy_uj)
        fit = found.energy.now()
        if fit is None:
            return
        left_uj = given_uj = 0.0
        per_unit = [fit.of(column) for column in range(len(_OF_ENERGY))]
        for place, (energy_uj, amounts) in enumerate(zip(told_uj, columns, strict=True), at):
            idle_uj, *of_steps = map(mul, amounts, per_unit)
            busy_uj = sum(of_steps)
            rate = energy_uj / (busy_uj + idle_uj) if busy_uj > 0 else 0.0
            given_uj += rate * busy_uj
            left_uj += energy_uj - rate * busy_uj
            if busy_uj <= 0:
                continue
            for row, unit in enumerate(per_unit[1:], ENERGY_OF_PREFILL):
                rates[row][place] = rate * unit
            rates[COVERED + ENERGY][place] = 1.0
        if given_uj > 0:
            found.idle_uj += left_uj

    # --- short samples ------------------------------------------------------------------------

    def _settle_short(self, window: Window) -> None:
        """Give short samples of one source to the steps: by time."""
        under = self.steps.under_short(window.from_ns, window.to_ns)
        values, source, end_ns = window.values, window.source, window.end_ns
        lasted_ns = (window.to_ns - window.from_ns).astype(np.float64)
        idle_ns = np.maximum(lasted_ns - under.busy_ns, 0)
        if source == _TELLS_WHO:
            theirs_ns = np.minimum(self.foreign_share * lasted_ns, idle_ns)
            self.foreign_ns += int(np.add.reduce(theirs_ns))
        if self.foreign_share > FOREIGN_SHARE:
            return
        rates = np.zeros((NUM_GIVEN, len(lasted_ns)))
        prefill_ns, decode_ns = under.sums[TIME : TIME + 2]
        took_ns = prefill_ns + decode_ns
        for counted, word, rows in (
            (SM_ACTIVE, "sm_active_share", [SM_OF_PREFILL, SM_OF_DECODE]),
            (BUSY, "busy_share", [BUSY_OF_TIME]),
        ):
            if word in values and self._is_best(counted, source, end_ns):
                rates[rows] = _ratio(values[word] * lasted_ns, took_ns)
                rates[COVERED + counted] = took_ns > 0
        read, written = values.get("dram_read_bytes"), values.get("dram_write_bytes")
        share, peak = values.get("dram_share"), values.get("dram_peak_bytes_per_s")
        is_mixed = (prefill_ns > 0) & (decode_ns > 0)
        are_blurred = [is_mixed] * NUM_MEASURABLE
        if (read is None or written is None) and share is not None and peak is not None:
            # The model says how the sum of both directions is made up.
            modelled = under.sums[BYTES_READ:FLOPS]
            scale = _ratio(share * peak * lasted_ns / 1e9, np.add.reduce(modelled))
            read, written = (modelled[0] + modelled[1]) * scale, (modelled[2] + modelled[3]) * scale
            are_blurred[READ_OF_READ] = are_blurred[WRITE_OF_WRITE] = np.ones_like(is_mixed)
        if read is not None and written is not None:
            for counted, row, amounts, moving_ns in zip(
                (READ, WRITE),
                (READ_OF_READ, WRITE_OF_WRITE),
                (read, written),
                under.moving_ns,
                strict=True,
            ):
                if self._is_best(counted, source, end_ns):
                    rates[row] = _ratio(amounts, moving_ns)
                    rates[COVERED + counted] = moving_ns > 0
        rates[BLURRED : BLURRED + NUM_MEASURABLE] = rates[:NUM_MEASURABLE] * np.array(are_blurred)
        if "energy_uj" in values and self._is_best(ENERGY, source, end_ns):
            of_energy = rates.tolist()
            self._rate_energy(
                values["energy_uj"].tolist(), idle_ns.tolist(), under.sums.T.tolist(), 0, of_energy
            )
            rates = np.array(of_energy)
        self.steps.give(under, rates)

    def _is_best(self, counted: int, source: str, end_ns: int) -> bool:
        """Tell whether no better source counts this, too."""
        self._heard_ns[counted, source] = end_ns
        for better in SOURCES[: _RANK[source]]:
            if end_ns - self._heard_ns.get((counted, better), -SILENT_NS) < SILENT_NS:
                return False
        self._found.sources[counted] = source
        return True


def _turn(told: Told) -> tuple[int, int]:
    return told.end_ns, _RANK[told.source]


def _are_short(told: list[Told]) -> bool:
    return all(
        each.end_ns - each.start_ns <= LONGEST_SHORT_NS
        if isinstance(each, CounterSample)
        else int((each.to_ns - each.from_ns).max()) <= LONGEST_SHORT_NS
        for each in told
    )


def _num_windows(told: list[Told]) -> int:
    return sum(1 if isinstance(each, CounterSample) else len(each.from_ns) for each in told)


def _ratio(amounts: Floats, whole: Floats) -> Floats:
    found: Floats = np.zeros(len(whole))
    return np.divide(amounts, whole, out=found, where=whole > 0)
