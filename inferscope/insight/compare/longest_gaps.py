"""Causes of each request's longest gap between tokens, from the delays of the steps in it.

A percentile such as `tbt_p99` is about few gaps, and the ledger of TBT is a mean over all of them:
a prompt in smaller chunks moves the first and not the second. The longest gap of each request is a
quantity of a request, like the rows of its ledger, and lies in the tail.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.fold import FinalRequest, FinalStep

Floats = NDArray[np.float64]

GAP_CAUSES = ("decode", "decode_interference", "slowdown", "outside_steps")
"""Rows of a longest gap. Of the steps that end in it: their decodes (`decode_own` and
`decode_co_batched` of the ledger), the prefills of other requests in them, and the excess over the
cost model. Then everything else: host gaps, output, preemption and what is computed again after it.
"""
_NUM = len(GAP_CAUSES)
_Replica = tuple[str, int]


class _Steps(NamedTuple):
    """Steps of one replica, in the order of recording."""

    end_ns: array[int]
    parts_ns: array[int]
    """[steps × 3], the first three of GAP_CAUSES."""


class _Gap(NamedTuple):
    request: int
    replica: _Replica
    since_ns: int
    until_ns: int
    decodes_until_ns: int
    """Time of the first preemption in it, else its end: after that the request waits for blocks,
    and computes its tokens again."""


class LongestGaps:
    """Longest gap of each request, and the steps of a recording: 32 bytes for each step."""

    def __init__(self) -> None:
        self._steps: dict[_Replica, _Steps] = {}
        self._last: dict[_Replica, int] = {}
        """Number of each replica's last step: several ranks report the same one."""
        self._members: dict[_Replica, tuple[str, ...]] = {}
        """Requests of each replica's last step."""
        self._replica_of: dict[tuple[str, str], _Replica] = {}
        self._gaps: list[_Gap] = []

    def on_step(self, step: FinalStep) -> None:
        """Keep the parts of a step's delay for the requests that decode in it."""
        replica = step.engine_id, step.dp_rank
        delay = step.delay
        if delay is None or self._last.get(replica) == step.step:
            return
        self._last[replica] = step.step
        steps = self._steps.setdefault(replica, _Steps(array("q"), array("q")))
        steps.end_ns.append(step.end_ns)
        has_decodes = len(delay.prefills) < len(delay.own_ns)
        decode_ns = delay.decode_class_ns if has_decodes else 0
        steps.parts_ns.extend((decode_ns, delay.explained_ns - decode_ns, delay.excess_ns))
        if step.request_ids is not self._members.get(replica):  # equal ones share a tuple
            self._members[replica] = step.request_ids
            for request_id in step.request_ids:
                self._replica_of[step.engine_id, request_id] = replica

    def add(self, number: int, request: FinalRequest) -> None:
        """Find the longest gap of a request; `number` is its row."""
        replica = self._replica_of.get((request.engine_id, request.request_id))
        times_ns = request.token_times_ns
        if replica is None or len(times_ns) < 2:
            return
        at = int(np.diff(np.frombuffer(times_ns, dtype=np.int64)).argmax())
        since_ns, until_ns = times_ns[at], times_ns[at + 1]
        preempted_ns = [
            max(at_ns, since_ns)  # its last token may be written after the preemption
            for at_ns, resumed_ns in request.preempted_ns
            if at_ns < until_ns and resumed_ns > since_ns
        ]
        decodes_until_ns = min(preempted_ns, default=until_ns)
        self._gaps.append(_Gap(number, replica, since_ns, until_ns, decodes_until_ns))

    def forget(self, request: FinalRequest) -> None:
        """Release what is kept of a request that has ended."""
        self._replica_of.pop((request.engine_id, request.request_id), None)

    def rows_ns(self, num: int) -> Floats:
        """Return the causes of each request's longest gap; zeros where it is unknown.

        Returns:
            [requests, GAP_CAUSES], in nanoseconds; each row sums to its gap.
        """
        rows = np.zeros((num, _NUM))
        by_replica: dict[_Replica, list[_Gap]] = {}
        for gap in self._gaps:
            by_replica.setdefault(gap.replica, []).append(gap)
        for replica, gaps in by_replica.items():
            steps = self._steps[replica]
            end_ns = np.array(steps.end_ns, dtype=np.int64)
            order = end_ns.argsort(kind="stable")
            end_ns = end_ns[order]
            parts_ns = np.array(steps.parts_ns, dtype=np.float64).reshape(-1, _NUM - 1)[order]
            sums_ns = np.concatenate([np.zeros((1, _NUM - 1)), parts_ns.cumsum(axis=0)])
            bounds_ns = [[gap.since_ns for gap in gaps], [gap.decodes_until_ns for gap in gaps]]
            first, last = end_ns.searchsorted(bounds_ns, side="right")
            spent_ns = sums_ns[last] - sums_ns[first]
            whole_ns = np.array([gap.until_ns - gap.since_ns for gap in gaps], dtype=np.float64)
            # Steps overlap in an engine that plans ahead: they explain no more than the gap.
            total_ns = spent_ns.sum(axis=1)
            spent_ns *= np.minimum(whole_ns / np.maximum(total_ns, 1.0), 1.0)[:, None]
            rest_ns = np.maximum(whole_ns - spent_ns.sum(axis=1), 0.0)
            at_rows = [gap.request for gap in gaps]
            rows[at_rows] = np.column_stack([spent_ns, rest_ns])
        return rows
