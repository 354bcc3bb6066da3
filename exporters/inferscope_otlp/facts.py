"""What only a request's steps tell, kept until it finishes: steps, their batches, prefill chunks.

A step has many rows and a busy engine thousands of steps a second, but from one step to the next
its members rarely change. So while they stay the same they are a team whose steps are only summed,
and each member gets its part when the team changes or somebody asks.

    step(64 decodes) → team + 1 step … → a request finishes → 64 rows + n steps → team anew
"""

from __future__ import annotations

import msgspec

from inferscope.collector.finals import FinalStep
from inferscope.records import PREFILL, RECOMPUTED

MAX_REQUESTS = 65_536
"""Requests in flight whose facts are kept; beyond that, those that rested longest are forgotten."""
MAX_CHUNKS = 128
"""Chunks kept of one request. Tracing back ends take no more events a span than that."""


class Chunk(msgspec.Struct, gc=False):
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


class Facts(msgspec.Struct):
    """What the steps of one request said."""

    prefill: PhaseSteps
    decode: PhaseSteps
    chunks: list[Chunk]
    num_chunks: int = 0
    told_ns: int = -1
    """How far they reach."""
    forgotten_ns: int = -1
    """What steps up to then said of this request may have been forgotten."""


class _Team:
    """The members of the last step of one scheduler, and what is not told to them yet."""

    __slots__ = ("chunks", "ids", "members", "num_requests", "phases", "prefills", "step", "sums")

    def __init__(self, step: FinalStep, phases: bytes) -> None:
        self.ids = step.request_ids
        self.phases = phases
        is_prefill = (phase == PREFILL for phase in phases)
        self.members = list(dict.fromkeys(zip(self.ids, is_prefill, strict=True)))
        self.num_requests = len(set(self.ids))
        self.prefills = [row for row, phase in enumerate(phases) if phase == PREFILL]
        self.step = -1
        self.chunks: list[Chunk] = []
        """Of the last step, in the order of `prefills`."""
        self.sums = PhaseSteps()


class FactTable:
    """The facts of requests in flight.

    Attributes:
        num_forgotten: requests forgotten because there were too many.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        """Start empty."""
        self.num_forgotten = 0
        self._max_requests = max_requests
        self._facts: dict[tuple[str, str], Facts] = {}
        """By engine and request, those that rested longest first."""
        self._teams: dict[tuple[str, int], _Team] = {}
        """By engine and data-parallel rank."""
        self._now_ns = -1
        self._forgotten_ns = -1

    def __len__(self) -> int:
        return len(self._facts)

    def take(self, step: FinalStep) -> None:
        """Take a step. It comes once for each rank that executed it; it counts once."""
        if not step.request_ids:
            return
        key = (step.engine_id, step.dp_rank)
        phases = step.phases.tobytes()
        team = self._teams.get(key)
        if team is None or team.phases != phases or team.ids != step.request_ids:
            if team is not None:
                self._tell(step.engine_id, team)
            team = self._teams[key] = _Team(step, phases)
        if team.step == step.step:
            for row, chunk in zip(team.prefills, team.chunks, strict=True):
                chunk.share_ns += step.shares_ns.item(row)
            return
        team.step = step.step
        self._now_ns = max(self._now_ns, step.end_ns)
        team.sums.num_steps += 1
        team.sums.sum_requests += team.num_requests
        team.sums.sum_tokens += int(step.tokens.sum())
        if team.prefills:
            self._take_chunks(step, team)

    def pop(self, engine_id: str, request_id: str, *, since_ns: int | None) -> Facts | None:
        """Return a finished request's facts and forget them.

        Args:
            engine_id: whose request it is.
            request_id: the engine's own id of it.
            since_ns: when it was admitted.

        Returns:
            None where no step told of it, or some of its steps may have been forgotten.
        """
        for (of_engine, _), team in self._teams.items():
            if of_engine == engine_id and request_id in team.ids:
                self._tell(engine_id, team)
        facts = self._facts.pop((engine_id, request_id), None)
        if facts is None or since_ns is None or since_ns <= facts.forgotten_ns:
            return None
        return facts

    def _take_chunks(self, step: FinalStep, team: _Team) -> None:
        team.chunks = []
        for row in team.prefills:
            facts = self._of(step.engine_id, step.request_ids[row])
            chunk = Chunk(
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

    def _tell(self, engine_id: str, team: _Team) -> None:
        """Give each member its part of the team's sums."""
        sums = team.sums
        if not sums.num_steps:
            return
        for request_id, is_prefill in team.members:
            facts = self._of(engine_id, request_id)
            mine = facts.prefill if is_prefill else facts.decode
            mine.num_steps += sums.num_steps
            mine.sum_requests += sums.sum_requests
            mine.sum_tokens += sums.sum_tokens
        team.sums = PhaseSteps()

    def _of(self, engine_id: str, request_id: str) -> Facts:
        """Return a request's facts, the newest of all from now on."""
        key = (engine_id, request_id)
        facts = self._facts.pop(key, None)
        if facts is None:
            facts = Facts(PhaseSteps(), PhaseSteps(), [], forgotten_ns=self._forgotten_ns)
        self._facts[key] = facts
        facts.told_ns = self._now_ns
        if len(self._facts) > self._max_requests:
            oldest = self._facts.pop(next(iter(self._facts)))
            self.num_forgotten += 1
            self._forgotten_ns = max(self._forgotten_ns, oldest.told_ns)
        return facts
