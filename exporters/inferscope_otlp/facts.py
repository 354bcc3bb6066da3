"""Facts of a request known only from its steps: number, batch sizes, prefill chunks.

A step has many rows and a busy engine thousands of steps a second, but few members change from one
step to the next. So a batch only sums its steps; each member stores the sums at its entry, and gets
the difference when it leaves or is read.

    step(64 decodes) → batch + 1 step … → a request finishes → its facts are the sums' difference
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec
import numpy as np

from inferscope.fold import FinalStep
from inferscope.records import PREFILL, RECOMPUTED

MAX_REQUESTS = 65_536
"""Maximum number of requests in flight with facts; beyond it the least recent are dropped."""
MAX_CHUNKS = 128
"""Maximum number of chunks per request; tracing back ends take no more events a span."""


class PrefillChunk(msgspec.Struct, gc=False):
    """One chunk of a prefill; times are host nanoseconds."""

    start_ns: int
    end_ns: int
    num_tokens: int
    num_context: int
    share_ns: int
    """Attributed compute in ns, summed over ranks."""
    is_recomputed: bool


class PhaseSteps(msgspec.Struct, gc=False):
    """Sums over the steps in which a request was in one phase."""

    num_steps: int = 0
    sum_requests: int = 0
    sum_tokens: int = 0


class RequestFacts(msgspec.Struct):
    """Facts of one request from its steps."""

    prefill: PhaseSteps
    decode: PhaseSteps
    chunks: list[PrefillChunk]
    num_chunks: int = 0
    complete_ns: int = -1
    """Time up to which they are complete."""
    forgotten_ns: int = -1
    """Time up to which steps of this request may have been dropped."""


class _Sums(NamedTuple):
    """Sums of a batch at a member's entry, and the time up to which facts had been dropped."""

    num_steps: int
    sum_requests: int
    sum_tokens: int
    forgotten_ns: int


class _PreviousBatch:
    """Members of one scheduler's last step, and the sums over all of its steps."""

    __slots__ = (
        "chunks",
        "decodes",
        "ids",
        "num_requests",
        "num_steps",
        "phases",
        "prefill_rows",
        "prefills",
        "step",
        "sum_requests",
        "sum_tokens",
    )

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self.phases = b""
        self.num_requests = 0
        self.prefill_rows: list[int] = []
        self.prefills: dict[str, _Sums] = {}
        """Members in prefill, with the sums at their entry; `decodes` likewise for all others."""
        self.decodes: dict[str, _Sums] = {}
        self.step = -1
        self.chunks: list[PrefillChunk] = []
        """Chunks of the last step, in the order of `prefill_rows`."""
        self.num_steps = self.sum_requests = self.sum_tokens = 0


_NO_BATCHES: dict[int, _PreviousBatch] = {}


class FactTable:
    """Facts of requests in flight."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        """Start empty."""
        self._max_requests = max_requests
        self._facts: dict[tuple[str, str], RequestFacts] = {}
        """Facts by engine and request, the least recent first."""
        self._batches: dict[str, dict[int, _PreviousBatch]] = {}
        """Batches by engine and data-parallel rank."""
        self._now_ns = -1
        self._forgotten_ns = -1

    def __len__(self) -> int:
        return len(self._facts)

    def add_step(self, step: FinalStep) -> None:
        """Add a step. It arrives once for each rank that executed it and counts once."""
        if not step.request_ids:
            return
        batches = self._batches.get(step.engine_id)
        if batches is None:
            batches = self._batches[step.engine_id] = {}
        batch = batches.get(step.dp_rank)
        if batch is None:
            batch = batches[step.dp_rank] = _PreviousBatch()
        phases = step.phases.tobytes()
        if batch.phases != phases or batch.ids != step.request_ids:
            self._update_members(step.engine_id, batch, step.request_ids, phases)
        if batch.step == step.step:
            for row, chunk in zip(batch.prefill_rows, batch.chunks, strict=True):
                chunk.share_ns += step.shares_ns.item(row)
            return
        batch.step = step.step
        self._now_ns = max(self._now_ns, step.end_ns)
        batch.num_steps += 1
        batch.sum_requests += batch.num_requests
        batch.sum_tokens += int(np.add.reduce(step.tokens))
        if batch.prefill_rows:
            self._take_chunks(step, batch)

    def pop(self, engine_id: str, request_id: str, *, since_ns: int | None) -> RequestFacts | None:
        """Return a finished request's facts and drop them.

        Args:
            engine_id: engine of the request.
            request_id: the engine's own ID of it.
            since_ns: admission time.

        Returns:
            None if no step had it, or some of its steps may have been dropped.
        """
        for batch in self._batches.get(engine_id, _NO_BATCHES).values():
            self._leave(engine_id, batch, request_id, is_prefill=True)
            self._leave(engine_id, batch, request_id, is_prefill=False)
        facts = self._facts.pop((engine_id, request_id), None)
        if facts is None or since_ns is None or since_ns <= facts.forgotten_ns:
            return None
        return facts

    def retain(self, engine_ids: Collection[str]) -> None:
        """Drop the batches of all other engines: they have no more steps."""
        for engine_id in [each for each in self._batches if each not in engine_ids]:
            del self._batches[engine_id]

    def _take_chunks(self, step: FinalStep, batch: _PreviousBatch) -> None:
        batch.chunks = []
        for row in batch.prefill_rows:
            name = step.request_ids[row]
            since = batch.prefills.get(name)
            forgotten_ns = self._forgotten_ns if since is None else since.forgotten_ns
            facts = self._of(step.engine_id, name, forgotten_ns=forgotten_ns)
            chunk = PrefillChunk(
                step.start_ns,
                step.end_ns,
                step.tokens.item(row),
                step.contexts.item(row),
                step.shares_ns.item(row),
                bool(step.flags.item(row) & RECOMPUTED),
            )
            batch.chunks.append(chunk)
            facts.num_chunks += 1
            if len(facts.chunks) < MAX_CHUNKS:
                facts.chunks.append(chunk)

    def _update_members(
        self, engine_id: str, batch: _PreviousBatch, ids: tuple[str, ...], phases: bytes
    ) -> None:
        """Remove members that left the batch or changed phase, and add the new ones."""
        batch.ids, batch.phases, batch.step, batch.chunks = ids, phases, -1, []
        rows = batch.prefill_rows = []
        at = phases.find(PREFILL)
        while at >= 0:
            rows.append(at)
            at = phases.find(PREFILL, at + 1)
        others = list(ids)
        for at in reversed(rows):
            del others[at]
        decodes = set(others)
        prefills = {ids[at] for at in rows}
        batch.num_requests = len(decodes | prefills) if prefills else len(decodes)
        for name in [name for name in batch.decodes if name not in decodes]:
            self._leave(engine_id, batch, name, is_prefill=False)
        for name in [name for name in batch.prefills if name not in prefills]:
            self._leave(engine_id, batch, name, is_prefill=True)
        now = _Sums(batch.num_steps, batch.sum_requests, batch.sum_tokens, self._forgotten_ns)
        if len(batch.decodes) < len(decodes):
            batch.decodes |= dict.fromkeys([n for n in others if n not in batch.decodes], now)
        for at in rows:
            batch.prefills.setdefault(ids[at], now)

    def _leave(
        self, engine_id: str, batch: _PreviousBatch, request_id: str, *, is_prefill: bool
    ) -> None:
        """Add the growth of the sums to a leaving member, if it is one."""
        since = (batch.prefills if is_prefill else batch.decodes).pop(request_id, None)
        if since is None:
            return
        facts = self._of(engine_id, request_id, forgotten_ns=since.forgotten_ns)
        mine = facts.prefill if is_prefill else facts.decode
        mine.num_steps += batch.num_steps - since.num_steps
        mine.sum_requests += batch.sum_requests - since.sum_requests
        mine.sum_tokens += batch.sum_tokens - since.sum_tokens

    def _of(self, engine_id: str, request_id: str, *, forgotten_ns: int) -> RequestFacts:
        """Return a request's facts and mark them as the most recent.

        Args:
            engine_id: engine of the request.
            request_id: the engine's own ID of it.
            forgotten_ns: time up to which facts had been dropped at its entry, if it has none.
        """
        key = (engine_id, request_id)
        facts = self._facts.pop(key, None)
        if facts is None:
            facts = RequestFacts(PhaseSteps(), PhaseSteps(), [], forgotten_ns=forgotten_ns)
        self._facts[key] = facts
        facts.complete_ns = self._now_ns
        if len(self._facts) > self._max_requests:
            oldest = self._facts.pop(next(iter(self._facts)))
            self._forgotten_ns = max(self._forgotten_ns, oldest.complete_ns)
        return facts
