"""Facts that are kept until the device computes, and then written.

    schedule ──────────► planned   the step's number, two times, a reference to vLLM's output
    (dispatch) ────────► flush     what left the core since the last one, then the plan
    update_from_output ► left      references to the outputs, the time

Before a dispatch the device waits for the host, so nothing is computed or written then. vLLM does
not change these objects between `schedule` and the flush, nor outputs that have left. The state of
the scheduler itself (queues, blocks) is read by the flush as well: `settle` brings that forward
where something is about to change it. Facts are written in the order in which they happened, with
the times at which they did, and before any plan that was made after them. So the fold, which knows
no more of a step's time than the plans before it say, is never behind them.

What a crash leaves in the ring:
    within a launch     all steps before it, and of this one nothing. The worker's ring says since
                        when a step is under way (PENDING), the events which requests there are.
    after the dispatch  plan and members of the step as well; members of a step with drafts are
                        written with its outputs
A launch that hangs is a crash within a launch at first; after 50 to 150 ms the probe's own thread
flushes, unless the launch holds the interpreter's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inferscope.adapters.vllm.steps import Core

OVERDUE_NS = 50_000_000
"""Age in nanoseconds at which the probe's own thread writes facts: the engine's may hang."""
Planned = tuple[Any, int, int, int]
"""A `SchedulerOutput`, its step (-1 without tokens), start and end of scheduling in ns."""
Left = tuple[Any, Any, int, list[tuple[str, str]] | None, dict[int, int]]
"""A `SchedulerOutput`, its outputs, the time when they left in ns, requests that ended meanwhile,
and numbers of accepted draft tokens by position."""


class Kept:
    """Facts that one core has yet to write.

    The wrappers of `core.py` set these attributes themselves.

    Attributes:
        core: recorder that writes the facts.
        scheduler: weak reference to vLLM's scheduler.
        next_step: number of the next step with tokens.
        is_early: whether facts are written at once, because no device computes beside the host.
        planned: plan whose dispatch was not seen yet.
        left: outputs that have left the core, all of them older than `planned`.
        ended: requests that ended while a step's outputs are being handled, else None.
        accepted: number of accepted draft tokens in that step, by position.
    """

    __slots__ = (  # as in `Marks`
        "_probe",
        "accepted",
        "core",
        "ended",
        "is_early",
        "left",
        "next_step",
        "planned",
        "scheduler",
    )

    def __init__(self, core: Core, *, first_step: int = 0, is_early: bool = False) -> None:
        """Keep nothing yet."""
        self.core = core
        self.scheduler: Callable[[], Any] = core.reference
        self.next_step = first_step
        self.is_early = is_early
        self.planned: Planned | None = None
        self.left: deque[Left] = deque()
        self.ended: list[tuple[str, str]] | None = None
        self.accepted: dict[int, int] = {}
        self._probe = core.probe

    def judge(self, scheduler_output: Any, model_output: Any) -> None:
        """Read the numbers of accepted draft tokens before a stop trims them."""
        place_by_id = model_output.req_id_to_index
        sampled = model_output.sampled_token_ids
        # 0 of diffusion
        num_sampled = getattr(self.core.scheduler, "num_sampled_tokens_per_step", 1)
        for place, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            at = place_by_id.get(request_id)
            if at is not None and sampled:
                self.accepted[place] = max(0, len(sampled[at]) - num_sampled)

    def settle(self) -> None:
        """Write a kept plan before the scheduler's state changes."""
        if self.planned is not None:
            self.flush()

    def flush(self) -> None:
        """Write the kept facts in their order."""
        core, left = self.core, self.left
        self._probe.defer(self.since_ns)
        with core.lock:
            if core.scheduler is None:  # gone without a shutdown; its state cannot be read
                left.clear()
                self.planned = None
            num_left = len(left)  # before the plan: what another thread adds now may be of its step
            planned, self.planned = self.planned, None
            for _ in range(num_left - (planned is not None)):
                core.write_outcome(*left.popleft())
            if planned is not None:
                self._write(planned, left.popleft() if num_left else None)
        self._probe.defer(self.since_ns)

    def _write(self, planned: Planned, left: Left | None) -> None:
        """Write a plan and the outputs before it, as one record if that is enough."""
        core = self.core
        ended, self.ended = self.ended, None
        if not ended and planned[1] >= 0 and core.write_same(planned, left):
            return
        if left is not None:
            core.write_outcome(*left)
        if ended:  # in a step whose outputs were handled in vain
            core.end(ended)
        core.write_plan(*planned)

    @property
    def since_ns(self) -> int:
        """Return the time of the oldest kept fact in nanoseconds, 0 for none."""
        left, planned = self.left, self.planned
        with suppress(IndexError):  # the other thread writes it
            return left[0][2]
        return 0 if planned is None else planned[2]

    def flush_overdue(self, now_ns: int) -> None:
        """Write facts that are older than `OVERDUE_NS`; on the probe's own thread."""
        if not self.core.lock.acquire(blocking=False):
            return  # the engine's thread writes it
        try:
            since_ns = self.since_ns
            self._probe.defer(since_ns)
            if since_ns and now_ns - since_ns > OVERDUE_NS:
                self.flush()
        finally:
            self.core.lock.release()
