"""Signature of a worker's step: digest, tokens by phase, and launch mode.

All of it is read from the scheduler's output once the step behind is launched. A reader on a host
where the core is not knows the phases by nothing else, so the worker splits steps as the core does
(`phases.py`), but for what outputs alone tell: after a preemption it may count draft tokens
that were accepted in the last step before it as decoded again, not as computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.vllm.modes import Modes
from inferscope.adapters.vllm.phases import Progress, part_of
from inferscope.adapters.vllm.tag import is_signed_by_ids, step_digest
from inferscope.probe import Probe, column
from inferscope.records import DECODE, PREFILL, RequestIndex

_UNINDEXED = RequestIndex(0)


class Signer:
    """Signer of one worker's steps, in their order."""

    def __init__(self, probe: Probe, modes: Modes) -> None:
        """Start without requests."""
        self._probe = probe
        self._modes = modes
        self._requests: LiveTable[Progress] = LiveTable(probe)
        self._team: list[str] = []
        """Requests of the last step, if each of them decoded one token."""
        self._contexts: Iterable[int] = ()
        """Contexts of the team in that step."""
        self._digest = 0
        self._tokens = b""

    def sign(self, step: int, output: Any) -> None:
        """Sign a step by its `SchedulerOutput`; any slices fit one whose core does not do so."""
        cached = output.scheduled_cached_reqs
        tokens_by_id = output.num_scheduled_tokens
        prefill_tokens: int | None = 0
        if self._is_team(output):
            self._contexts = cached.num_computed_tokens
        else:
            self._digest = step_digest(tokens_by_id)
            self._tokens = column("I", tuple(tokens_by_id.values()))
            prefill_tokens = self._prefill_tokens(output)
        mode, padded = self._modes.of(tokens_by_id.values())
        self._probe.sign(
            step,
            tokens=self._tokens,
            prefill_tokens=prefill_tokens,
            digest=self._digest if is_signed_by_ids(output) else 0,
            mode=mode,
            padded_tokens=padded,
        )

    def _is_team(self, output: Any) -> bool:
        """Return whether a step is the next one of the team."""
        team, cached = self._team, output.scheduled_cached_reqs
        return bool(
            team
            and output.total_num_scheduled_tokens == len(team)
            and not output.scheduled_spec_decode_tokens
            and not output.scheduled_new_reqs
            and not cached.resumed_req_ids
            and cached.req_ids == team
            and list(output.num_scheduled_tokens) == team
        )

    def _prefill_tokens(self, output: Any) -> int | None:
        """Return how many of a step's tokens are prefills'; None where one is not known."""
        requests = self._requests
        for request_id, context in zip(self._team, self._contexts):  # noqa: B905 -- both or none
            progress = requests.get(request_id)
            if progress is not None:
                progress.ever = context + 1
        self._team = []
        for request_id in output.finished_req_ids or ():
            requests.pop(request_id, None)
        context_by_id = self._arrive(output)
        drafts = output.scheduled_spec_decode_tokens
        num_prefill, is_known, is_team = 0, True, True
        for request_id, tokens in output.num_scheduled_tokens.items():
            progress = requests.get(request_id)
            if progress is None:
                is_known = is_team = False
                continue
            part = part_of(
                progress,
                context=context_by_id[request_id],
                tokens=tokens,
                drafts=len(drafts.get(request_id, ())) if drafts else 0,
            )
            num_prefill += sum(row.tokens for row in part.rows if row.phase == PREFILL)
            is_team &= tokens == 1 and part.rows[0].phase == DECODE
            part.computed(accepted=0)
            progress.rejected = 0  # contexts include what was accepted
        if is_team and not output.scheduled_new_reqs:
            self._team = list(output.num_scheduled_tokens)
            self._contexts = output.scheduled_cached_reqs.num_computed_tokens
        return num_prefill if is_known else None

    def _arrive(self, output: Any) -> dict[str, int]:
        """Note requests that are new or scheduled anew; return the context of all."""
        requests, context_by_id = self._requests, {}
        for new in output.scheduled_new_reqs:  # the second model runner resumes requests here too
            request_id, context = new.req_id, new.num_computed_tokens
            context_by_id[request_id] = context
            num_prompt = _num_prompt(new)
            progress = requests.get(request_id)
            if num_prompt is None:
                requests.pop(request_id, None)
            elif progress is None:
                requests.put(request_id, Progress(_UNINDEXED, num_prompt))
            elif progress.num_prompt != num_prompt:  # the next turn of a session
                requests[request_id] = progress.again(num_prompt, ever=context)
        cached = output.scheduled_cached_reqs
        for request_id, context in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            context_by_id[request_id] = context
            progress = requests.get(request_id)
            if progress is not None and context > progress.ever:
                progress.ever = context
        return context_by_id


def _num_prompt(new: Any) -> int | None:
    """Return the length of a new request's prompt; None where it is not there."""
    for name in ("prompt_token_ids", "prompt_embeds"):
        prompt = getattr(new, name, None)
        if prompt is not None:
            return len(prompt)
    return None
