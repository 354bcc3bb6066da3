"""One engine's counters: samples of its devices in, what each phase and request took out.

    steps ──► CountedDevice, each ◄── samples, in turn ◄── the samplers' rings
                     │  settle, at Ticks
                     ▼
                  tenths ─► Accounts ─► requests, at most 500 ms after their end

Everything happens at Ticks, so that a replay does the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add

import numpy as np

from inferscope.collector.accounts import (
    ENERGY,
    NUM_COUNTED,
    SM_ACTIVE,
    TENTH_NS,
    Accounts,
    Left,
    Settled,
)
from inferscope.collector.counted import RequestCounters, told
from inferscope.collector.counted_device import FOREIGN_SHARE, SILENT_NS, CountedDevice, Found
from inferscope.collector.counted_steps import Moved
from inferscope.collector.host_use import TELLS_CPU, HostUse
from inferscope.collector.rings import RingState
from inferscope.collector.stamps import Placed
from inferscope.collector.steps import Execution, SplitStep
from inferscope.records import plain_uuid

LONGEST_WAIT_NS = 500_000_000
"""That a finished request waits for counters."""
_REACH_NS = 2_500_000_000
"""How far back a window may begin: sources that tell once a second included."""
_KEPT_TENTHS = 3000

NO_SAMPLER = "no samples of this device: start inferscope sampler"
NO_DEVICE = "the engine does not say which device it runs on"
NO_COUNTERS = "runs on the CPU, which has no SMs"
SHARED = "other processes use the device, too"
UNSETTLED = "too few windows in which the phases differ"


class Counters:
    """The join of one engine's steps with samples of its devices.

    Attributes:
        totals: [phases, counted], since the fold began; whole numbers as floats.
        of_totals: [phases, counted], of what time or bytes these are.
        blurred: [phases, counted], of the totals what was divided over phases.
        found: what else all samples have come to.
        num_unplaced: windows stamped by the wall clock when nobody can tell what it showed.
        stamp_error_ns: how far off the newest windows stamped by it can be, None without such.
        gauges: by word, what was told last of any device.
        recent: the last minutes' tenths, and when each ended.
        foreign_ns: by ring, how long others used its device while this engine did not.
    """

    def __init__(self, accounts: Accounts, rings: dict[int, RingState]) -> None:
        self._accounts = accounts
        self._rings = rings
        self._devices: dict[str, CountedDevice] = {}
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
        self.found = Found()
        self.num_unplaced = 0
        self.stamp_error_ns: int | None = None
        self.gauges: dict[str, float] = {}
        self._host = HostUse()
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
        tenth, num_ranks = self._accounts.last, len(run.ranks)
        of_rank: Sequence[float] = moved
        if num_ranks > 1:
            of_rank = [each / num_ranks for each in moved]
        for at, span in enumerate(run.ranks):
            ring, of_prefill_ns = span.ring, prefill_ns[at]
            rest_ns = split.padding_ns[at] + split.unattributed_ns[at]
            of_decode_ns = span.measured_ns - of_prefill_ns - rest_ns
            device = self._device(self._device_of.get(ring) or f"#{ring}")
            device.steps.add(
                ring,
                tenth,
                span_ns=(span.start_ns, span.end_ns),
                expected=(of_prefill_ns, of_decode_ns, *of_rank),
            )

    def _device(self, name: str) -> CountedDevice:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = CountedDevice(self.found)
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
        if now_ns - self._heard_ns > SILENT_NS + LONGEST_WAIT_NS:
            self.is_on = False
            self._accounts.stop()
            self._devices.clear()
            return
        for name, device in self._devices.items():
            device.settle(through_ns, since_ns=self._since_ns, settled_ns=self._settled_through_ns)
            if device.foreign_ns:
                self._recent_foreign.append((now_ns, device.foreign_ns))
                for number in self._by_uuid.get(name, ()):
                    self.foreign_ns[number] = self.foreign_ns.get(number, 0) + device.foreign_ns
                device.foreign_ns = 0
        self._close_tenths(through_ns)

    def of(self, left: Left) -> RequestCounters:
        """Return what is known of a request that has ended."""
        found = self.found
        errors = {SM_ACTIVE: found.sm.error(), ENERGY: found.energy.error()}
        return told(left, found.sources, errors)

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
            if now_ns - through_ns < SILENT_NS + LONGEST_WAIT_NS
        }

    def recent_foreign_ns(self, since_ns: int) -> int | None:
        """Return how long others used the devices lately, None where nobody tells."""
        if not self.foreign_ns:
            return None
        return sum(foreign_ns for at_ns, foreign_ns in self._recent_foreign if at_ns >= since_ns)

    # --- tenths -------------------------------------------------------------------------------

    def _close_tenths(self, through_ns: int) -> None:
        accounts = self._accounts
        while (number := accounts.oldest()) is not None:
            end_ns = (number + 1) * TENTH_NS
            if end_ns > through_ns or not (self._has_all(end_ns) or self._is_over(end_ns)):
                break
            parts = [device.steps.of_tenth(number) for device in self._devices.values()]
            whole = parts[0]
            for part in parts[1:]:
                whole = Settled(*map(add, whole, part))
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
        return all(device.has_all(end_ns, self.now_ns) for device in self._devices.values())

    def _is_over(self, end_ns: int) -> bool:
        return self.now_ns >= end_ns + LONGEST_WAIT_NS - TENTH_NS
