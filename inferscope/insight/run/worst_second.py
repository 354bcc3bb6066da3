"""The second of a run in which its tokens came slowest, and the steps of that second.

A client that looks at a random moment of a second finds itself in a long gap between tokens more
often than in a short one. The mean length of the gap that it finds,

    sum of gap² / sum of gap     over the gaps that end in the second

ranks the seconds: a stall of all requests counts more than one request's. The steps are collected
by a second pass over the records, when the second is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferscope.fold import SECOND_NS, FinalRequest, FinalStep

_MOST_STEPS = 4_000


@dataclass(frozen=True)
class WorstSecond:
    """One second of the monotonic clock."""

    start_ns: int
    """Its start."""
    num_gaps: int
    """Gaps between tokens that ended in it."""
    mean_wait_ns: int
    """Length of the gap that a random moment finds a request in."""
    longest_gap_ns: int
    """Longest of the gaps."""

    @property
    def end_ns(self) -> int:
        """Return its end."""
        return self.start_ns + SECOND_NS


class TokenWaits:
    """Gaps between tokens by the second in which they ended."""

    def __init__(self) -> None:
        self._sums: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0])
        """Number, sum, sum of squares and maximum of the gaps, by second."""

    def add(self, request: FinalRequest) -> None:
        """Add a request; one that was not observed from its beginning is left out."""
        if request.joined_late or request.is_in_one_piece:
            return
        times: NDArray[np.int64] = np.frombuffer(request.token_times_ns, dtype=np.int64)
        if len(times) < 2:
            return
        gaps, seconds = times[1:] - times[:-1], times[1:] // SECOND_NS
        starts = np.concatenate([[0], np.diff(seconds).nonzero()[0] + 1])
        squares = gaps.astype(np.float64) ** 2
        for second, num, whole, square, longest in zip(
            seconds[starts].tolist(),
            np.diff([*starts, len(gaps)]).tolist(),
            np.add.reduceat(gaps, starts).tolist(),
            np.add.reduceat(squares, starts).tolist(),
            np.maximum.reduceat(gaps, starts).tolist(),
            strict=True,
        ):
            sums = self._sums[second]
            sums[0] += num
            sums[1] += whole
            sums[2] += square
            sums[3] = max(sums[3], longest)

    def worst(self) -> WorstSecond | None:
        """Return the worst second; None if no request had two tokens."""
        found = max(
            ((sums[2] / sums[1], -second) for second, sums in self._sums.items() if sums[1]),
            default=None,
        )
        if found is None:
            return None
        mean_ns, second = found[0], -found[1]
        num, _, _, longest_ns = self._sums[second]
        return WorstSecond(second * SECOND_NS, int(num), round(mean_ns), int(longest_ns))


class StepsOfSecond:
    """Sink that keeps an engine's steps that overlap one second.

    Attributes:
        steps: final steps in fold order, of all ranks.
        names: clients' names of the finished requests in them, by request ID.
        num_left_out: further steps of the second, which are not kept.
    """

    def __init__(self, engine_id: str, second: WorstSecond) -> None:
        self.steps: list[FinalStep] = []
        self.names: dict[str, str] = {}
        self.num_left_out = 0
        self._request_ids: set[str] = set()
        self._engine_id = engine_id
        self._second = second

    def on_step(self, step: FinalStep) -> None:
        """Keep a step that overlaps the second."""
        if (
            step.engine_id == self._engine_id
            and step.end_ns > self._second.start_ns
            and step.start_ns < self._second.end_ns
        ):
            if len(self.steps) == _MOST_STEPS:
                self.num_left_out += 1
                return
            self.steps.append(step)
            self._request_ids.update(step.request_ids)

    def on_request(self, request: FinalRequest) -> None:
        """Keep the client's name of a request that was computed in the second."""
        if (
            request.engine_id == self._engine_id
            and request.request_id in self._request_ids
            and request.external_id is not None
        ):
            self.names[request.request_id] = request.external_id
