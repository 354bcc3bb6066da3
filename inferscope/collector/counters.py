"""One engine's counters: samples of its devices in, what each phase and request took out.

    steps ──► CountedSteps, by device ◄── samples, in turn ◄── the samplers' rings
                     │  settle, at Ticks
                     ▼
    regression ◄─ windows     tenths ─► Accounts ─► requests, at most 500 ms after their end

Short samples go to the steps they lie in. Of long ones the bytes go by the model's, which they only
scale, and SM time and energy by what regression finds over many of them (`attribution.samples`).
Everything happens at Ticks, so that a replay does the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.samples import LONGEST_SHORT_NS, Touching
from inferscope.collector.accounts import (
    BUSY,
    ENERGY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
    TENTH_NS,
    WRITE,
    Accounts,
    Left,
    Settled,
)
from inferscope.collector.counted import RequestCounters, told
from inferscope.collector.counted_steps import CountedSteps, Moved, StepRun
from inferscope.collector.counter_fits import RollingFit
from inferscope.collector.counter_windows import SOURCES, Window, together
from inferscope.collector.host_use import TELLS_CPU, HostUse
from inferscope.collector.rings import RingState
from inferscope.collector.stamps import Placed
from inferscope.collector.steps import Execution, SplitStep
from inferscope.records import plain_uuid

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LONGEST_WAIT_NS = 500_000_000
"""That a finished request waits for counters."""
_TELLS_WHO = "nvml"
_SILENT_NS = 1_000_000_000
"""After which a source does not count as there."""
_REACH_NS = 2_500_000_000
"""How far back a window may begin: sources that tell once a second included."""
_LONGEST_AWAITED_NS = 250_000_000
"""Windows: of longer ones the end does not come while requests wait."""
_KEPT_TENTHS = 3000
_FOREIGN_SHARE = 0.01

NO_SAMPLER = "no samples of this device: start inferscope sampler"
NO_DEVICE = "the engine does not say which device it runs on"
NO_COUNTERS = "runs on the CPU, which has no SMs"
SHARED = "other processes use the device, too"
UNSETTLED = "too few windows in which the phases differ"


class _Device:
    """One device of the engine, the steps of all ranks on it, and the samples not settled yet."""

    def __init__(self) -> None:
        self.steps = CountedSteps()
        self.pending: list[Window] = []
        self.through_ns: dict[str, int] = {}
        """By source, up to where its samples are settled."""
        self.lasts_ns: dict[str, int] = {}
        """Likewise, how long its newest window was."""
        self.heard_ns: dict[tuple[int, str], int] = {}
        """By what is counted and source, the end of its newest sample."""
        self.foreign_share = 0.0
        self.foreign_ns = 0


class Counters:
    """The join of one engine's steps with samples of its devices.

    Attributes:
        totals: [phases, counted], since the fold began; whole numbers as floats.
        of_totals: [phases, counted], of what time or bytes these are.
        num_late: samples that came when their time was settled.
        num_doubled: samples told before.
        num_unplaced: windows stamped by the wall clock when nobody can tell what it showed.
        stamp_error_ns: how far off the newest windows stamped by it can be, None without such.
        gauges: by word, what was told last of any device.
        recent: the last minutes' tenths, and when each ended.
        foreign_ns: by ring, how long others used its device while this engine did not.
    """

    def __init__(self, accounts: Accounts, rings: dict[int, RingState]) -> None:
        self._accounts = accounts
        self._rings = rings
        self._devices: dict[str, _Device] = {}
        """By uuid; where a rank does not tell whose it is, by its ring."""
        self._by_uuid: dict[str, list[int]] = {}
        self._device_of: dict[int, str] = {}
        """By ring, as far as they tell."""
        self._heard_ns = 0
        self._since_ns = 0
        """From when on steps are noted: what was counted before cannot be joined."""
        self.is_on = False
        self.now_ns = 0
        self.totals = np.zeros((2, NUM_COUNTED))
        self.of_totals = np.zeros((2, NUM_COUNTED))
        self.blurred = np.zeros((2, NUM_COUNTED))
        self.idle_uj = 0.0
        self.num_late = self.num_doubled = self.num_unplaced = 0
        self.stamp_error_ns: int | None = None
        self.gauges: dict[str, float] = {}
        self._host = HostUse()
        self.sm = RollingFit(("prefill", "decode"))
        self.energy = RollingFit(("idle", "prefill", "decode", "bytes", "flops"))
        self.sources: dict[int, str] = {}
        """By what is counted, who told it last."""
        self._settled_through_ns = 0
        self.foreign_ns: dict[int, int] = {}
        self.recent: deque[tuple[int, Settled]] = deque(maxlen=_KEPT_TENTHS)
        self._recent_foreign: deque[tuple[int, int]] = deque(maxlen=_KEPT_TENTHS)

    # --- what comes in ------------------------------------------------------------------------

    def describe(self) -> None:
        """Read again which ring's device is which: an engine has said who it is."""
        self._by_uuid, self._device_of = {}, {}
        for number, ring in self._rings.items():
            info = ring.info
            uuid = plain_uuid(info.mig_uuid or info.device_uuid) if info is not None else ""
            if uuid and not ring.is_front_end:
                self._by_uuid.setdefault(uuid, []).append(number)
                self._device_of[number] = uuid

    def sample(self, placed: Placed) -> None:
        """Take a sample of any device of any host."""
        record, window = placed.record, placed.window
        if record.source == TELLS_CPU:
            pids = {ring.opened.pid for ring in self._rings.values()}
            self.gauges |= self._host.take(record, pids)
            return
        uuid = plain_uuid(record.device_uuid)
        rings = self._by_uuid.get(uuid)
        if rings is None:
            return
        self.num_unplaced += placed.num_unplaced
        if placed.error_ns is not None:
            self.stamp_error_ns = placed.error_ns
        values = record.values
        self.gauges |= values
        if window is None:
            return
        self._heard_ns = max(self._heard_ns, record.t_ns)
        if not self.is_on:
            self.is_on, self._since_ns = True, self._heard_ns
        device = self._device(uuid)
        if "foreign_busy_share" in values:
            device.foreign_share = values["foreign_busy_share"]
            for number in rings:
                self.foreign_ns.setdefault(number, 0)
        device.pending.append(window)

    def reach(self, at_ns: int) -> None:
        """Note what requests have computed so far, if a step that ends then begins a tenth."""
        self._accounts.reach(at_ns // TENTH_NS)

    def step(
        self,
        run: Execution,
        split: SplitStep,
        prefill_ns: list[int],
        moved: Moved,
    ) -> None:
        """Take a step.

        Args:
            run: its execution.
            split: its time, divided.
            prefill_ns: of it, by rank.
            moved: what it moved and computed.
        """
        tenth = self._accounts.last
        for at, span in enumerate(run.ranks):
            device = self._device(self._device_of.get(span.ring) or f"#{span.ring}")
            rest_ns = split.padding_ns[at] + split.unattributed_ns[at]
            device.steps.add(
                StepRun(
                    span.ring,
                    tenth,
                    span.start_ns,
                    span.end_ns,
                    prefill_ns[at],
                    span.measured_ns - prefill_ns[at] - rest_ns,
                    moved,
                    len(run.ranks),
                )
            )

    def _device(self, name: str) -> _Device:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = _Device()
        return device

    # --- what comes out -----------------------------------------------------------------------

    def tick(self, through_ns: int, now_ns: int) -> None:
        """Settle what no step and no sample can change any more.

        Args:
            through_ns: up to where all steps are known.
            now_ns: the fold's time.
        """
        self.now_ns = now_ns
        if not self.is_on:
            return
        if now_ns - self._heard_ns > _SILENT_NS + LONGEST_WAIT_NS:
            self.is_on = False
            self._accounts.stop()
            self._devices.clear()
            return
        for name, device in self._devices.items():
            device.steps.read_in()
            for window in together(list(self._due(device, through_ns))):
                self._settle(device, window)
            if device.foreign_ns:
                self._recent_foreign.append((now_ns, device.foreign_ns))
                for number in self._by_uuid.get(name, ()):
                    self.foreign_ns[number] = self.foreign_ns.get(number, 0) + device.foreign_ns
                device.foreign_ns = 0
        self._close_tenths(through_ns)

    def of(self, left: Left) -> RequestCounters:
        """Return what is known of a request that has ended."""
        errors = {SM_ACTIVE: self.sm.error(), ENERGY: self.energy.error()}
        return told(left, self.sources, errors)

    def reason(self) -> str:
        """Return why nothing is counted; empty where something is."""
        if not self._by_uuid:
            infos = [ring.info for ring in self._rings.values() if ring.info is not None]
            is_cpu = any(info.device.lower().startswith("cpu") for info in infos)
            return NO_COUNTERS if is_cpu else NO_DEVICE
        if not self.is_on:
            return NO_SAMPLER
        if any(device.foreign_share > _FOREIGN_SHARE for device in self._devices.values()):
            return SHARED
        return "" if self.totals.any() else UNSETTLED

    def gauges_now(self, now_ns: int) -> dict[str, float]:
        """Return what was told last, without what is of a silent source."""
        is_told = self._host.is_told(now_ns)
        return {
            word: value
            for word, value in self.gauges.items()
            if (is_told if word in ("cpu_cores", "rss_bytes") else self.is_on)
        }

    def heard(self, now_ns: int) -> set[str]:
        """Return the sources that are there now."""
        return {
            source
            for device in self._devices.values()
            for source, through_ns in device.through_ns.items()
            if now_ns - through_ns < _SILENT_NS + LONGEST_WAIT_NS
        }

    def recent_foreign_ns(self, since_ns: int) -> int | None:
        """Return how long others used the devices lately, None where nobody tells."""
        if not self.foreign_ns:
            return None
        return sum(foreign_ns for at_ns, foreign_ns in self._recent_foreign if at_ns >= since_ns)

    # --- windows ------------------------------------------------------------------------------

    def _due(self, device: _Device, through_ns: int) -> Iterable[Window]:
        """Return the pending windows up to a time, each source's in turn and none twice."""
        due: list[Window] = []
        left: list[Window] = []
        for window in device.pending:
            (due if window.to_ns[-1] <= through_ns else left).append(window)
        device.pending = left
        due.sort(key=lambda window: (int(window.to_ns[-1]), SOURCES.index(window.source)))
        for window in due:
            is_news = np.ones(len(window.from_ns), dtype=np.bool_)
            after_ns = device.through_ns.get(window.source, 0)
            is_news &= window.from_ns >= after_ns
            is_joined = window.from_ns >= self._since_ns
            before = np.maximum.accumulate(window.to_ns)
            is_news[1:] &= window.from_ns[1:] >= before[:-1]
            num_old = len(is_news) - int(np.count_nonzero(is_news))
            is_news &= is_joined
            is_late = int(window.to_ns[-1]) < self._settled_through_ns
            if is_late:
                self.num_late += len(is_news)
                continue
            self.num_doubled += num_old
            if not is_news.any():
                continue
            device.through_ns[window.source] = int(window.to_ns[-1])
            device.lasts_ns[window.source] = int(window.to_ns[-1] - window.from_ns[-1])
            yield Window(
                window.source,
                window.from_ns[is_news],
                window.to_ns[is_news],
                {word: column[is_news] for word, column in window.values.items()},
            )

    def _is_best(self, device: _Device, counted: int, source: str, end_ns: int) -> bool:
        """Tell whether no better source counts this, too."""
        device.heard_ns[counted, source] = end_ns
        rank = SOURCES.index(source)
        for better in SOURCES[:rank]:
            if end_ns - device.heard_ns.get((counted, better), -_SILENT_NS) < _SILENT_NS:
                return False
        self.sources[counted] = source
        return True

    def _settle(self, device: _Device, window: Window) -> None:
        """Give the samples of a record to the steps."""
        steps, values = device.steps, window.values
        from_ns, to_ns = window.from_ns, window.to_ns
        lasted_ns = (to_ns - from_ns).astype(np.float64)
        pairs, is_pure = steps.under(from_ns, to_ns)
        end_ns, pure = int(to_ns[-1]), is_pure.astype(np.float64)
        idle_ns = np.maximum(lasted_ns - steps.busy_ns(pairs, from_ns, to_ns), 0)
        if window.source == _TELLS_WHO:
            # Whose kernels run is asked once a second, and holds until it is asked again.
            theirs_ns = np.minimum(device.foreign_share * lasted_ns, idle_ns)
            device.foreign_ns += int(theirs_ns.sum())
        if device.foreign_share > _FOREIGN_SHARE:
            return  # of what the device does, nobody knows how much is this engine's
        is_short = bool(lasted_ns.max() <= LONGEST_SHORT_NS)
        by_time = steps.phase_ns
        if "sm_active_share" in values and self._is_best(device, SM_ACTIVE, window.source, end_ns):
            amounts = values["sm_active_share"] * lasted_ns
            expected: Floats | None = by_time
            if not is_short:
                busy_ns = pairs.by_phase(by_time)
                self.sm.add(busy_ns, amounts)
                expected = self.sm.expected((by_time[:, 0], by_time[:, 1]))
            self._give(steps, SM_ACTIVE, pairs, amounts, expected, pure, fallback=by_time)
        if (
            is_short
            and "busy_share" in values
            and self._is_best(device, BUSY, window.source, end_ns)
        ):
            amounts = values["busy_share"] * lasted_ns
            self._give(steps, BUSY, pairs, amounts, by_time, pure, fallback=by_time)
        self._settle_bytes(device, window, pairs, pure, lasted_ns, is_short=is_short)
        if "energy_uj" in values and self._is_best(device, ENERGY, window.source, end_ns):
            self._settle_energy(steps, pairs, idle_ns, values["energy_uj"])

    def _settle_bytes(
        self,
        device: _Device,
        window: Window,
        pairs: Touching,
        pure: Floats,
        lasted_ns: Floats,
        *,
        is_short: bool,
    ) -> None:
        steps, values, end_ns = device.steps, window.values, int(window.to_ns[-1])
        reads, writes = values.get("dram_read_bytes"), values.get("dram_write_bytes")
        modelled = steps.totals[:, :, READ], steps.totals[:, :, WRITE]
        if reads is None or writes is None:
            peak = values.get("dram_peak_bytes_per_s")
            if peak is None or "dram_share" not in values:
                return
            # Both directions in one sum: the model says how it is made up.
            both = values["dram_share"] * peak * lasted_ns / 1e9
            parts = [pairs.by_phase(each).sum(axis=1) for each in modelled]
            whole = parts[0] + parts[1]
            share = np.zeros(len(both))
            np.divide(parts[0], whole, out=share, where=whole > 0)
            reads, writes = both * share, both * (1 - share)
            pure = np.zeros_like(pure)
        for counted, amounts, model in zip((READ, WRITE), (reads, writes), modelled, strict=True):
            if not self._is_best(device, counted, window.source, end_ns):
                continue
            expected = model
            if is_short:  # by time within a sample; by the model only within a mixed step
                share = model.sum(axis=1, keepdims=True)
                whole_ns = steps.phase_ns.sum(axis=1, keepdims=True)
                expected = np.zeros_like(model)
                np.divide(model * whole_ns, share, out=expected, where=share > 0)
            self._give(steps, counted, pairs, amounts, expected, pure, fallback=None)

    def _settle_energy(
        self, steps: CountedSteps, pairs: Touching, idle_ns: Floats, energy_uj: Floats
    ) -> None:
        bytes_moved = steps.totals[:, :, READ] + steps.totals[:, :, WRITE]
        columns = [idle_ns, *pairs.by_phase(steps.phase_ns).T]
        columns += [pairs.by_phase(each).sum(axis=1) for each in (bytes_moved, steps.flops)]
        self.energy.add(np.stack(columns, axis=1), energy_uj)
        fit = self.energy.now()
        if fit is None:
            return
        per_ns = np.array([fit.of(1), fit.of(2)])
        expected = steps.phase_ns * per_ns + bytes_moved * fit.of(3) + steps.flops * fit.of(4)
        idle_uj = idle_ns * fit.of(0)
        busy_uj = pairs.by_phase(expected).sum(axis=1)
        whole = busy_uj + idle_uj
        share = np.zeros(len(energy_uj))
        np.divide(busy_uj, whole, out=share, where=whole > 0)
        none = np.zeros(len(energy_uj))
        given = steps.give(ENERGY, pairs, energy_uj * share, expected, none)
        self.idle_uj += float((energy_uj * (1 - share)).sum()) if given.any() else 0.0

    def _give(
        self,
        steps: CountedSteps,
        counted: int,
        pairs: Touching,
        amounts: Floats,
        expected: Floats | None,
        pure: Floats,
        *,
        fallback: Floats | None,
    ) -> None:
        """Divide samples by what is expected; where nothing is, those of one phase by its time."""
        if expected is None:
            if fallback is None:
                return
            is_pure = pure > 0
            keep = is_pure[pairs.sample]
            pairs = Touching(
                pairs.sample[keep],
                pairs.step[keep],
                pairs.overlap_ns[keep],
                pairs.within[keep],
                pairs.num_samples,
            )
            expected = fallback
        steps.give(counted, pairs, amounts, expected, pure)

    # --- tenths -------------------------------------------------------------------------------

    def _close_tenths(self, through_ns: int) -> None:
        accounts = self._accounts
        while (number := accounts.oldest()) is not None:
            end_ns = (number + 1) * TENTH_NS
            if end_ns > through_ns or not (self._has_all(end_ns) or self._is_over(end_ns)):
                break
            parts = [device.steps.of_tenth(number) for device in self._devices.values()]
            whole = Settled(*(np.sum(column, axis=0) for column in zip(*parts, strict=True)))
            accounts.settle(whole)
            self.totals += whole.values
            self.of_totals += whole.known
            self.blurred += whole.blurred
            self.recent.append((end_ns, whole))
            self._settled_through_ns = end_ns
            for device in self._devices.values():
                device.steps.forget(number, end_ns - _REACH_NS)
        if accounts.oldest() is None:
            self._settled_through_ns = max(self._settled_through_ns, through_ns - TENTH_NS)

    def _has_all(self, end_ns: int) -> bool:
        """Tell whether every source that is there has told up to a time."""
        for device in self._devices.values():
            for source, through_ns in device.through_ns.items():
                is_there = self.now_ns - through_ns < _SILENT_NS
                is_soon = device.lasts_ns[source] <= _LONGEST_AWAITED_NS
                if through_ns < end_ns and is_there and is_soon:
                    return False
        return True

    def _is_over(self, end_ns: int) -> bool:
        return self.now_ns >= end_ns + LONGEST_WAIT_NS - TENTH_NS
