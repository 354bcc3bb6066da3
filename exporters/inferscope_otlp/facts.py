"""What only a request's steps tell, kept until it finishes: steps, their batches, prefill chunks.

A step has many rows and a busy engine thousands of steps a second, but from one step to the next
few of its members change. So a team only sums its steps, each member knows what the sums were when
it came in, and gets what they have grown by when it leaves or somebody asks.

    step(64 decodes) → team + 1 step … → a request finishes → its facts are now's sums less then's
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec
import numpy as np

from inferscope.collector.finals import FinalStep
from inferscope.records import PREFILL, RECOMPUTED

MAX_REQUESTS = 65_536
"""Requests in flight whose facts are kept; beyond that, those that rested longest are forgotten."""
MAX_CHUNKS = 128
"""Chunks kept of one request. Tracing back ends take no more events a span than that."""


class PrefillChunk(msgspec.Struct, gc=False):
    """One part of a prefill. Times are host nanoseconds."""

    start_ns: int
    end_ns: int
    num_tokens: int
    num_context: int
    share_ns: int
    """Attributed compute, summed over ranks."""
    is_recomputed: bool


class PhaseSteps(msgspec.Struct, gc=False):
    """Sums over the steps in which a request was in one phase."""

    num_steps: int = 0
    sum_requests: int = 0
    sum_tokens: int = 0


class RequestFacts(msgspec.Struct):
    """What the steps of one request said."""

    prefill: PhaseSteps
    decode: PhaseSteps
    chunks: list[PrefillChunk]
    num_chunks: int = 0
    told_ns: int = -1
    """How far they reach."""
    forgotten_ns: int = -1
    """What steps up to then said of this request may have been forgotten."""


class _Sums(NamedTuple):
    """What a team's sums were, and how much had been forgotten by then."""

    num_steps: int
    sum_requests: int
    sum_tokens: int
    forgotten_ns: int


class _PreviousBatch:
    """The members of the last step of one scheduler, and the sums over all of its steps."""

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
        """Who is in it with a prompt, since when; likewise with anything else."""
        self.decodes: dict[str, _Sums] = {}
        self.step = -1
        self.chunks: list[PrefillChunk] = []
        """Of the last step, in the order of `prefill_rows`."""
        self.num_steps = self.sum_requests = self.sum_tokens = 0


_NO_BATCHES: dict[int, _PreviousBatch] = {}


class FactTable:
    """The facts of requests in flight.

    Attributes:
        num_forgotten: requests forgotten because there were too many.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        """Start empty."""
        self.num_forgotten = 0
        self._max_requests = max_requests
        self._facts: dict[tuple[str, str], RequestFacts] = {}
        """By engine and request, those that rested longest first."""
        self._teams: dict[str, dict[int, _PreviousBatch]] = {}
        """By engine, and data-parallel rank."""
        self._now_ns = -1
        self._forgotten_ns = -1

    def __len__(self) -> int:
        return len(self._facts)

    def take(self, step: FinalStep) -> None:
        """Take a step. It comes once for each rank that executed it; it counts once."""
        if not step.request_ids:
            return
        teams = self._teams.get(step.engine_id)
        if teams is None:
            teams = self._teams[step.engine_id] = {}
        team = teams.get(step.dp_rank)
        if team is None:
            team = teams[step.dp_rank] = _PreviousBatch()
        phases = step.phases.tobytes()
        if team.phases != phases or team.ids != step.request_ids:
            self._change(step.engine_id, team, step.request_ids, phases)
        if team.step == step.step:
            for row, chunk in zip(team.prefill_rows, team.chunks, strict=True):
                chunk.share_ns += step.shares_ns.item(row)
            return
        team.step = step.step
        self._now_ns = max(self._now_ns, step.end_ns)
        team.num_steps += 1
        team.sum_requests += team.num_requests
        team.sum_tokens += int(np.add.reduce(step.tokens))
        if team.prefill_rows:
            self._take_chunks(step, team)

    def pop(self, engine_id: str, request_id: str, *, since_ns: int | None) -> RequestFacts | None:
        """Return a finished request's facts and forget them.

        Args:
            engine_id: whose request it is.
            request_id: the engine's own id of it.
            since_ns: when it was admitted.

        Returns:
            None where no step told of it, or some of its steps may have been forgotten.
        """
        for team in self._teams.get(engine_id, _NO_BATCHES).values():
            self._leave(engine_id, team, request_id, is_prefill=True)
            self._leave(engine_id, team, request_id, is_prefill=False)
        facts = self._facts.pop((engine_id, request_id), None)
        if facts is None or since_ns is None or since_ns <= facts.forgotten_ns:
            return None
        return facts

    def keep(self, engine_ids: Collection[str]) -> None:
        """Let go of the teams of all other engines: no more steps of theirs come."""
        for engine_id in [each for each in self._teams if each not in engine_ids]:
            del self._teams[engine_id]

    def _take_chunks(self, step: FinalStep, team: _PreviousBatch) -> None:
        team.chunks = []
        for row in team.prefill_rows:
            name = step.request_ids[row]
            since = team.prefills.get(name)
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
            team.chunks.append(chunk)
            facts.num_chunks += 1
            if len(facts.chunks) < MAX_CHUNKS:
                facts.chunks.append(chunk)

    def _change(
        self, engine_id: str, team: _PreviousBatch, ids: tuple[str, ...], phases: bytes
    ) -> None:
        """Let those leave who are not in a step, or not in their phase, and others come in."""
        team.ids, team.phases, team.step, team.chunks = ids, phases, -1, []
        rows = team.prefill_rows = []
        at = phases.find(PREFILL)
        while at >= 0:
            rows.append(at)
            at = phases.find(PREFILL, at + 1)
        others = list(ids)
        for at in reversed(rows):
            del others[at]
        decodes = set(others)
        prefills = {ids[at] for at in rows}
        team.num_requests = len(decodes | prefills) if prefills else len(decodes)
        for name in [name for name in team.decodes if name not in decodes]:
            self._leave(engine_id, team, name, is_prefill=False)
        for name in [name for name in team.prefills if name not in prefills]:
            self._leave(engine_id, team, name, is_prefill=True)
        now = _Sums(team.num_steps, team.sum_requests, team.sum_tokens, self._forgotten_ns)
        if len(team.decodes) < len(decodes):
            team.decodes |= dict.fromkeys([n for n in others if n not in team.decodes], now)
        for at in rows:
            team.prefills.setdefault(ids[at], now)

    def _leave(
        self, engine_id: str, team: _PreviousBatch, request_id: str, *, is_prefill: bool
    ) -> None:
        """Give a member what the sums have grown by, if it is one."""
        since = (team.prefills if is_prefill else team.decodes).pop(request_id, None)
        if since is None:
            return
        facts = self._of(engine_id, request_id, forgotten_ns=since.forgotten_ns)
        mine = facts.prefill if is_prefill else facts.decode
        mine.num_steps += team.num_steps - since.num_steps
        mine.sum_requests += team.sum_requests - since.sum_requests
        mine.sum_tokens += team.sum_tokens - since.sum_tokens

    def _of(self, engine_id: str, request_id: str, *, forgotten_ns: int) -> RequestFacts:
        """Return a request's facts, the newest of all from now on.

        Args:
            engine_id: whose request it is.
            request_id: the engine's own id of it.
            forgotten_ns: what had been forgotten when it came, if nothing is kept of it.
        """
        key = (engine_id, request_id)
        facts = self._facts.pop(key, None)
        if facts is None:
            facts = RequestFacts(PhaseSteps(), PhaseSteps(), [], forgotten_ns=forgotten_ns)
        self._facts[key] = facts
        facts.told_ns = self._now_ns
        if len(self._facts) > self._max_requests:
            oldest = self._facts.pop(next(iter(self._facts)))
            self.num_forgotten += 1
            self._forgotten_ns = max(self._forgotten_ns, oldest.told_ns)
        return facts
