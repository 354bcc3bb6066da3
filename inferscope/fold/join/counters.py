"""Counters of one engine: device samples in, counter values of phases and requests out.

    steps ──► DeviceJoin, one per device ◄── samples, in order ◄── the samplers' rings
                     │  settle, when a request has waited for it, or periodically
                     ▼
                  buckets ─► CounterShares ─► requests

Everything happens at Ticks, so that a replay gives the same result. Not every Tick settles, because
settling a second costs little more than settling a bucket of 100 ms.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from operator import add

import numpy as np
from numpy.typing import NDArray

from inferscope.fold.join.counter_shares import (
    BUCKET_NS,
    ENERGY,
    NUM_COUNTED,
    SM_ACTIVE,
    CounterShares,
    EndedRequest,
    SettledBucket,
)
from inferscope.fold.join.device import FOREIGN_SHARE, SILENT_NS, DeviceJoin, JoinTotals
from inferscope.fold.join.host_use import HOST_SOURCE, HostUse
from inferscope.fold.join.request_counters import CounterReporter, RequestCounters
from inferscope.fold.join.stamps import MappedSample
from inferscope.fold.join.step_buffer import Moved, StepBuffer
from inferscope.fold.rings import RingState
from inferscope.fold.steps import Execution, SplitStep
from inferscope.records import EngineInfo, plain_uuid

LONGEST_WAIT_NS = 500_000_000
"""Longest wait of a finished request for counters; the next Tick ends it."""
_REACH_NS = 2_500_000_000
"""Age of the oldest window start: it covers sources that sample once a second."""
_SETTLED_EVERY_NS = 1_200_000_000
"""Longest interval between settlements, of which most of the cost is fixed. It is two to three
times `LONGEST_WAIT_NS`, after which a waiting request settles earlier."""
_KEPT_BUCKETS = 3000
_NO_SUMS = [0.0] * (len(SettledBucket._fields) * 2 * NUM_COUNTED)
_NEVER_NS = 1 << 62

NO_SAMPLER = "no samples of this device: start inferscope sampler"
SAMPLES_ENDED = "the samples of this device have ended"
NO_DEVICE = "the engine does not report its device"
NO_COUNTERS = "runs on the CPU, which has no SMs"
SHARED = "other processes use the device too"
UNSETTLED = "too few windows in which the phases differ"


class Counters:
    """The join of one engine's steps with samples of its devices.

    Attributes:
        is_on: whether samples of its devices arrive.
        reach_ns: start of the next bucket; `_NEVER_NS` without samples.
        book_steps: callback that books the known steps before a settlement.
        now_ns: time of the newest Tick.
        found: totals of the join over all devices.
        num_unplaced: windows stamped by the wall clock at times that have no mapping.
        stamp_error_ns: error bound of the newest windows stamped by the wall clock, None without.
        gauges: time and value of the newest sample, by device UUID and value name: each source has
            its own names, and may stop alone.
        host_use: use of the host by its processes, by value name.
        idle_uj: energy not assigned to a step, in microjoules, by device.
        recent: buckets of the last five minutes: end and concatenated fields of `SettledBucket`.
        foreign_ns: time for which other processes used a device while this engine did not, by
            device.
    """

    def __init__(self, accounts: CounterShares, rings: dict[int, RingState]) -> None:
        self._accounts = accounts
        self._rings = rings
        self._devices: dict[str, DeviceJoin] = {}
        """Devices by UUID, or by ring number for ranks that do not report theirs."""
        self._by_uuid: dict[str, list[int]] = {}
        self._device_of: dict[int, str] = {}
        """UUID of the device, by ring, if its rank reports one."""
        self._steps_of: dict[int, StepBuffer] = {}
        """Steps on the ring's device, by ring."""
        self._newest_sample_ns = 0
        self._since_ns = 0
        """Time from which steps are recorded: earlier samples cannot be joined."""
        self.is_on = False
        self.reach_ns = _NEVER_NS
        self.book_steps: Callable[[], None] = lambda: None
        self.now_ns = 0
        self._sums: dict[str, list[float]] = {}
        """Concatenated fields of `SettledBucket`, summed over all buckets, by device."""
        self.found = JoinTotals()
        self.num_unplaced = 0
        self.stamp_error_ns: int | None = None
        self.gauges: dict[str, dict[str, tuple[int, float]]] = {}
        self.host_use: dict[str, float] = {}
        self.idle_uj: dict[str, float] = {}
        self._host = HostUse()
        self._through_ns = self._settled_at_ns = self._settled_through_ns = 0
        self.foreign_ns: dict[str, int] = {}
        self.recent: deque[tuple[int, array[float]]] = deque(maxlen=_KEPT_BUCKETS)
        self._recent_foreign: deque[tuple[int, int]] = deque(maxlen=_KEPT_BUCKETS)

    @property
    def totals(self) -> NDArray[np.float64]:
        """Return the values counted since the fold began: [phases, counted], whole numbers."""
        return self._sum_of("values")

    @property
    def covered_totals(self) -> NDArray[np.float64]:
        """Return the time or bytes that the totals cover: [phases, counted]."""
        return self._sum_of("known")

    @property
    def blurred(self) -> NDArray[np.float64]:
        """Return the part of the totals that was divided over phases: [phases, counted]."""
        return self._sum_of("blurred")

    def of_device(self, uuid: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return one device's values, and the time or bytes they cover: [phases, counted] each."""
        return self._sum_of("values", uuid), self._sum_of("known", uuid)

    def _sum_of(self, field: str, device: str | None = None) -> NDArray[np.float64]:
        """Return one field of the sums, over all devices unless one is named."""
        chosen = self._sums.values() if device is None else [self._sums.get(device, _NO_SUMS)]
        sums = np.sum([*chosen, _NO_SUMS], axis=0)
        parts = sums.reshape(len(SettledBucket._fields), 2, NUM_COUNTED)
        part: NDArray[np.float64] = parts[SettledBucket._fields.index(field)]
        return part

    # --- input --------------------------------------------------------------------------------

    def describe(self) -> None:
        """Map rings to devices again after a new EngineInfo."""
        self._by_uuid, self._device_of = {}, {}
        self._steps_of.clear()
        for number, ring in self._rings.items():
            info = ring.info
            uuid = plain_uuid(info.mig_uuid or info.device_uuid) if info is not None else ""
            if uuid and not ring.is_front_end:
                self._by_uuid.setdefault(uuid, []).append(number)
                self._device_of[number] = uuid

    def sample(self, placed: MappedSample) -> None:
        """Add a sample of any device of any host."""
        record, window = placed.record, placed.window
        if record.source == HOST_SOURCE:
            pids = {ring.opened.pid for ring in self._rings.values()}
            self.host_use |= self._host.take(record, pids)
            return
        uuid = plain_uuid(record.device_uuid)
        if uuid not in self._by_uuid:
            return
        self.num_unplaced += placed.num_unplaced
        if placed.error_ns is not None:
            self.stamp_error_ns = placed.error_ns
        values = record.values
        gauges = self.gauges.setdefault(uuid, {})
        for word, value in values.items():
            gauges[word] = (record.t_ns, value)
        if window is None:
            return
        self._newest_sample_ns = max(self._newest_sample_ns, record.t_ns)
        if not self.is_on:
            self.is_on, self._since_ns = True, self._newest_sample_ns
            self.reach_ns = 0
        device = self._device(uuid)
        if "foreign_busy_share" in values:
            device.foreign_share = values["foreign_busy_share"]
            self.foreign_ns.setdefault(uuid, 0)
        device.take(window)

    def reach(self, at_ns: int) -> None:
        """Begin a bucket: record what requests have computed so far.

        Args:
            at_ns: a time in the bucket, `reach_ns` or later.
        """
        number = at_ns // BUCKET_NS
        self.reach_ns = (number + 1) * BUCKET_NS
        self._accounts.reach(number)
        for device in self._devices.values():
            for steps in device.steps.values():
                steps.begin(number)

    def step(
        self,
        run: Execution,
        split: SplitStep,
        prefill_ns: list[int],
        moved: Moved,
    ) -> None:
        """Add a step.

        Args:
            run: its execution.
            split: its time, divided.
            prefill_ns: its prefill time, by rank.
            moved: bytes and FLOPs of the step.
        """
        if len(run.ranks) == 1:
            (span,), (of_prefill_ns,) = run.ranks, prefill_ns
            rest_ns = of_prefill_ns + split.padding_ns[0] + split.unattributed_ns[0]
            steps = self._steps_of.get(span.ring) or self._steps(span.ring)
            of_decode_ns = span.measured_ns - rest_ns
            steps.add((span.start_ns, span.end_ns, of_prefill_ns, of_decode_ns, *moved))
            return
        of_rank = [each / len(run.ranks) for each in moved]
        for at, span in enumerate(run.ranks):
            rest_ns = prefill_ns[at] + split.padding_ns[at] + split.unattributed_ns[at]
            steps = self._steps_of.get(span.ring) or self._steps(span.ring)
            of_decode_ns = span.measured_ns - rest_ns
            steps.add((span.start_ns, span.end_ns, prefill_ns[at], of_decode_ns, *of_rank))

    def _steps(self, ring: int) -> StepBuffer:
        device = self._device(self._device_of.get(ring) or f"#{ring}")
        steps = device.steps.get(ring)
        if steps is None:
            steps = device.steps[ring] = StepBuffer()
            steps.begin(self._accounts.last)
        self._steps_of[ring] = steps
        return steps

    def _device(self, name: str) -> DeviceJoin:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = DeviceJoin(self.found)
        return device

    # --- output -------------------------------------------------------------------------------

    def tick(self, through_ns: int, now_ns: int, *, is_awaited: bool) -> None:
        """Settle the buckets that no step or sample can change, if a settlement is due.

        Args:
            through_ns: time through which all steps are known.
            now_ns: time of the fold.
            is_awaited: whether a request has waited as long as it may.
        """
        self.now_ns, self._through_ns = now_ns, through_ns
        if not self.is_on:
            return
        is_silent = now_ns - self._newest_sample_ns > SILENT_NS + LONGEST_WAIT_NS
        # Due times follow the clock, not the fold's start: folds that begin later emit alike.
        is_due = now_ns // _SETTLED_EVERY_NS != self._settled_at_ns // _SETTLED_EVERY_NS
        if not (is_silent or is_awaited or is_due):
            return
        self.book_steps()
        if not is_silent:
            self.settle()
            return
        self.is_on, self.reach_ns = False, _NEVER_NS
        self._accounts.stop()
        self._devices.clear()
        self._steps_of.clear()

    def settle(self) -> None:
        """Settle the buckets that were final at the last Tick."""
        through_ns = self._through_ns
        self._settled_at_ns = self.now_ns
        for name, device in self._devices.items():
            device.settle(through_ns, since_ns=self._since_ns, settled_ns=self._settled_through_ns)
            self.idle_uj[name] = self.idle_uj.get(name, 0.0) + device.idle_uj
            device.idle_uj = 0.0
            if device.foreign_ns:
                self._recent_foreign.append((self.now_ns, device.foreign_ns))
                self.foreign_ns[name] = self.foreign_ns.get(name, 0) + device.foreign_ns
                device.foreign_ns = 0
        self._close_buckets(through_ns)

    def request_counters(self, left: Sequence[EndedRequest]) -> list[RequestCounters]:
        """Return the counter values of ended requests."""
        found = self.found
        errors = {SM_ACTIVE: found.sm.error(), ENERGY: found.energy.error()}
        report = CounterReporter(found.sources, errors).report
        given = self._accounts.take(left)
        return [report(of, each.totals) for of, each in zip(given, left, strict=True)]

    def reason(self) -> str:
        """Return the reason why there are no counter values, empty if there are some."""
        if not self._by_uuid:
            infos = [ring.info for ring in self._rings.values() if ring.info is not None]
            is_cpu = any(info.device.lower().startswith("cpu") for info in infos)
            return NO_COUNTERS if is_cpu else NO_DEVICE
        if not self.is_on:
            return SAMPLES_ENDED if self.totals.any() else NO_SAMPLER
        if any(device.foreign_share > FOREIGN_SHARE for device in self._devices.values()):
            return SHARED
        return "" if self.totals.any() else UNSETTLED

    def info_of(self, uuid: str) -> EngineInfo | None:
        """Return the EngineInfo of a rank on a device, None if no rank is on it."""
        infos = [self._rings[number].info for number in self._by_uuid.get(uuid, ())]
        return next((info for info in infos if info is not None), None)

    def gauges_of(self, uuid: str, now_ns: int) -> dict[str, float]:
        """Return a device's newest sampled values, without stale ones."""
        since_ns = now_ns - SILENT_NS - LONGEST_WAIT_NS
        gauges = self.gauges.get(uuid, {})
        return {word: value for word, (at_ns, value) in gauges.items() if at_ns >= since_ns}

    def host_use_now(self, now_ns: int) -> dict[str, float]:
        """Return the host use of its processes, empty if the samples are stale."""
        return self.host_use.copy() if self._host.is_reported(now_ns) else {}

    def live_sources(self, now_ns: int) -> set[str]:
        """Return the sources that report now."""
        return {
            source
            for device in self._devices.values()
            for source, through_ns in device.through_ns.items()
            if now_ns - through_ns < SILENT_NS + LONGEST_WAIT_NS
        }

    def recent_foreign_ns(self, since_ns: int) -> int | None:
        """Return the foreign use of the devices since a time, None without a sampler."""
        if not self.foreign_ns:
            return None
        return sum(foreign_ns for at_ns, foreign_ns in self._recent_foreign if at_ns >= since_ns)

    # --- buckets ------------------------------------------------------------------------------

    def _close_buckets(self, through_ns: int) -> None:
        settled = []
        buckets = self._accounts.open()
        for number in buckets:
            end_ns = (number + 1) * BUCKET_NS
            if end_ns > through_ns or not (self._has_all(end_ns) or self._is_over(end_ns)):
                break
            whole: SettledBucket | None = None
            for name, device in self._devices.items():
                part = device.bucket_values(number)
                self._sums[name] = list(map(add, self._sums.get(name, _NO_SUMS), _flat(part)))
                whole = part if whole is None else _both(whole, part)
            assert whole is not None  # buckets begin with the first device
            self.recent.append((end_ns, array("d", _flat(whole))))
            self._settled_through_ns = end_ns
            settled.append(whole)
        self._accounts.settle(settled)
        if len(settled) == len(buckets):
            self._settled_through_ns = max(self._settled_through_ns, through_ns - BUCKET_NS)
        for device in self._devices.values():
            if device.forget(self._settled_through_ns - _REACH_NS):
                self._steps_of.clear()

    def _has_all(self, end_ns: int) -> bool:
        """Return whether every present source has samples up to a time."""
        return all(device.has_all(end_ns, self.now_ns) for device in self._devices.values())

    def _is_over(self, end_ns: int) -> bool:
        return self.now_ns >= end_ns + LONGEST_WAIT_NS - BUCKET_NS


def _flat(settled: SettledBucket) -> list[float]:
    """Return the concatenated fields of a settled bucket."""
    return [*settled.values, *settled.known, *settled.totals, *settled.blurred]


def _both(one: SettledBucket, other: SettledBucket) -> SettledBucket:
    return SettledBucket(*(list(map(add, *fields)) for fields in zip(one, other, strict=True)))
