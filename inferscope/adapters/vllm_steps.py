"""One scheduler's steps and requests, as told to one probe.

    scheduled ─► plan, admitted, preempted, resumed; the step's number rides on vLLM's output
    updated ───► slices, emitted, finished

With asynchronous scheduling the next step is scheduled before the outputs of this one are known;
steps still come back in their order. Steps without tokens are not numbered: nothing is executed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from time import monotonic_ns
from typing import Any, NamedTuple

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.vllm_phases import Part, Progress, part_of
from inferscope.probe import Probe
from inferscope.probe.columns import column
from inferscope.records import DECODE, PREFILL, Binding

TAG = "_inferscope"
"""Attribute of a `SchedulerOutput`: the fields of a `Tag`, pickled with it to the workers. A plain
tuple, for a worker without inferscope (on another host) must be able to read what it is sent."""
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
    prefill_tokens: int
    """Of these."""

    @classmethod
    def of(cls, output: Any) -> Tag | None:
        """Read a `SchedulerOutput`'s."""
        fields = getattr(output, TAG, None)
        return None if fields is None else cls(*fields)

    def put_on(self, output: Any) -> None:
        """Let it ride on a `SchedulerOutput`."""
        setattr(output, TAG, tuple(self))


class Team(NamedTuple):
    """Requests that decode one token each, step after step, as long as nobody comes or goes.

    Their rows differ from one step to the next in nothing but the contexts: with 64 requests a step
    of such a team costs a third of one that is split anew.
    """

    ids: list[str]
    progress: list[Progress]
    tag: tuple[int, ...]
    requests: bytes
    phases: bytes
    tokens: bytes
    sampled: bytes


class Core:
    """One scheduler, as told to one probe.

    Attributes:
        probe: of this process.
        next_step: the number of the next step with tokens.
        adding: the id of the request that is being added: a session's last input ends it.
    """

    def __init__(self, scheduler: Any, probe: Probe, *, first_step: int = 0) -> None:
        self._scheduler = weakref.ref(scheduler)
        self.probe = probe
        self._requests: LiveTable[Progress] = LiveTable(probe)
        self.next_step = first_step
        self.adding: str | None = None
        self._flying: dict[int, dict[int, Part] | tuple[Team, list[int]]] = {}
        """Steps whose outputs are not known: parts by position, or a team and its contexts."""
        self._team: Team | None = None
        self._has_drafted = False
        self._accepted: dict[int, int] = {}
        """In the step whose outputs are being handled: by position, accepted draft tokens."""
        self._ended: list[tuple[str, str]] | None = None
        """Requests ended while a step's outputs are handled: told after what it computed."""

    @property
    def scheduler(self) -> Any:
        """Return vLLM's scheduler, which must not live on by its hooks; None where it is gone."""
        return self._scheduler()

    def added(self, request: Any) -> None:
        """Note a request; one that goes on with new input is known already."""
        self.adding = None
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
        """Return how far a request has come; None where it is not known, or through."""
        return self._requests.get(request_id)

    def scheduled(self, output: Any, *, start_ns: int) -> None:
        """Tell the plan, and who came and went with it."""
        end_ns = monotonic_ns()
        probe, requests = self.probe, self._requests
        self._end_all()  # of a step whose outputs were handled in vain
        for request_id in getattr(output, "finished_req_ids", None) or ():
            # All that ends by a way that is hooked has left the table before the next step.
            if request_id in requests and self._is_over(request_id):
                self._end(request_id, "error")
        preempted = []
        for request_id in output.preempted_req_ids or ():
            progress = requests.get(request_id)
            if progress is not None:
                probe.preempted(progress.index, at_ns=end_ns)
                progress.is_preempted = True
                preempted.append(progress.index)
        if not output.num_scheduled_tokens:
            self._come(output, end_ns)
            return
        step = self.next_step
        self.next_step += 1
        team = self._same_team(output)
        if team is not None:
            self._flying[step] = (team, output.scheduled_cached_reqs.num_computed_tokens)
            Tag(step, team.tag, None, 0).put_on(output)
        else:
            self._flying[step] = part_by_place = self._parts(output, self._come(output, end_ns))
            parts = list(part_by_place.values())
            is_plain = len(parts) == len(output.num_scheduled_tokens) and all(
                len(part.rows) == 1 for part in parts
            )
            indices = tuple(part.progress.index for part in parts for _ in part.rows)
            tokens = None if is_plain else tuple(r.tokens for part in parts for r in part.rows)
            of_prefill = [r.tokens for part in parts for r in part.rows if r.phase == PREFILL]
            Tag(step, indices, tokens, sum(of_prefill)).put_on(output)
            self._team = self._team_of(output, parts)
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
        if not scheduler_output.scheduled_spec_decode_tokens:
            return
        place_by_id = model_output.req_id_to_index
        sampled = model_output.sampled_token_ids
        num_sampled = getattr(self.scheduler, "num_sampled_tokens_per_step", 1)  # 0 of diffusion
        for place, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            at = place_by_id.get(request_id)
            if at is not None and sampled:
                self._accepted[place] = max(0, len(sampled[at]) - num_sampled)

    def updated(self, scheduler_output: Any, outputs: Any) -> None:
        """Tell what a step computed, then what left the core, then who is through."""
        ended = [] if self._ended is None else self._ended
        tag = Tag.of(scheduler_output)
        step = -1 if tag is None else tag.step
        flown = self._flying.pop(step, None)
        if isinstance(flown, tuple):
            self._tell_team(step, *flown)
        elif flown is not None:
            self._tell_slices(step, flown)
        for of_client in (outputs or {}).values():
            self._tell_emitted(step, of_client.outputs, ended)
        self._end_all()

    def aborted(self, request_ids: Any, status: Any) -> None:
        """Report requests that were ended from outside, by what the scheduler still holds.

        What `finish_requests` returns is another thing in every other version, and None in some.

        Args:
            request_ids: one, several, or None for all; an iterator is used up by now.
            status: as `finish_requests` was given it. All requests at once are the server's doing.
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
        for request_id in request_ids:
            if request_id not in self._requests or not self._is_over(request_id):
                continue
            if self._ended is None:
                self._end(request_id, reason)
            else:
                self._ended.append((request_id, reason))

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
        if progress is None:
            return
        if not progress.has_run:
            progress.has_run = True
            self.probe.admitted(progress.index, cached_tokens=context, at_ns=at_ns)
            return
        num_prompt = int(self.scheduler.requests[request_id].num_prompt_tokens)
        is_next_turn = num_prompt != progress.num_prompt  # of a session, by new input
        if progress.is_preempted or not is_next_turn:
            self.probe.resumed(progress.index, cached_tokens=context, at_ns=at_ns)
        # Steps in flight keep the old one: vLLM drops what they compute from here on.
        ever = context if is_next_turn else progress.ever
        self._requests[request_id] = progress.again(num_prompt, ever=ever)

    def _met(self, request_id: str) -> Progress | None:
        """Take in a request that entered the scheduler by a way that is not hooked.

        None once the table was full: it may be one that was refused, whose arrival is long past.
        """
        if not self._requests.num_dropped:
            self.added(self.scheduler.requests[request_id])
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

    def _team_of(self, output: Any, parts: list[Part]) -> Team | None:
        """Return the step's requests as a team, if all of them decode one token."""
        num = len(parts)
        is_plain = output.total_num_scheduled_tokens == num and not self._has_drafted
        if not is_plain or any(part.rows[0].phase != DECODE for part in parts):
            return None
        tag = tuple(part.progress.index for part in parts)
        return Team(
            list(output.num_scheduled_tokens),
            [part.progress for part in parts],
            tag,
            column("I", tag),
            bytes([DECODE]) * num,
            column("I", (1,) * num),
            column("H", (1,) * num),
        )

    def _same_team(self, output: Any) -> Team | None:
        """Return the last step's team if this one is its next step."""
        team, cached = self._team, output.scheduled_cached_reqs
        if (
            team is None
            or output.total_num_scheduled_tokens != len(team.ids)
            or output.scheduled_spec_decode_tokens
            or output.scheduled_new_reqs
            or cached.resumed_req_ids
            or cached.req_ids != team.ids
            or list(output.num_scheduled_tokens) != team.ids
        ):
            return None
        return team

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

    def _tell_slices(self, step: int, part_by_place: dict[int, Part]) -> None:
        parts = part_by_place.values()
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
            for place, part in part_by_place.items():
                for number, _ in enumerate(part.rows, 1):
                    is_last = number == len(part.rows)
                    proposed.append(part.drafts if is_last else 0)
                    accepted.append(self._accepted.get(place, 0) if is_last else 0)
        for place, part in part_by_place.items():
            part.computed(accepted=self._accepted.get(place, 0))
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
            accepted=accepted,
        )

    def _tell_team(self, step: int, team: Team, contexts: list[int]) -> None:
        self.probe.slices(
            step,
            requests=team.requests,
            phases=team.phases,
            tokens=team.tokens,
            contexts=contexts,
            sampled=team.sampled,
        )
        for progress, context in zip(team.progress, contexts, strict=True):
            progress.ever = context + 1

    def _tell_emitted(self, step: int, outputs: Any, ended: list[tuple[str, str]]) -> None:
        """Tell the tokens that leave, and add the requests that are through."""
        get = self._requests.get
        leaving = [(get(output.request_id), len(output.new_token_ids)) for output in outputs]
        told = [(progress.index, num) for progress, num in leaving if progress and num]
        if told:
            indices, counts = zip(*told, strict=True)
            self.probe.emitted(indices, counts, step=step)
        ended += [
            (output.request_id, _FINISHES.get(str(output.finish_reason), "error"))
            for output in outputs
            if output.finish_reason is not None and self._is_over(output.request_id)
        ]

    def _is_over(self, request_id: str) -> bool:
        """Tell whether a request that stopped is through: a session may go on with new input."""
        request = self.scheduler.requests.get(request_id)
        return request is None or request.is_finished()

    def _end_all(self) -> None:
        ended, self._ended = self._ended or (), None
        for request_id, reason in ended:
            self._end(request_id, reason)

    def _end(self, request_id: str, reason: str) -> None:
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self.probe.finished(progress.index, reason)
