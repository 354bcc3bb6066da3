"""The course of a run over its time: load, device time and latencies in equal bins.

Bins begin as one second each. When there are more than a picture can show, each two become one, so
that a day costs as much memory as four minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from inferscope.fold import SECOND_NS, FinalRequest, FinalStep, add_durations
from inferscope.log_histogram import LogHistogram
from inferscope.records import PREFILL, StepPlan

_MOST_BINS = 240


@dataclass
class CourseBin:
    """Amounts of one bin. Latencies belong to the bin in which they ended.

    Attributes:
        num_finished: requests delivered.
        prefill_ns: device time of prefill, over all ranks; `decode_ns` likewise.
        most_running: largest batch of a plan; `most_waiting`: longest queue.
        kv_share: largest share of the KV blocks in use; None without a plan.
        ttft: times to the first token; `tbt`: gaps between tokens.
    """

    num_finished: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    most_running: int = 0
    most_waiting: int = 0
    kv_share: float | None = None
    ttft: LogHistogram = field(default_factory=LogHistogram)
    tbt: LogHistogram = field(default_factory=LogHistogram)

    def merge(self, other: CourseBin) -> None:
        """Add a bin that follows."""
        self.num_finished += other.num_finished
        self.prefill_ns += other.prefill_ns
        self.decode_ns += other.decode_ns
        self.most_running = max(self.most_running, other.most_running)
        self.most_waiting = max(self.most_waiting, other.most_waiting)
        known = [each for each in (self.kv_share, other.kv_share) if each is not None]
        self.kv_share = max(known, default=None)
        self.ttft.merge(other.ttft)
        self.tbt.merge(other.tbt)


class Course:
    """Bins of one engine's run.

    Attributes:
        bin_ns: length of a bin.
    """

    def __init__(self) -> None:
        self.bin_ns = SECOND_NS
        self._bins: dict[int, CourseBin] = {}

    def add_step(self, step: FinalStep) -> None:
        """Add one rank's step, which may lie in several bins."""
        of = step.unnamed
        if of is not None:
            self._spread(step.start_ns, step.end_ns, of.prefill_ns, of.decode_ns)
        elif len(step.shares_ns):
            prefill_ns = int(step.shares_ns[step.phases == PREFILL].sum())
            decode_ns = int(step.shares_ns.sum()) - prefill_ns
            self._spread(step.start_ns, step.end_ns, prefill_ns, decode_ns)

    def add_plan(self, plan: StepPlan) -> None:
        """Add a decision of the scheduler."""
        into = self._at(plan.end_ns)
        into.most_running = max(into.most_running, plan.running)
        into.most_waiting = max(into.most_waiting, plan.waiting)
        if plan.blocks_total:
            into.kv_share = max(into.kv_share or 0.0, plan.blocks_used / plan.blocks_total)

    def add_request(self, request: FinalRequest) -> None:
        """Add a finished request."""
        self._at(request.delivered_ns).num_finished += 1
        if request.joined_late or request.is_in_one_piece:
            return
        if request.first_token_ns is not None:
            ttft_ns = request.first_token_ns - request.arrived_ns
            self._at(request.first_token_ns).ttft.add(ttft_ns)
        times: NDArray[np.int64] = np.frombuffer(request.token_times_ns, dtype=np.int64)
        if len(times) < 2:
            return
        ends, gaps = times[1:], times[1:] - times[:-1]
        self._at(ends.item(0))  # may widen the bins
        self._at(ends.item(-1))
        places = ends // self.bin_ns
        starts = [0, *(np.diff(places).nonzero()[0] + 1).tolist(), len(places)]
        for start, end in pairwise(starts):
            add_durations(self._at(ends.item(start)).tbt, gaps[start:end])

    def bins(self) -> Iterator[tuple[int, CourseBin]]:
        """Return the start of each bin from the first to the last, and its amounts."""
        if self._bins:
            for at in range(min(self._bins), max(self._bins) + 1):
                yield at * self.bin_ns, self._bins.get(at) or CourseBin()

    def _spread(self, start_ns: int, end_ns: int, prefill_ns: int, decode_ns: int) -> None:
        """Divide a step's time over its bins by how long it lies in each, in whole nanoseconds."""
        last_ns = max(start_ns, end_ns - 1)
        self._at(start_ns)
        self._at(last_ns)  # no bin is widened from here on
        lasted_ns = last_ns + 1 - start_ns
        before = (0, 0)
        for place in range(start_ns // self.bin_ns, last_ns // self.bin_ns + 1):
            past_ns = min(last_ns + 1, (place + 1) * self.bin_ns) - start_ns
            through = (prefill_ns * past_ns // lasted_ns, decode_ns * past_ns // lasted_ns)
            into = self._at(place * self.bin_ns)
            into.prefill_ns += through[0] - before[0]
            into.decode_ns += through[1] - before[1]
            before = through

    def _at(self, at_ns: int) -> CourseBin:
        place = at_ns // self.bin_ns
        found = self._bins.get(place)
        if found is not None:
            return found
        self._bins[place] = CourseBin()
        while max(self._bins) - min(self._bins) >= _MOST_BINS:
            self._halve()
        return self._bins[at_ns // self.bin_ns]

    def _halve(self) -> None:
        former, self._bins = self._bins, {}
        self.bin_ns *= 2
        for place, each in sorted(former.items()):
            self._bins.setdefault(place // 2, CourseBin()).merge(each)
