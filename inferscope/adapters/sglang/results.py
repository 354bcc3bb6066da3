"""Recorder of the results of SGLang's batches: verified drafts, emitted tokens, ended requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from inferscope.adapters.sglang.phases import Rows, finish_of_json, rows_of
from inferscope.adapters.sglang.state import MARK, Followed, Verified
from inferscope.probe import Deferred, Probe


class Held(NamedTuple):
    """One token of each request of a step, to be recorded with the next launch."""

    indices: list[int]
    step: int
    at_ns: int


_LATE = 8
"""Launched batches kept until their results; overlap has one, a pipeline one per stage."""


class Results:
    """Recorder of consecutive results. Its methods may raise.

    Attributes:
        held: an emission that the record of the next launch may state, None where there is none.
        counts_at_once: a retraction may take tokens back ahead of the next launch.
    """

    def __init__(
        self,
        probe: Probe,
        deferred: Deferred,
        *,
        is_core: bool,
        is_deferring: bool,
        counts_at_once: bool,
        record_rows: Callable[[int, Rows], None],
        finish: Callable[[Followed, str, int | None], None],
    ) -> None:
        """Take where results are recorded.

        Args:
            probe: of this process.
            deferred: takes what is recorded later.
            is_core: whether it records requests.
            is_deferring: results are recorded behind the next launch.
            counts_at_once: their tokens are counted now, for some may be taken back before it.
            record_rows: records the rows of a step.
            finish: records the end of a request, how and when.
        """
        self._probe = probe
        self._deferred = deferred
        self._is_core = is_core
        self._is_deferring = is_deferring
        self._record_rows = record_rows
        self._finish = finish
        self._verified: dict[int, str] = {}
        """Speculative batches whose result is not in: their mode, by step."""
        self._before: list[tuple[Any, int, int]] = []
        """Their requests, positions computed and tokens put out before the result now looked at."""
        self._step = -1
        self._has_streamed = False
        self.held: Held | None = None
        self.counts_at_once = counts_at_once

    def settle(self) -> None:
        """Record the emission that is held."""
        held, self.held = self.held, None
        if held is not None:
            ones = [1] * len(held.indices)
            self._probe.emitted(held.indices, ones, step=held.step, at_ns=held.at_ns)

    def forget(self) -> None:
        """Drop the engine's objects, and the emission that is held."""
        self.held, self._before = None, []

    def expect_verified(self, step: int, mode: str) -> None:
        """Note that the rows of a speculative batch are known with its result."""
        self._verified[step] = mode
        if len(self._verified) > _LATE:
            del self._verified[next(iter(self._verified))]

    def begin(self, batch: Any) -> None:
        """Take in which step's result is processed: with overlap not the one launched last."""
        self._step = -1 if batch.forward_iter is None else batch.forward_iter
        self._has_streamed = False
        if self._step in self._verified:
            self._before = [
                (request, request.seqlen - 1, len(request.output_ids)) for request in batch.reqs
            ]

    def end(self, batch: Any, result: Any, now_ns: int) -> None:
        """Take all of a result's tokens: what was not streamed, and verified rows."""
        mode = self._verified.pop(self._step, None)
        if mode is not None:
            stride = getattr(result, "speculative_output_stride", None)  # from 0.5.20 on
            stride = stride or result.speculative_num_draft_tokens or 1
            num_after = [len(request.output_ids) for request, _, _ in self._before]
            num_new = getattr(result, "num_non_draft_tokens_per_req", 1)
            verified = Verified(self._step, mode, self._before, num_after, stride, num_new)
            self._defer(now_ns, self._record_verified, verified)
        if not self._has_streamed:
            self.stream(batch.reqs, now_ns)
        self._step, self._before = -1, []

    def stream(self, requests: Sequence[Any], at_ns: int) -> None:
        """Take the requests whose tokens have left: those of a result, or of none."""
        self._has_streamed = True
        if not self._is_core:
            return
        if self._is_deferring and self._step >= 0:
            # The list grows with the next batch. Tokens do so with the next result, ahead of which
            # this is recorded; counting them here would cost 1 µs for each request.
            counts = self._counts(requests) if self.counts_at_once else None
            facts = self._record_emitted, list(requests), counts, self._step, at_ns
            self._deferred.add(at_ns, *facts)
        else:
            self._deferred.flush()
            self._record_emitted(requests, None, self._step, at_ns)

    @staticmethod
    def _counts(requests: Sequence[Any]) -> list[int]:
        return [len(request.output_ids) for request in requests]

    def _defer(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        if self._is_deferring:
            self._deferred.add(at_ns, action, *arguments)
        else:
            action(*arguments)

    def _record_verified(self, verified: Verified) -> None:
        rows = rows_of(verified.mode, verified.parts(), is_verified=True)
        self._record_rows(verified.step, rows)

    def _record_emitted(
        self, requests: Sequence[Any], counts: list[int] | None, step: int, at_ns: int
    ) -> None:
        """Record the tokens that have left, and the requests that have ended."""
        indices, new, ended = [], [], []
        if counts is None:
            counts = self._counts(requests)
        for request, num_out in zip(requests, counts, strict=True):
            followed = getattr(request, MARK, None)
            if followed is None or followed.has_ended:
                continue
            if request.finished_len is not None:
                num_out = request.finished_len
            if num_out > followed.num_emitted:
                indices.append(followed.index)
                new.append(num_out - followed.num_emitted)
                followed.num_emitted = num_out
            if request.finished_reason is not None:
                ended.append((followed, request.finished_reason))
        self.settle()
        if self._is_deferring and indices and not ended and step >= 0 and set(new) == {1}:
            self.held = Held(indices, step, at_ns)
        elif indices:
            self._probe.emitted(indices, new, step=step, at_ns=at_ns)
        for followed, reason in ended:
            finish = finish_of_json(reason.to_json(), has_run=followed.has_run)
            self._finish(followed, finish, at_ns)
