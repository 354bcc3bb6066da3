"""vLLM's core: what the scheduler decides, and what becomes of its requests.

    schedule ─► plan, admitted, preempted, resumed; the step's number rides on its output
    update_from_output ─► slices, emitted, finished

With asynchronous scheduling the next step is scheduled before the outputs of this one are known;
steps still come back in their order. Steps without tokens are not numbered: nothing is executed.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, NamedTuple

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm_info import data_rank, engine_info
from inferscope.adapters.vllm_phases import Part, Progress, part_of
from inferscope.probe import Probe
from inferscope.records import Binding

TAG = "_inferscope"
"""Attribute of a `SchedulerOutput`: a `Tag`. Instances of a dataclass are pickled with it."""
_MOST_FLYING = 64
_FINISHES = {
    "stop": "stop",
    "repetition": "stop",
    "length": "length",
    "abort": "client_cancel",
    "error": "error",
}
_FINISH_BY_STATUS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "client_cancel",
    "FINISHED_IGNORED": "rejected",
}


class Tag(NamedTuple):
    """What a worker must know of a step to sign it."""

    step: int
    requests: tuple[int, ...]
    """The core's indices, by row."""
    tokens: tuple[int, ...] | None
    """By row; None where each request has one row, for then the worker knows them."""


class CoreHooks:
    """Observes the schedulers of a process; all of it runs in the core's own loop."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._core: Core | None = None

    def install(self, scheduler_class: Any) -> None:
        """Hook `Scheduler`."""
        patches = self._patches
        patches.around(scheduler_class, "__init__", after=self.made)
        patches.around(scheduler_class, "add_request", after=self.added)
        patches.around(scheduler_class, "schedule", before=self.scheduling, after=self.scheduled)
        patches.around(
            scheduler_class, "update_from_output", before=self.updating, after=self.updated
        )
        patches.around(scheduler_class, "finish_requests", after=self.aborted)
        patches.around(scheduler_class, "shutdown", after=self.closed)

    def made(self, _: None, result: None, scheduler: Any, *args: Any, **kw: Any) -> None:
        """Open this process's ring."""
        if self._core is not None:
            self._patches.unsupported("a second scheduler in one process")
            return
        config = scheduler.vllm_config
        probe = Probe.open(engine_info(config), role="core", rank=data_rank(config))
        self._patches.probes.append(probe)
        self._core = Core(scheduler, probe)

    def added(self, _: None, result: None, scheduler: Any, request: Any) -> None:
        """A request enters the queue."""
        core = self._of(scheduler)
        if core is not None:
            core.added(request)

    def scheduling(self, scheduler: Any, *args: Any, **kw: Any) -> int:
        """Take the time at which scheduling begins."""
        return monotonic_ns()

    def scheduled(self, start_ns: int, output: Any, scheduler: Any, *args: Any, **kw: Any) -> None:
        """A step is planned."""
        core = self._of(scheduler)
        if core is not None:
            core.scheduled(output, start_ns=start_ns)

    def updating(self, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        """A step's outputs have come; what they say of draft tokens is trimmed later."""
        core = self._of(scheduler)
        if core is not None:
            core.judged(scheduler_output, model_runner_output)

    def updated(
        self, _: None, result: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kw: Any
    ) -> None:
        """A step's outputs leave the core."""
        core = self._of(scheduler)
        if core is not None:
            core.updated(scheduler_output, result)

    def aborted(
        self, _: None, result: Any, scheduler: Any, request_ids: Any, finished_status: Any
    ) -> None:
        """Requests are ended from outside."""
        core = self._of(scheduler)
        if core is not None:
            core.aborted(result, finished_status, is_everything=request_ids is None)

    def closed(self, _: None, result: None, scheduler: Any) -> None:
        """The core shuts down."""
        core = self._of(scheduler)
        if core is not None:
            core.probe.close()
            self._core = None

    def _of(self, scheduler: Any) -> Core | None:
        core = self._core
        return core if core is not None and core.scheduler is scheduler else None


class Core:
    """One scheduler, as told to one probe.

    Attributes:
        scheduler: vLLM's.
        probe: of this process.
    """

    def __init__(self, scheduler: Any, probe: Probe) -> None:
        self.scheduler = scheduler
        self.probe = probe
        self._requests: dict[str, Progress] = {}
        self._next_step = 0
        self._flying: dict[int, list[Part]] = {}
        self._accepted: dict[int, int] = {}
        """In the step whose outputs are being handled: by position, accepted draft tokens."""
        self._ended: list[tuple[str, str]] | None = None
        """Requests ended while a step's outputs are handled: told after what it computed."""

    def added(self, request: Any) -> None:
        """Note a request; one that goes on with new input is known already."""
        request_id = request.request_id
        if request_id in self._requests:
            return
        num_prompt = int(request.num_prompt_tokens)
        index = self.probe.queued(request_id, prompt_tokens=num_prompt)
        self._requests[request_id] = Progress(index, num_prompt)

    def scheduled(self, output: Any, *, start_ns: int) -> None:
        """Tell the plan, and who came and went with it."""
        end_ns = monotonic_ns()
        probe, requests = self.probe, self._requests
        preempted = []
        for request_id in output.preempted_req_ids or ():
            progress = requests.get(request_id)
            if progress is not None:
                probe.preempted(progress.index, at_ns=end_ns)
                preempted.append(progress.index)
        context_by_id = self._come(output, end_ns)
        if not output.num_scheduled_tokens:
            return
        step = self._next_step
        self._next_step += 1
        drafts = output.scheduled_spec_decode_tokens
        parts = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            progress = requests.get(request_id)
            if progress is None:  # it was there before we were
                progress = self._met(request_id)
            parts.append(
                part_of(
                    progress,
                    context=context_by_id[request_id],
                    tokens=tokens,
                    drafts=len(drafts.get(request_id, ())) if drafts else 0,
                )
            )
        self._tag(output, step, parts)
        self._flying[step] = parts
        if len(self._flying) > _MOST_FLYING:  # vLLM has dropped their outputs
            del self._flying[next(iter(self._flying))]
        waiting, running = self._counts()
        pool = self.scheduler.kv_cache_manager.block_pool
        total = int(pool.num_gpu_blocks) - 1  # one stands for no block
        free = int(pool.get_num_free_blocks())
        probe.plan(
            step,
            start_ns=start_ns,
            end_ns=end_ns,
            waiting=waiting,
            running=running,
            blocks_used=total - free,
            blocks_cached=min(free, len(pool.cached_block_hash_to_block)),
            blocks_total=total,
            preempted=preempted,
            binding=self._binding(output, waiting=waiting, running=running),
        )

    def judged(self, scheduler_output: Any, model_output: Any) -> None:
        """Read how many draft tokens were accepted, before a stop trims them."""
        self._ended = []
        self._accepted = {}
        tag = getattr(scheduler_output, TAG, None)
        if tag is None or tag.step not in self._flying:
            return
        place_by_id = model_output.req_id_to_index
        sampled = model_output.sampled_token_ids
        for place, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            if self._flying[tag.step][place].drafts and sampled:
                at = place_by_id.get(request_id)
                self._accepted[place] = 0 if at is None else max(0, len(sampled[at]) - 1)

    def updated(self, scheduler_output: Any, outputs: Any) -> None:
        """Tell what a step computed, then what left the core, then who is through."""
        ended, self._ended = self._ended or [], None
        tag = getattr(scheduler_output, TAG, None)
        step = -1 if tag is None else tag.step
        parts = self._flying.pop(step, None)
        if parts is not None:
            self._tell_slices(step, parts)
        indices, counts = [], []
        for of_client in (outputs or {}).values():
            for output in of_client.outputs:
                progress = self._requests.get(output.request_id)
                if progress is None:
                    continue
                if output.new_token_ids:
                    indices.append(progress.index)
                    counts.append(len(output.new_token_ids))
                if output.finish_reason is not None and self._is_over(output.request_id):
                    ended.append((output.request_id, str(output.finish_reason)))
        if indices:
            self.probe.emitted(indices, counts, step=step)
        for request_id, reason in ended:
            self._end(request_id, _FINISHES.get(reason, "error"))

    def aborted(self, requests: Any, status: Any, *, is_everything: bool) -> None:
        """Tell that requests were ended from outside; all of them at once is the server's doing."""
        reason = _FINISH_BY_STATUS.get(status.name, "error")
        if is_everything and reason == "client_cancel":
            reason = "server_abort"
        for request in requests or ():
            if self._ended is None:
                self._end(request.request_id, reason)
            else:
                self._ended.append((request.request_id, reason))

    # --- inside -------------------------------------------------------------------------------

    def _come(self, output: Any, at_ns: int) -> dict[str, int]:
        """Tell who was admitted or resumed; return the context of all that are scheduled."""
        context_by_id = {}
        for new in output.scheduled_new_reqs:  # the second model runner resumes requests here too
            context_by_id[new.req_id] = new.num_computed_tokens
            self._arrive(new.req_id, new.num_computed_tokens, at_ns)
        cached = output.scheduled_cached_reqs
        for request_id, context in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            context_by_id[request_id] = context
            if request_id in cached.resumed_req_ids:
                self._arrive(request_id, context, at_ns)
        return context_by_id

    def _arrive(self, request_id: str, context: int, at_ns: int) -> None:
        progress = self._requests.get(request_id)
        if progress is None:
            progress = self._met(request_id)
        if progress.has_run:
            self.probe.resumed(progress.index, cached_tokens=context, at_ns=at_ns)
        else:
            progress.has_run = True
            self.probe.admitted(progress.index, cached_tokens=context, at_ns=at_ns)

    def _met(self, request_id: str) -> Progress:
        """Take in a request that entered the scheduler by a way that is not hooked."""
        self.added(self.scheduler.requests[request_id])
        return self._requests[request_id]

    def _tag(self, output: Any, step: int, parts: list[Part]) -> None:
        is_plain = all(len(part.rows) == 1 for part in parts)
        requests = tuple(part.progress.index for part in parts for _ in part.rows)
        tokens = None if is_plain else tuple(row.tokens for part in parts for row in part.rows)
        setattr(output, TAG, Tag(step, requests, tokens))

    def _counts(self) -> tuple[int, int]:
        running, waiting = self.scheduler.get_request_counts()
        return waiting, running

    def _binding(self, output: Any, *, waiting: int, running: int) -> Binding:
        """Say what kept the scheduler from admitting one more request."""
        scheduler = self.scheduler
        if waiting <= len(getattr(scheduler, "deferred_waiting", ())):
            return "none"  # those that wait, wait for something else
        limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        if running >= limit:
            return "slots"
        if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            return "budget"
        return "blocks"

    def _tell_slices(self, step: int, parts: list[Part]) -> None:
        rows = [
            (
                part.progress.index,
                row.phase,
                row.tokens,
                row.context + part.true_context - part.context,
                row.flags,
                row.sampled,
            )
            for part in parts
            for row in part.rows
        ]
        proposed: list[int] = []
        accepted: list[int] = []
        if any(part.drafts for part in parts):
            for place, part in enumerate(parts):
                for number, _ in enumerate(part.rows, 1):
                    is_last = number == len(part.rows)
                    proposed.append(part.drafts if is_last else 0)
                    accepted.append(self._accepted.get(place, 0) if is_last else 0)
        for place, part in enumerate(parts):
            part.computed(accepted=self._accepted.get(place, 0))
        requests, phases, tokens, contexts, flags, sampled = zip(*rows, strict=True)
        self.probe.slices(
            step,
            requests=requests,
            phases=phases,
            tokens=tokens,
            contexts=contexts,
            flags=flags,
            sampled=sampled,
            proposed=proposed,
            accepted=accepted,
        )

    def _is_over(self, request_id: str) -> bool:
        """Tell whether a request that stopped is through: a session may go on with new input."""
        request = self.scheduler.requests.get(request_id)
        return request is None or request.is_finished()

    def _end(self, request_id: str, reason: str) -> None:
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self.probe.finished(progress.index, reason)
