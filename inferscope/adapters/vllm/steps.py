"""Recorder of one scheduler's steps and requests.

    write_plan     preempted, admitted, resumed, plan; slices if they are known
    write_outcome  slices if they were not known, emitted, finished

The slices of a step without draft tokens are known when it is planned. They are written with its
plan, so a kernel that hangs leaves the names of its requests in the ring. With draft tokens, and
for steps planned while such a step is under way, they are written with the outputs.

With asynchronous scheduling the next step is scheduled before the outputs of this one are known;
steps still come back in their order. Steps without tokens are not numbered: nothing is executed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.vllm import tag as vllm_tag
from inferscope.adapters.vllm.cache import CacheRecorder
from inferscope.adapters.vllm.phases import Part, Progress, part_of
from inferscope.adapters.vllm.teams import Team, team_of
from inferscope.probe import Probe, forked_lock
from inferscope.records import Binding

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


class Flight(NamedTuple):
    """A step whose outputs are not known yet."""

    digest: int
    part_by_place: dict[int, Part]
    """Parts by position in the scheduler's order; empty for a team."""
    team: Team | None
    contexts: list[int]
    """Contexts of the team's requests."""
    is_written: bool
    """Whether its slices are written."""


class Core:
    """Recorder of one scheduler for one probe.

    Attributes:
        probe: probe of this process.
        reference: weak reference to vLLM's scheduler.
        adding: id of the request that is being added: a session's last input ends it.
        lock: lock held while facts become records, by the engine's thread or the probe's.
        cache: recorder of the prefix cache; None if nothing is recorded of it.
    """

    def __init__(self, scheduler: Any, probe: Probe) -> None:
        self.reference = weakref.ref(scheduler)
        self.probe = probe
        self.adding: str | None = None
        self.lock = forked_lock()
        self.cache: CacheRecorder | None = None
        self._requests: LiveTable[Progress] = LiveTable(probe)
        self._flying: dict[int, Flight] = {}
        self._last: Flight | None = None
        """The step planned last."""
        self._team: Team | None = None
        self._has_drafted = False

    @property
    def scheduler(self) -> Any:
        """Return vLLM's scheduler, which its hooks must not keep alive; None once it is freed."""
        return self.reference()

    def knows(self, request_id: str) -> bool:
        """Return whether a request is known, so that adding it again is a session's next input."""
        return request_id in self._requests

    def added(self, request: Any) -> None:
        """Record a request's arrival, unless it is a known session's next input."""
        self.adding = None
        with self.lock:
            self._enter(request)

    def _enter(self, request: Any) -> None:
        request_id = request.request_id
        if request_id in self._requests or self._is_over(request_id):
            return
        if not self._requests.has_room():
            return
        num_prompt = int(request.num_prompt_tokens)
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", "")
        index = self.probe.queued(request_id, prompt_tokens=num_prompt, adapter=adapter)
        self._requests.put(request_id, Progress(index, num_prompt))

    def progress_of(self, request_id: str) -> Progress | None:
        """Return a request's progress; None if it is unknown or has ended."""
        return self._requests.get(request_id)

    def _index_of(self, request_id: str) -> int | None:
        progress = self._requests.get(request_id)
        return None if progress is None else progress.index

    def aborted(
        self, request_ids: Any, status: Any, ended: list[tuple[str, str]] | None = None
    ) -> None:
        """Record requests that were ended from outside, as far as the scheduler dropped them.

        The return value of `finish_requests` differs between versions, and is None in some.

        Args:
            request_ids: one id, several, or None for all; an iterator is exhausted by now.
            status: status passed to `finish_requests`. With no ids it is an abort by the server.
            ended: list that receives them, to be recorded with the outputs being handled; None if
                no outputs are.
        """
        reason = _FINISH_BY_STATUS.get(status.name, "error")
        if self.adding == request_ids and request_ids is not None:
            reason = "stop"
        if request_ids is None and reason == "client_cancel":
            reason = "server_abort"
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        elif not isinstance(request_ids, Collection):
            request_ids = list(self._requests)
        with self.lock:
            for request_id in request_ids:
                if request_id not in self._requests or not self._is_over(request_id):
                    continue
                if ended is None:
                    self._end(request_id, reason)
                else:
                    ended.append((request_id, reason))

    def write_plan(self, output: Any, step: int, start_ns: int, end_ns: int) -> None:
        """Write a plan, the requests that it admits or preempts, and slices that are known."""
        probe, requests = self.probe, self._requests
        if self.cache is not None:
            self.cache.planned(output, self._index_of)
        for request_id in getattr(output, "finished_req_ids", None) or ():
            # Requests that end in a hooked method have left the table before the next step.
            if request_id in requests and self._is_over(request_id):
                self._end(request_id, "error", end_ns)
        preempted = []
        for request_id in output.preempted_req_ids or ():
            progress = requests.get(request_id)
            if progress is not None:
                probe.preempted(progress.index, at_ns=end_ns)
                progress.is_preempted = True
                preempted.append(progress.index)
        if step < 0:
            self._come(output, end_ns)
            return
        team = self._team
        if team is not None and team.is_next(output):
            flight = self._again(output, team)
        else:
            flight = self._flight(output, end_ns)
        probe.plan(step, preempted=preempted, **self._plan(output, start_ns, end_ns))
        if flight.is_written:
            self._write_slices(step, flight, {})
        self._fly(step, flight)

    def write_same(
        self, planned: tuple[Any, int, int, int], left: tuple[Any, Any, int, Any, Any] | None
    ) -> bool:
        """Write a step with the last one's requests, and that one's outputs, as one record.

        Args:
            planned: arguments of `write_plan`.
            left: arguments of `write_outcome` for the outputs before, None if there are none.

        Returns:
            Whether it is written; if not, both have to be written in full.
        """
        output, step, start_ns, end_ns = planned
        team = self._team
        if (
            team is None
            or not team.is_next(output)
            or output.preempted_req_ids
            or any(request_id in self._requests for request_id in output.finished_req_ids or ())
            or not all(flight.is_written for flight in self._flying.values())
        ):
            return False
        emitted_step = emitted_ns = None
        if left is not None:
            emitted_step, emitted_ns = vllm_tag.step_of(left[0]), left[2]
            flight = self._flying.get(-1 if emitted_step is None else emitted_step)
            if flight is None or flight.team is not team or not team.has_emitted(left[1], left[3]):
                return False
        contexts = output.scheduled_cached_reqs.num_computed_tokens
        before = self._last
        if before is None or before.team is not team:
            return False
        if contexts != [context + 1 for context in before.contexts]:
            return False
        if not self.probe.same_step(
            step,
            emitted_step=emitted_step,
            emitted_ns=emitted_ns,
            **self._plan(output, start_ns, end_ns),
        ):
            return False
        if self.cache is not None:
            self.cache.planned(output, self._index_of)
        if emitted_step is not None:
            self._progress(self._flying.pop(emitted_step), {})
        self._fly(step, Flight(team.digest, {}, team, contexts, is_written=True))
        return True

    def write_outcome(
        self,
        scheduler_output: Any,
        outputs: Any,
        at_ns: int,
        ended: list[tuple[str, str]] | None,
        accepted: dict[int, int],
    ) -> None:
        """Write a step's slices, then the emitted tokens, then the requests that ended."""
        step = vllm_tag.step_of(scheduler_output)
        step = -1 if step is None else step
        flight = self._flying.pop(step, None)
        if flight is not None:
            if not flight.is_written:
                self._write_slices(step, flight, accepted)
            self._progress(flight, accepted)
        ended = ended or []
        for of_client in (outputs or {}).values():
            self._write_emitted(step, of_client.outputs, at_ns)
            ended += [
                (output.request_id, _FINISHES.get(str(output.finish_reason), "error"))
                for output in of_client.outputs
                if output.finish_reason is not None and self._is_over(output.request_id)
            ]
        self.end(ended, at_ns)

    def end(self, ended: list[tuple[str, str]], at_ns: int | None = None) -> None:
        """Record the end of requests, each with its reason."""
        for request_id, reason in ended:
            self._end(request_id, reason, at_ns)

    # --- inside -------------------------------------------------------------------------------

    def _fly(self, step: int, flight: Flight) -> None:
        self._flying[step] = self._last = flight
        if len(self._flying) > _MOST_FLYING:  # vLLM has dropped their outputs
            del self._flying[next(iter(self._flying))]

    def _plan(self, output: Any, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Return the arguments of `Probe.plan`, read from the scheduler now."""
        running, waiting = self.scheduler.get_request_counts()
        pool = self.scheduler.kv_cache_manager.block_pool
        total = int(pool.num_gpu_blocks) - 1  # one stands for no block
        free = int(pool.get_num_free_blocks())
        return {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "waiting": waiting,
            "running": running,
            "blocks_used": total - free,
            "blocks_cached": min(free, len(pool.cached_block_hash_to_block)),
            "blocks_total": total,
            "binding": self._binding(output, waiting=waiting, running=running),
        }

    def _flight(self, output: Any, at_ns: int) -> Flight:
        """Split a step over its requests; record those that are admitted or resumed."""
        part_by_place = self._parts(output, self._come(output, at_ns))
        # Contexts are known unless a step under way has draft tokens that may be rejected. The
        # fold takes slices in the order of the steps.
        is_known = not output.scheduled_spec_decode_tokens and all(
            flight.is_written for flight in self._flying.values()
        )
        digest = vllm_tag.step_digest(output.num_scheduled_tokens)
        parts = list(part_by_place.values())
        self._team = None if self._has_drafted else team_of(output, parts, digest)
        return Flight(digest, part_by_place, None, [], is_known)

    def _again(self, output: Any, team: Team) -> Flight:
        """Return the next step of a team."""
        is_known = all(flight.is_written for flight in self._flying.values())
        contexts = output.scheduled_cached_reqs.num_computed_tokens
        return Flight(team.digest, {}, team, contexts, is_known)

    def _come(self, output: Any, at_ns: int) -> dict[str, int]:
        """Record admissions and resumptions; return the context of each scheduled request."""
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
        if progress is None:
            return
        if not progress.has_run:
            progress.has_run = True
            self.probe.admitted(progress.index, cached_tokens=context, at_ns=at_ns)
            requests = self.scheduler.requests
            if self.cache is not None and request_id in requests:
                self.cache.arrived(requests[request_id], progress.index, context, requests)
            return
        request = self.scheduler.requests.get(request_id)  # it may end beside an overdue flush
        num_prompt = progress.num_prompt if request is None else int(request.num_prompt_tokens)
        is_next_turn = num_prompt != progress.num_prompt  # of a session, by new input
        if progress.is_preempted or not is_next_turn:
            self.probe.resumed(progress.index, cached_tokens=context, at_ns=at_ns)
        # Steps in flight keep the old one: vLLM drops what they compute from here on.
        ever = context if is_next_turn else progress.ever
        self._requests[request_id] = progress.again(num_prompt, ever=ever)

    def _met(self, request_id: str) -> Progress | None:
        """Enter a request that reached the scheduler past the hooks, and return its progress.

        Return None once the table was full: the request may be one that was refused long ago.
        Return None also if the request ended during a flush of the probe's own thread.
        """
        request = self.scheduler.requests.get(request_id)
        if request is not None and not self._requests.num_dropped:
            self._enter(request)
        return self._requests.get(request_id)

    def _parts(self, output: Any, context_by_id: dict[str, int]) -> dict[int, Part]:
        """Split a step over its requests, by their position in the scheduler's order."""
        drafts = output.scheduled_spec_decode_tokens
        self._has_drafted |= bool(drafts)
        parts = {}
        for place, (request_id, tokens) in enumerate(output.num_scheduled_tokens.items()):
            progress = self._requests.get(request_id) or self._met(request_id)
            if progress is not None:
                parts[place] = part_of(
                    progress,
                    context=context_by_id[request_id],
                    tokens=tokens,
                    drafts=len(drafts.get(request_id, ())) if drafts else 0,
                )
        return parts

    def _binding(self, output: Any, *, waiting: int, running: int) -> Binding:
        """Return the limit that kept the scheduler from admitting one more request."""
        scheduler = self.scheduler
        if waiting <= len(getattr(scheduler, "deferred_waiting", ())):
            return "none"  # those that wait, wait for something else
        limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        if running >= limit:
            return "slots"
        if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            return "budget"
        return "blocks"

    def _write_slices(self, step: int, flight: Flight, accepted: dict[int, int]) -> None:
        team = flight.team
        if team is not None:
            self.probe.slices(
                step,
                requests=team.requests,
                phases=team.phases,
                tokens=team.tokens,
                contexts=flight.contexts,
                sampled=team.sampled,
                digest=flight.digest,
            )
            return
        part_by_place = flight.part_by_place
        rows = [
            (
                part.progress.index,
                row.phase,
                row.tokens,
                row.context + part.true_context - part.context,
                row.flags,
                row.sampled,
            )
            for part in part_by_place.values()
            for row in part.rows
        ]
        proposed: list[int] = []
        verified: list[int] = []
        if any(part.drafts for part in part_by_place.values()):
            for place, part in part_by_place.items():
                for number, _ in enumerate(part.rows, 1):
                    is_last = number == len(part.rows)
                    proposed.append(part.drafts if is_last else 0)
                    verified.append(accepted.get(place, 0) if is_last else 0)
        requests, phases, tokens, contexts, flags, sampled = (
            zip(*rows, strict=True) if rows else ((),) * 6  # all of its requests were refused
        )
        self.probe.slices(
            step,
            requests=requests,
            phases=phases,
            tokens=tokens,
            contexts=contexts,
            flags=flags,
            sampled=sampled,
            proposed=proposed,
            accepted=verified,
            digest=flight.digest,
        )

    @staticmethod
    def _progress(flight: Flight, accepted: dict[int, int]) -> None:
        """Update the progress of a step's requests."""
        if flight.team is None:
            for place, part in flight.part_by_place.items():
                part.computed(accepted=accepted.get(place, 0))
            return
        for progress, context in zip(flight.team.progress, flight.contexts, strict=True):
            progress.ever = context + 1

    def _write_emitted(self, step: int, outputs: Any, at_ns: int) -> None:
        get = self._requests.get
        leaving = [(get(output.request_id), len(output.new_token_ids)) for output in outputs]
        emitted = [(progress.index, num) for progress, num in leaving if progress and num]
        if emitted:
            indices, counts = zip(*emitted, strict=True)
            self.probe.emitted(indices, counts, step=step, at_ns=at_ns)

    def _is_over(self, request_id: str) -> bool:
        """Return whether a stopped request has ended: a session may go on with new input."""
        request = self.scheduler.requests.get(request_id)
        return request is None or request.is_finished()

    def _end(self, request_id: str, reason: str, at_ns: int | None = None) -> None:
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self.probe.finished(progress.index, reason, at_ns=at_ns)
