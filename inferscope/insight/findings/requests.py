"""Statistics of a run's requests: their causes, and first-order counterfactuals.

A counterfactual removes a cause from each request, or from each gap between tokens. Consequences (a
shorter queue, other batches) are not modelled.
"""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import breakdown
from inferscope.fold import FinalRequest, add_durations
from inferscope.insight.findings.tail import Tail
from inferscope.log_histogram import LogHistogram

Ints = NDArray[np.int64]

_ANSWERS = ("stop", "length")
LOST_TO_PREEMPTION = ("preempted", "recompute")
QUEUED = ("queue", "queue_idle")
TTFT_LIMIT_NS, TPOT_LIMIT_NS = 2_000_000_000, 200_000_000
"""Limits of MLPerf Inference for Llama 2 70B in the server scenario, in ns; see `bad_latency`."""
E2E_TAIL = 0.05


class RequestStats:
    """Statistics of one engine's finished requests.

    Attributes:
        num: requests observed from their beginning.
        num_joined_late: the other requests, which are counted nowhere else.
        before_ns: ledgers of streamed responses up to the first token, by cause.
        after_ns: the same from the first to the last token.
        life_ns: ledgers of all responses up to the last token, by cause.
        ttft: distribution over streamed responses; `tbt` likewise, over gaps.
        ttfot: time to the first token after the reasoning, of responses that have both.
        num_tokens_after: their tokens after the first.
        num_preempted: preempted requests.
        num_cold: requests in a cold step before their first token.
        slow_first: ledgers up to the first token, by TTFT.
        slow_later: ledgers from the first to the last token, by the longest gap.
        slow_life: ledgers of all responses up to the last token, by E2E.
        slow_whole: the same for non-streamed responses; `whole` is their E2E, and
            `num_slow_whole` the number beyond the limits of first and later tokens together.
    """

    def __init__(self) -> None:
        self.num = self.num_joined_late = 0
        self.before_ns: Counter[str] = Counter()
        self.after_ns: Counter[str] = Counter()
        self.life_ns: Counter[str] = Counter()
        self.ttft, self.ttft_without_decodes, self.ttft_warm = _histograms(3)
        self.tbt, self.tbt_without_prefills = _histograms(2)
        self.e2e, self.e2e_unqueued, self.e2e_unpreempted, self.whole = _histograms(4)
        self.ttfot = LogHistogram()
        self.num_tokens_after = 0
        self.slow_first, self.slow_later = Tail(), Tail()
        self.slow_life, self.slow_whole = Tail(), Tail()
        self.num_slow_whole = 0
        self.num_preempted = self.num_preemptions = self.num_cold = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.reasoning_tokens = self.output_tokens_of_reasoners = self.num_reasoners = 0

    def add(self, request: FinalRequest, prefills_ns: Ints) -> None:
        """Add a request.

        Args:
            request: a finished request.
            prefills_ns: [gaps between its tokens], wait for others' prefills in each.
        """
        if request.joined_late:
            self.num_joined_late += 1
            return
        self.num += 1
        self.num_preempted += request.num_preemptions > 0
        self.num_preemptions += request.num_preemptions
        self.prompt_tokens += request.prompt_tokens or 0
        self.cached_tokens += request.cached_tokens
        if request.ttfot_ns is not None:
            self.ttfot.add(request.ttfot_ns)
        if request.reasoning_tokens is not None:
            self.num_reasoners += 1
            self.reasoning_tokens += request.reasoning_tokens
            self.output_tokens_of_reasoners += request.output_tokens
        self._add_life(request)
        before, after = breakdown(request, "ttft"), breakdown(request, "tpot")
        if before is not None and request.first_token_ns is not None:
            took, ttft_ns = before.by_cause, before.whole_ns
            self.before_ns.update(took)
            self.ttft.add(ttft_ns)
            self.slow_first.add(ttft_ns, took)
            self.ttft_without_decodes.add(ttft_ns - took.get("prefill_interference", 0))
            self.ttft_warm.add(ttft_ns - took.get("cold_start", 0))
            self.num_cold += "cold_start" in took
        if after is not None:
            self.after_ns.update(after.by_cause)
            self.num_tokens_after += after.num_gaps
            gaps_ns = _gaps_ns(request.token_times_ns)
            self.slow_later.add(request.longest_gap_ns, after.by_cause)
            add_durations(self.tbt, gaps_ns)
            add_durations(self.tbt_without_prefills, gaps_ns - prefills_ns)

    def _add_life(self, request: FinalRequest) -> None:
        life = breakdown(request, "e2e") if request.finish in _ANSWERS else None
        if life is None:
            return
        self.life_ns.update(life.by_cause)
        self.e2e.add(life.whole_ns)
        self.slow_life.add(life.whole_ns, life.by_cause)
        if request.is_in_one_piece:
            self.whole.add(life.whole_ns)
            self.slow_whole.add(life.whole_ns, life.by_cause)
            tokens_ns = TPOT_LIMIT_NS * max(0, request.output_tokens - 1)
            self.num_slow_whole += life.whole_ns > TTFT_LIMIT_NS + tokens_ns
        self.e2e_unqueued.add(life.whole_ns - _of(life.by_cause, QUEUED))
        self.e2e_unpreempted.add(life.whole_ns - _of(life.by_cause, LOST_TO_PREEMPTION))

    def share_of_life(self, *causes: str) -> float:
        """Return the share of all responses' time booked to these causes."""
        whole_ns = self.life_ns.total()
        return _of(self.life_ns, causes) / whole_ns if whole_ns else 0.0


def _histograms(num: int) -> list[LogHistogram]:
    return [LogHistogram() for _ in range(num)]


def _of(by_cause: dict[str, int], causes: tuple[str, ...]) -> int:
    return sum(by_cause.get(cause, 0) for cause in causes)


def _gaps_ns(times_ns: array[int]) -> Ints:
    times: Ints = np.frombuffer(times_ns, dtype=np.int64)
    return np.subtract(times[1:], times[:-1])


def by_gap(times_ns: array[int], ends_ns: Ints, waits_ns: Ints, *, at_most_ns: int) -> Ints:
    """Assign each wait within a step to the gap between tokens that it lengthened.

    That is the gap in which the step ended: its token was delayed, whether it is emitted at once or
    during the next step.

    Args:
        times_ns: times of the emission events.
        ends_ns: [steps], end of each.
        waits_ns: [steps], wait of the request in each.
        at_most_ns: time that the ledger booked between the tokens; if steps overlap, a wait is
            not fully a delay.

    Returns:
        [gaps], each at most its gap, in total at most `at_most_ns`.
    """
    times, gaps_ns = np.frombuffer(times_ns, dtype=np.int64), _gaps_ns(times_ns)
    waited_ns = np.zeros(len(gaps_ns), dtype=np.int64)
    if not len(gaps_ns) or not len(ends_ns):
        return waited_ns
    token = np.searchsorted(times, ends_ns)
    is_between = (token > 0) & (token < len(times))
    np.add.at(waited_ns, token[is_between] - 1, waits_ns[is_between])
    np.minimum(waited_ns, gaps_ns, out=waited_ns)
    whole_ns = int(waited_ns.sum())
    if whole_ns > at_most_ns:
        waited_ns = np.floor(waited_ns * (at_most_ns / whole_ns)).astype(np.int64)
    return waited_ns
