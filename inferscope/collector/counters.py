"""One engine's counters: samples of its devices in, what each phase and request took out.

    steps ──► CountedDevice, each ◄── samples, in turn ◄── the samplers' rings
                     │  settle, when a request has waited for it, and else now and then
                     ▼
                  tenths ─► Accounts ─► requests

Everything happens at Ticks, so that a replay does the same; not at each of them, because settling
a second costs little more than settling a tenth.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from operator import add

import numpy as np
from numpy.typing import NDArray

from inferscope.collector.accounts import (
    ENERGY,
    NUM_COUNTED,
    SM_ACTIVE,
    TENTH_NS,
    Accounts,
    Left,
    Settled,
)
from inferscope.collector.counted import RequestCounters, Teller
from inferscope.collector.counted_device import FOREIGN_SHARE, SILENT_NS, CountedDevice, Found
from inferscope.collector.counted_steps import CountedSteps, Moved
from inferscope.collector.host_use import TELLS_CPU, HostUse
from inferscope.collector.rings import RingState
from inferscope.collector.stamps import Placed
from inferscope.collector.steps import Execution, SplitStep
from inferscope.records import EngineInfo, plain_uuid

LONGEST_WAIT_NS = 500_000_000
"""That a finished request waits for counters, and from there to the next Tick."""
_REACH_NS = 2_500_000_000
"""How far back a window may begin: sources that tell once a second included."""
_SETTLED_EVERY_NS = 1_200_000_000
"""At least: most of what settling costs does not depend on how much there is to be settled. Two or
three times as long as it takes from there until the next request has waited for it."""
_KEPT_TENTHS = 3000
_NO_SUMS = [0.0] * (len(Settled._fields) * 2 * NUM_COUNTED)
_NEVER_NS = 1 << 62

NO_SAMPLER = "no samples of this device: start inferscope sampler"
NO_DEVICE = "the engine does not say which device it runs on"
NO_COUNTERS = "runs on the CPU, which has no SMs"
SHARED = "other processes use the device, too"
UNSETTLED = "too few windows in which the phases differ"


class Counters:
    """The join of one engine's steps with samples of its devices.

    Attributes:
        is_on: samples of its devices come.
        reach_ns: where the next tenth begins; never while none come.
        book_steps: books the steps that are known, before anything is settled.
        found: what else all samples have come to.
        num_unplaced: windows stamped by the wall clock when nobody can tell what it showed.
        stamp_error_ns: how far off the newest windows stamped by it can be, None without such.
        gauges: by device's uuid and by word, when it was told last, and what: each source has words
            of its own, and may end alone.
        host_use: by word, what its processes take of the host.
        idle_uj: by device, energy that no step took.
        recent: the last minutes' tenths: when each ended, and what `Settled` has, one after the
            other.
        foreign_ns: by device, how long others used it while this engine did not.
    """

    def __init__(self, accounts: Accounts, rings: dict[int, RingState]) -> None:
        self._accounts = accounts
        self._rings = rings
        self._devices: dict[str, CountedDevice] = {}
        """By uuid; where a rank does not tell whose it is, by its ring."""
        self._by_uuid: dict[str, list[int]] = {}
        self._device_of: dict[int, str] = {}
        """By ring, as far as they tell."""
        self._steps_of: dict[int, CountedSteps] = {}
        """By ring: its steps on its device."""
        self._heard_ns = 0
        self._since_ns = 0
        """From when on steps are noted: what was counted before cannot be joined."""
        self.is_on = False
        self.reach_ns = _NEVER_NS
        self.book_steps: Callable[[], None] = lambda: None
        self.now_ns = 0
        self._sums: dict[str, list[float]] = {}
        """By device, of all tenths, what `Settled` has, one after the other."""
        self.found = Found()
        self.num_unplaced = 0
        self.stamp_error_ns: int | None = None
        self.gauges: dict[str, dict[str, tuple[int, float]]] = {}
        self.host_use: dict[str, float] = {}
        self.idle_uj: dict[str, float] = {}
        self._host = HostUse()
        self._through_ns = self._settled_at_ns = self._settled_through_ns = 0
        self.foreign_ns: dict[str, int] = {}
        self.recent: deque[tuple[int, array[float]]] = deque(maxlen=_KEPT_TENTHS)
        self._recent_foreign: deque[tuple[int, int]] = deque(maxlen=_KEPT_TENTHS)

    @property
    def totals(self) -> NDArray[np.float64]:
        """Return what was counted since the fold began: [phases, counted], whole numbers."""
        return self._sum_of("values")

    @property
    def of_totals(self) -> NDArray[np.float64]:
        """Return of what time or bytes these are: [phases, counted]."""
        return self._sum_of("known")

    @property
    def blurred(self) -> NDArray[np.float64]:
        """Return of the totals what was divided over phases: [phases, counted]."""
        return self._sum_of("blurred")

    def of_device(self, uuid: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what was counted of one device, and of what: [phases, counted] each."""
        return self._sum_of("values", uuid), self._sum_of("known", uuid)

    def _sum_of(self, field: str, device: str | None = None) -> NDArray[np.float64]:
        """Return a part of the sums, of all devices unless one is named."""
        told = self._sums.values() if device is None else [self._sums.get(device, _NO_SUMS)]
        sums = np.sum([*told, _NO_SUMS], axis=0)
        parts = sums.reshape(len(Settled._fields), 2, NUM_COUNTED)
        part: NDArray[np.float64] = parts[Settled._fields.index(field)]
        return part

    # --- what comes in ------------------------------------------------------------------------

    def describe(self) -> None:
        """Read again which ring's device is which: an engine has said who it is."""
        self._by_uuid, self._device_of = {}, {}
        self._steps_of.clear()
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
            self.host_use |= self._host.take(record, pids)
            return
        uuid = plain_uuid(record.device_uuid)
        if uuid not in self._by_uuid:
            return
        self.num_unplaced += placed.num_unplaced
        if placed.error_ns is not None:
            self.stamp_error_ns = placed.error_ns
        values = record.values
        told = self.gauges.setdefault(uuid, {})
        for word, value in values.items():
            told[word] = (record.t_ns, value)
        if window is None:
            return
        self._heard_ns = max(self._heard_ns, record.t_ns)
        if not self.is_on:
            self.is_on, self._since_ns = True, self._heard_ns
            self.reach_ns = 0
        device = self._device(uuid)
        if "foreign_busy_share" in values:
            device.foreign_share = values["foreign_busy_share"]
            self.foreign_ns.setdefault(uuid, 0)
        device.take(window)

    def reach(self, at_ns: int) -> None:
        """Begin a tenth: note what requests have computed so far.

        Args:
            at_ns: in it, `reach_ns` or later.
        """
        number = at_ns // TENTH_NS
        self.reach_ns = (number + 1) * TENTH_NS
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
        """Take a step.

        Args:
            run: its execution.
            split: its time, divided.
            prefill_ns: of it, by rank.
            moved: what it moved and computed.
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

    def _steps(self, ring: int) -> CountedSteps:
        device = self._device(self._device_of.get(ring) or f"#{ring}")
        steps = device.steps.get(ring)
        if steps is None:
            steps = device.steps[ring] = CountedSteps()
            steps.begin(self._accounts.last)
        self._steps_of[ring] = steps
        return steps

    def _device(self, name: str) -> CountedDevice:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = CountedDevice(self.found)
        return device

    # --- what comes out -----------------------------------------------------------------------

    def tick(self, through_ns: int, now_ns: int, *, is_awaited: bool) -> None:
        """Settle what no step and no sample can change any more, if it is time to.

        Args:
            through_ns: up to where all steps are known.
            now_ns: the fold's time.
            is_awaited: a request has waited for it as long as one may.
        """
        self.now_ns, self._through_ns = now_ns, through_ns
        if not self.is_on:
            return
        is_silent = now_ns - self._heard_ns > SILENT_NS + LONGEST_WAIT_NS
        # By the clock, not by when this fold began: who begins later hands over alike.
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
        """Settle what can be since the last Tick."""
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
        self._close_tenths(through_ns)

    def of(self, left: Sequence[Left]) -> list[RequestCounters]:
        """Return what is known of requests that have ended."""
        found = self.found
        errors = {SM_ACTIVE: found.sm.error(), ENERGY: found.energy.error()}
        tell = Teller(found.sources, errors).tell
        given = self._accounts.take(left)
        return [tell(of, each.totals) for of, each in zip(given, left, strict=True)]

    def reason(self) -> str:
        """Return why nothing is counted; empty where something is."""
        if not self._by_uuid:
            infos = [ring.info for ring in self._rings.values() if ring.info is not None]
            is_cpu = any(info.device.lower().startswith("cpu") for info in infos)
            return NO_COUNTERS if is_cpu else NO_DEVICE
        if not self.is_on:
            return NO_SAMPLER
        if any(device.foreign_share > FOREIGN_SHARE for device in self._devices.values()):
            return SHARED
        return "" if self.totals.any() else UNSETTLED

    def info_of(self, uuid: str) -> EngineInfo | None:
        """Return what a rank on a device says of itself, None where no rank is on it any more."""
        infos = [self._rings[number].info for number in self._by_uuid.get(uuid, ())]
        return next((info for info in infos if info is not None), None)

    def gauges_of(self, uuid: str, now_ns: int) -> dict[str, float]:
        """Return what was told last of a device, without what is old."""
        since_ns = now_ns - SILENT_NS - LONGEST_WAIT_NS
        told = self.gauges.get(uuid, {})
        return {word: value for word, (told_ns, value) in told.items() if told_ns >= since_ns}

    def host_use_now(self, now_ns: int) -> dict[str, float]:
        """Return what its processes take of the host, nothing where nobody tells any more."""
        return self.host_use.copy() if self._host.is_told(now_ns) else {}

    def heard(self, now_ns: int) -> set[str]:
        """Return the sources that are there now."""
        return {
            source
            for device in self._devices.values()
            for source, through_ns in device.through_ns.items()
            if now_ns - through_ns < SILENT_NS + LONGEST_WAIT_NS
        }

    def recent_foreign_ns(self, since_ns: int) -> int | None:
        """Return how long others used the devices lately, None where nobody tells."""
        if not self.foreign_ns:
            return None
        return sum(foreign_ns for at_ns, foreign_ns in self._recent_foreign if at_ns >= since_ns)

    # --- tenths -------------------------------------------------------------------------------

    def _close_tenths(self, through_ns: int) -> None:
        settled = []
        tenths = self._accounts.open()
        for number in tenths:
            end_ns = (number + 1) * TENTH_NS
            if end_ns > through_ns or not (self._has_all(end_ns) or self._is_over(end_ns)):
                break
            whole: Settled | None = None
            for name, device in self._devices.items():
                part = device.of_tenth(number)
                self._sums[name] = list(map(add, self._sums.get(name, _NO_SUMS), _flat(part)))
                whole = part if whole is None else _both(whole, part)
            assert whole is not None  # tenths begin with the first device
            self.recent.append((end_ns, array("d", _flat(whole))))
            self._settled_through_ns = end_ns
            settled.append(whole)
        self._accounts.settle(settled)
        if len(settled) == len(tenths):
            self._settled_through_ns = max(self._settled_through_ns, through_ns - TENTH_NS)
        for device in self._devices.values():
            if device.forget(self._settled_through_ns - _REACH_NS):
                self._steps_of.clear()

    def _has_all(self, end_ns: int) -> bool:
        """Tell whether every source that is there has told up to a time."""
        return all(device.has_all(end_ns, self.now_ns) for device in self._devices.values())

    def _is_over(self, end_ns: int) -> bool:
        return self.now_ns >= end_ns + LONGEST_WAIT_NS - TENTH_NS


def _flat(settled: Settled) -> list[float]:
    """Return its fields, one after the other."""
    return [*settled.values, *settled.known, *settled.totals, *settled.blurred]


def _both(one: Settled, other: Settled) -> Settled:
    return Settled(*(list(map(add, *fields)) for fields in zip(one, other, strict=True)))
