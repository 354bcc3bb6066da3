"""Where a device's wall time goes: busy for a phase, busy for nobody, idle.

A device does one thing at a time. Where spans overlap (the host's clock, steps launched ahead) the
later one counts from where the earlier one ended, so that all parts sum to the wall exactly.
"""

from __future__ import annotations

import numpy as np

from inferscope.attribution.split import to_whole_ns

BUSY = ("prefill", "decode", "padding", "unattributed")


class RankTime:
    """The busy time of one rank's device.

    Attributes:
        until_ns: explained up to here.
        busy_ns: by BUSY.
    """

    def __init__(self, first_ns: int) -> None:
        """Start where the fold's time starts."""
        self.until_ns = first_ns
        self.busy_ns = [0, 0, 0, 0]

    def book(self, start_ns: int, end_ns: int, parts_ns: list[int]) -> None:
        """Add a step.

        Args:
            start_ns: on the host's clock.
            end_ns: likewise.
            parts_ns: of its time, by BUSY; they sum to it.
        """
        left_ns = end_ns - max(start_ns, self.until_ns)
        if left_ns <= 0:
            return
        if left_ns != end_ns - start_ns:
            parts_ns = to_whole_ns(np.array(parts_ns, dtype=np.float64), left_ns).tolist()
        busy_ns = self.busy_ns
        for at, part_ns in enumerate(parts_ns):
            if part_ns:
                busy_ns[at] += part_ns
        self.until_ns = end_ns

    def seconds_by_ns(self, wall_ns: int, *, no_work_ns: int) -> dict[str, int]:
        """Return where the wall time went; what is neither busy nor workless waited for the host.

        Args:
            wall_ns: up to `until_ns` at least.
            no_work_ns: idle time in which no request was there.
        """
        idle_ns = wall_ns - sum(self.busy_ns)
        no_work_ns = min(no_work_ns, idle_ns)
        spent = dict(zip(BUSY, self.busy_ns, strict=True))
        return spent | {"idle_no_work": no_work_ns, "idle_host_gap": idle_ns - no_work_ns}
