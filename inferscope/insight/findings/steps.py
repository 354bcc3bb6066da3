"""Statistics of a run's steps, and each request's waits for others' prefills in them."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.findings.requests import by_gap
from inferscope.insight.findings.slowness import UNLEARNED
from inferscope.insight.findings.speculation import Speculation
from inferscope.records import PREFILL

Ints = NDArray[np.int64]

_MOST_WAITING = 8192
"""Maximum number of requests in flight whose waits are kept; the oldest are dropped."""


class RankStepTime(msgspec.Struct):
    """Steps of one rank, as it measured them."""

    num: int = 0
    sum_ns: int = 0

    @property
    def mean_ns(self) -> float:
        """Return the mean."""
        return self.sum_ns / self.num


class StepStats:
    """Statistics of one engine's steps, each counted once: the first rank represents all.

    Attributes:
        num: number of steps.
        busy_ns: measured time of that rank.
        num_cold: first steps of their shape.
        num_mixed: steps with both phases.
        mixed_prefill_tokens: prefill tokens in those.
        num_decoding: steps with decodes.
        decodes: decodes summed over those.
        num_modelled: of those, steps under a model fitted to this engine.
        decodes_modelled: decodes summed over those.
        decode_alone_ns: modelled time of those decodes without others, summed.
        decode_together_ns: modelled time of those decodes in their batches without prefills,
            summed.
        speculation: steps that verify or draft.
        of_rank: times of every observed rank, by data-parallel rank and rank.
    """

    def __init__(self) -> None:
        self.num = self.num_cold = self.num_mixed = self.mixed_prefill_tokens = 0
        self.busy_ns = 0
        self.num_decoding = self.decodes = 0
        self.num_modelled = self.decodes_modelled = 0
        self.decode_alone_ns = self.decode_together_ns = 0
        self.speculation = Speculation()
        self.of_rank: dict[tuple[int, int], RankStepTime] = {}
        self._last: tuple[int, int] | None = None
        self._waits: OrderedDict[str, tuple[array[int], array[int]]] = OrderedDict()
        """Ends of steps with others' prefills, and the request's waits in them, by request."""

    def add(self, step: FinalStep) -> bool:
        """Add a step; return whether it is the first of its ranks, which represents all."""
        if step.request_ids or step.unnamed:
            of_rank = self.of_rank.setdefault((step.dp_rank, step.rank), RankStepTime())
            of_rank.num += 1
            of_rank.sum_ns += step.measured_ns
        key = (step.dp_rank, step.step)
        if key == self._last:
            return False
        self._last = key
        self.num += 1
        self.num_cold += step.is_cold
        self.busy_ns += step.measured_ns
        self.speculation.add(step)
        delay = step.delay
        if delay is None:
            return True
        num_prefills = len(delay.prefills)
        num_decodes = len(delay.own_ns) - num_prefills
        if not num_decodes:
            return True
        self.num_decoding += 1
        self.decodes += num_decodes
        if step.components is not None and step.components.model.source not in UNLEARNED:
            own_ns = int(np.add.reduce(delay.own_ns))
            own_ns -= sum(delay.own_ns.item(at) for at in delay.prefills)
            self.num_modelled += 1
            self.decodes_modelled += num_decodes
            self.decode_alone_ns += own_ns
            self.decode_together_ns += delay.decode_class_ns
        if num_prefills:
            self.num_mixed += 1
            self._wait(step, delay.decode_interference_ns)
        return True

    def _wait(self, step: FinalStep, wait_ns: int) -> None:
        is_prefill = step.phases == PREFILL
        self.mixed_prefill_tokens += int(step.tokens[is_prefill].sum())
        computing = {step.request_ids[row] for row in is_prefill.nonzero()[0].tolist()}
        waits, end_ns = self._waits, step.end_ns
        for request_id in dict.fromkeys(step.request_ids):
            if request_id not in computing:
                known = waits.get(request_id)
                if known is None:
                    known = waits[request_id] = (array("q"), array("q"))
                known[0].append(end_ns)
                known[1].append(wait_ns)
        while len(waits) > _MOST_WAITING:
            waits.popitem(last=False)

    def end(self, request: FinalRequest) -> Ints:
        """Drop a final request; return each of its gaps' wait for prefills."""
        ends_ns, waits_ns = self._waits.pop(request.request_id, _NEVER)
        cause = "decode_interference"
        booked_ns = request.ledger_ns.get(cause, 0) - request.ttft_ledger_ns.get(cause, 0)
        return by_gap(
            request.token_times_ns,
            np.frombuffer(ends_ns, dtype=np.int64),
            np.frombuffer(waits_ns, dtype=np.int64),
            at_most_ns=max(0, booked_ns),
        )


_NEVER: tuple[array[int], array[int]] = (array("q"), array("q"))
