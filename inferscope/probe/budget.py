"""What the probe may cost its host: a share of wall time, judged over windows of 5 s.

Over it for two windows in a row, the probe leaves out `StepPlan` and the forensics of the prefix
cache: queue lengths and block counts go stale, prompts have no classes, every law still holds, for
shares and ledgers are made of slices, spans, emissions and request events alone. Of those nothing
can be left out without a sum that no longer closes: so after two more windows over the budget the
probe stops. Two, because one may be a debugger's.
"""

from __future__ import annotations

import os
from typing import Literal

from inferscope.probe.host_log import warn

WINDOW_NS = 5_000_000_000
BUDGET_SHARE = 0.10
"""A server's steps take 10 ms and more: 50 to 100 µs are 1 % of them. The built-in model alone at
batch 1 does a step a millisecond, where they are 5 %; that does not justify a stop."""
_WINDOWS_OVER = 2

Verdict = Literal["keep", "shed", "restore", "stop"]


class Budget:
    """Budget of the probe's own cost.

    Attributes:
        share: maximum share of wall time.
        is_shedding: whether detail is being omitted.
        last_share: share of wall time in the last whole window.
    """

    def __init__(self, share: float, now_ns: int) -> None:
        self.share = share
        self.is_shedding = False
        self.last_share = 0.0
        self._since_ns = now_ns
        self._cost_since_ns = 0
        self._num_over = 0

    def judge(self, now_ns: int, cost_ns: int) -> Verdict:
        """Return a verdict, once per window, from the cost since the start in nanoseconds."""
        wall_ns = now_ns - self._since_ns
        if wall_ns < WINDOW_NS:
            return "keep"
        self.last_share = (cost_ns - self._cost_since_ns) / wall_ns
        self._since_ns, self._cost_since_ns = now_ns, cost_ns
        if self.last_share <= self.share:
            self._num_over = 0
            return self._restored() if self.last_share <= self.share / 2 else "keep"
        self._num_over += 1
        if self._num_over < _WINDOWS_OVER:
            return "keep"
        self._num_over = 0
        if self.is_shedding:
            return "stop"
        self.is_shedding = True
        return "shed"

    def restart(self, now_ns: int, cost_ns: int) -> None:
        """Begin a new window, in full detail: the probe was switched on again."""
        self._since_ns, self._cost_since_ns = now_ns, cost_ns
        self._num_over = 0
        self.is_shedding = False

    def _restored(self) -> Verdict:
        was_shedding, self.is_shedding = self.is_shedding, False
        return "restore" if was_shedding else "keep"


def budget_share() -> float:
    """Return the share of wall time that INFERSCOPE_BUDGET allows, `BUDGET_SHARE` unless set."""
    given = os.environ.get("INFERSCOPE_BUDGET", "")
    try:
        share = float(given) if given else BUDGET_SHARE
        if not share > 0:  # nan too: no comparison with it is true
            raise ValueError
    except ValueError:
        warn("INFERSCOPE_BUDGET=%s is not a share of time; taking %g", given, BUDGET_SHARE)
        share = BUDGET_SHARE
    return share
