"""Ledgers of simulated engines against an oracle that knows every event.

An engine is simulated: replicas, chunked prefill, asynchronous scheduling, preemption, aborts, slow
clients, late reports. The oracle asks of each interval between two facts what the request waited
for then, by the contract alone, and shares no code with the fold.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.final_records import FinalRequest
from inferscope.records import (
    ADMITTED,
    FINISHED,
    LAST_BYTE,
    PREEMPTED,
    QUEUED,
    RECEIVED,
    RESUMED,
    TOKENISED,
    Emitted,
    RequestEvent,
    StepSpan,
)
from tests.fold.scripts import MS, START_NS, Ring, Script, assert_all_closes

FOREVER_NS = 1 << 62
IN_STEPS = ("prefill_", "decode_", "recompute", "slowdown", "cold_start", "rank_wait")


@dataclass(eq=False)
class Step:
    planned_ns: int
    start_ns: int
    end_ns: int
    rows: list[tuple[Request, int, int]]
    emitted_ns: int | None = None
    emitting: list[Request] = field(default_factory=list)

    def end_for(self, request: Request) -> int:
        """Return the end of a member's wait for the step: not after a preemption since its plan."""
        cuts_ns = [since for since, _ in request.preempted if since >= self.planned_ns]
        return min([self.end_ns, *cuts_ns])


@dataclass(eq=False)
class Request:
    name: str
    replica: int
    prompt: int
    output: int
    received_ns: int
    tokenised_ns: int
    abort_ns: int
    queued_ns: int = 0
    admitted_ns: int = FOREVER_NS
    finished_ns: int = 0
    delivered_ns: int = 0
    computed: int = 0
    num_tokens: int = 0
    preempted: list[tuple[int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens_ns: list[int] = field(default_factory=list)
    """Times at which tokens left the engine's loop; likewise the front end."""
    written_ns: list[int] = field(default_factory=list)
    blocked: list[tuple[int, int]] = field(default_factory=list)

    def is_preempted_at(self, at_ns: int) -> bool:
        return any(since <= at_ns < until for since, until in self.preempted)


class Engine:
    """Simulated engine, and the records that it would write."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.has_front_end, self.is_async = rng.random() < 0.7, rng.random() < 0.5
        self.has_late_tokens = self.is_async and rng.random() < 0.5
        """Whether tokens may leave several steps late; then they name their step."""
        self.has_slow_clients, self.preempts, self.aborts = (rng.random() < 0.5 for _ in range(3))
        self.preempts &= not self.has_late_tokens  # tokens in flight would be computed anew
        self.writes: list[tuple[int, Callable[[], None]]] = []
        self.steps: list[list[Step]] = [[] for _ in range(rng.choice([1, 1, 2]))]
        self.requests = [self.request(at) for at in range(rng.choice([2, 4, 8]))]
        self.script = Script()
        self.cores = [self.script.ring(rank=rank) for rank in range(len(self.steps))]
        for rank, core in enumerate(self.cores):
            core.keyframe(dp_rank=rank)
        self.front_end = self.script.ring("frontend") if self.has_front_end else None
        for rank in range(len(self.steps)):
            self.serve(rank)
        for request in self.requests:
            self.deliver(request)
        for at_ns, write in sorted(self.writes, key=lambda entry: entry[0]):
            self.script.now_ns = at_ns
            write()

    def some_ns(self, low_ms: float, high_ms: float) -> int:
        return round(self.rng.uniform(low_ms, high_ms) * MS)

    def request(self, at: int) -> Request:
        rng = self.rng
        received_ns = START_NS + self.some_ns(5, 30 * at + 6)
        tokenised_ns = received_ns + (self.some_ns(0, 5) if self.has_front_end else 0)
        abort_ns = tokenised_ns + self.some_ns(0, 150) if rng.random() < 0.3 else FOREVER_NS
        return Request(
            f"r{at}", rng.randrange(len(self.steps)), rng.choice([3, 40, 300]), rng.randint(1, 6),
            received_ns, tokenised_ns, abort_ns if self.aborts else FOREVER_NS,
        )  # fmt: skip

    def write(self, at_ns: int, write: Callable[[], None]) -> None:
        self.writes.append((at_ns, write))

    # --- one replica --------------------------------------------------------------------------

    def serve(self, rank: int) -> None:
        """Run one replica's loop until all of its requests have ended."""
        rng, now_ns = self.rng, START_NS + MS
        to_come = [request for request in self.requests if request.replica == rank]
        queue: list[Request] = []
        running: list[Request] = []
        held: list[Request] = []
        flying: list[Step] = []
        while to_come or queue or running or held or flying:
            most = 3 if self.has_late_tokens else int(self.is_async)
            while len(flying) > most or (flying and not (running or held or queue)):
                step = flying.pop(0)
                late_ns = self.some_ns(0, 25) if self.has_late_tokens else 0
                now_ns = max(now_ns, step.end_ns) + self.some_ns(0.01, 1.5) + late_ns
                self.emit(rank, step, now_ns)
                running = [request for request in running if not request.finished_ns]
            now_ns += 1  # no two facts of a request at one time: only reports would order them
            for request in [r for r in [*queue, *running, *held] if r.abort_ns <= now_ns]:
                self.finish(request, now_ns, "client_cancel")
            queue, running, held = (
                [request for request in group if not request.finished_ns]
                for group in (queue, running, held)
            )
            for request in [r for r in to_come if r.tokenised_ns <= now_ns]:
                to_come.remove(request)
                queue.append(request)
                self.event(request, QUEUED, request.tokenised_ns, now_ns)
            if not (queue or running or held):
                if not flying and to_come:
                    now_ns = max(now_ns + 1, min(request.tokenised_ns for request in to_come))
                continue
            now_ns += 1
            if self.preempts and running and rng.random() < 0.15:
                request = running.pop(rng.randrange(len(running)))
                held.append(request)
                request.preempted.append((now_ns, FOREVER_NS))
                request.computed = 0
                self.event(request, PREEMPTED, now_ns, now_ns)
            elif held and rng.random() < 0.5:
                request = held.pop(0)
                running.append(request)
                request.preempted[-1] = (request.preempted[-1][0], now_ns)
                self.event(request, RESUMED, now_ns, now_ns)
            while queue and len(running) < 3:
                request = queue.pop(0)
                running.append(request)
                request.admitted_ns = now_ns
                self.event(request, ADMITTED, now_ns, now_ns)
            members = [request for request in running if rng.random() < 0.9]
            if members:
                flying.append(self.step(rank, members, now_ns))
                last = flying[-1]
                now_ns = now_ns + 1 if self.is_async else last.end_ns
            else:
                now_ns += self.some_ns(0.1, 2)

    def step(self, rank: int, members: list[Request], now_ns: int) -> Step:
        ended_ns = self.steps[rank][-1].end_ns if self.steps[rank] else 0
        start_ns = max(now_ns, ended_ns) + self.some_ns(0, 2)
        step = Step(now_ns, start_ns, start_ns + self.some_ns(2, 15), [])
        for request in members:
            to_compute = request.prompt + request.num_tokens - request.computed
            tokens = min(max(1, to_compute), 64)
            step.rows.append((request, tokens, request.computed))
            request.computed += tokens
            request.steps.append(step)
        number, core = len(self.steps[rank]), self.cores[rank]
        self.steps[rank].append(step)
        span = StepSpan(step.end_ns, number, 0, start_ns, start_ns + 1, step.end_ns)
        self.write(now_ns, lambda: core.plan(number))
        self.write(start_ns, lambda: self.write_slices(core, number, step))
        self.write(step.end_ns, lambda: core.write(span))
        return step

    def write_slices(self, core: Ring, number: int, step: Step) -> None:
        core.slices(number, [(index_of(core, r.name), n, before) for r, n, before in step.rows])

    def emit(self, rank: int, step: Step, at_ns: int) -> None:
        """Emit a token of each member that has computed its prompt, and end some of them."""
        emitting = []
        for request, tokens, before in step.rows:
            is_there = not request.finished_ns and not any(
                since >= step.planned_ns for since, _ in request.preempted
            )
            if is_there and before + tokens >= request.prompt + request.num_tokens:
                emitting.append(request)
                request.num_tokens += 1
                request.tokens_ns.append(at_ns)
                step.emitted_ns = at_ns
                step.emitting.append(request)
        core, record_ns = self.cores[rank], at_ns + self.some_ns(0, 0.5)
        names = [request.name for request in emitting]
        number = self.steps[rank].index(step) if self.has_late_tokens else -1
        if names:
            self.write(
                record_ns,
                lambda: core.write(
                    Emitted(
                        record_ns,
                        array("I", [index_of(core, name) for name in names]).tobytes(),
                        array("I", [1] * len(names)).tobytes(),
                        number,
                        at_ns,
                    )
                ),
            )
        for request in emitting:
            if request.num_tokens == request.output:
                self.finish(request, at_ns + self.some_ns(0, 0.1), "length", record_ns)

    def finish(self, request: Request, at_ns: int, reason: str, record_ns: int = 0) -> None:
        request.finished_ns = request.delivered_ns = at_ns
        self.event(request, FINISHED, at_ns, max(at_ns, record_ns), reason=reason)

    def event(
        self, request: Request, kind: int, at_ns: int, record_ns: int, *, reason: str = ""
    ) -> None:
        core = self.cores[request.replica]

        def write() -> None:
            if kind == QUEUED:
                core.enter(QUEUED, request.name, at_ms=(at_ns - START_NS) / MS)
            else:
                index = index_of(core, request.name)
                core.write(RequestEvent(record_ns, index, kind, at_ns, reason=reason))

        self.write(record_ns, write)

    def deliver(self, request: Request) -> None:
        """Pass tokens on to a client that may be slow to read."""
        ring = self.front_end
        if ring is None:
            return
        index = len(ring._ids)
        ring._ids[index] = request.name

        def event(kind: int, at_ns: int, request_id: str = "") -> None:
            record = RequestEvent(at_ns, index, kind, at_ns, request_id)
            self.write(at_ns, lambda: ring.write(record))

        event(RECEIVED, request.received_ns, request.name)
        event(TOKENISED, request.tokenised_ns)
        now_ns, one = 0, array("I", [1]).tobytes()
        for at_ns in request.tokens_ns:
            now_ns, blocked_ns = max(now_ns, at_ns) + self.some_ns(0, 2), 0
            if self.has_slow_clients and self.rng.random() < 0.3:
                blocked_ns = self.some_ns(1, 20)
                request.blocked.append((now_ns, now_ns + blocked_ns))
                now_ns += blocked_ns
            request.written_ns.append(now_ns)
            blocked = array("q", [blocked_ns]).tobytes() if blocked_ns else b""
            mine = array("I", [index]).tobytes()
            record = Emitted(now_ns, mine, one, at_ns=now_ns, blocked_ns=blocked)
            self.write(now_ns, lambda record=record: ring.write(record))  # type: ignore[misc]
        request.delivered_ns = max(now_ns, request.finished_ns) + self.some_ns(0, 2)
        event(LAST_BYTE, request.delivered_ns)


def index_of(ring: Ring, name: str) -> int:
    return next(index for index, known in ring._ids.items() if known == name)


# --- the oracle -----------------------------------------------------------------------------------


def covers(intervals: list[tuple[int, int]], at_ns: int) -> bool:
    return any(since <= at_ns < until for since, until in intervals)


def cause_at(engine: Engine, request: Request, at_ns: int) -> str:
    """Return what a request waited for at a time, all steps under one name."""
    edges_ns = request.written_ns if engine.has_front_end else request.tokens_ns
    first = [step for step in request.steps if step.emitted_ns in request.tokens_ns[:1]]
    if at_ns < request.tokenised_ns:
        return "frontend"
    if first and first[0].end_ns <= at_ns < edges_ns[0]:
        return "delivery" if covers(request.blocked, at_ns) else "output"
    if at_ns >= request.finished_ns:
        is_read = bool(edges_ns) and at_ns >= edges_ns[-1]
        return "delivery" if is_read or covers(request.blocked, at_ns) else "output"
    busy = [(step.start_ns, step.end_ns) for step in engine.steps[request.replica]]
    if at_ns < request.admitted_ns:
        return "queue" if covers(busy, at_ns) else "queue_idle"
    if request.is_preempted_at(at_ns):
        return "preempted"
    for step in request.steps:
        if step.start_ns <= at_ns < step.end_for(request):
            return "step"
    # A token on its way: the next emission, unless it is that of a later step.
    steps = [step for step in request.steps if step.end_for(request) == step.end_ns]
    if engine.has_late_tokens:
        waits = [(each.end_ns, each.emitted_ns) for each in steps if request in each.emitting]
        if any(end_ns <= at_ns < (emitted_ns or 0) for end_ns, emitted_ns in waits):
            return "output"
    inferred = [] if engine.has_late_tokens else steps
    for step, then in zip_longest(inferred, inferred[1:]):
        emitted_ns = min((ns for ns in request.tokens_ns if ns >= step.end_ns), default=FOREVER_NS)
        if step.end_ns <= at_ns < emitted_ns < (then.end_ns if then else FOREVER_NS):
            return "output"
    has_all = request.num_tokens == request.output and at_ns >= request.tokens_ns[-1]
    if has_all and not any(at_ns < step.start_ns < request.finished_ns for step in steps):
        return "output"
    return "not_scheduled" if covers(busy, at_ns) else "cpu_gap"


def expected(engine: Engine, request: Request) -> tuple[Counter[str], Counter[str]]:
    """Return a request's whole ledger and that to its first token, all steps under one name."""
    edges_ns = request.written_ns if engine.has_front_end else request.tokens_ns
    times = {request.received_ns, request.tokenised_ns, request.admitted_ns, request.finished_ns}
    times |= {request.delivered_ns, *request.tokens_ns, *request.written_ns}
    for step in engine.steps[request.replica]:
        times |= {step.start_ns, step.end_ns}
    for since_ns, until_ns in request.preempted + request.blocked:
        times |= {since_ns, until_ns}
    known = sorted(ns for ns in times if request.received_ns <= ns <= request.delivered_ns)
    whole, to_first = Counter[str](), Counter[str]()
    for since_ns, until_ns in pairwise(known):
        cause = cause_at(engine, request, since_ns)
        whole[cause] += until_ns - since_ns
        if edges_ns and until_ns <= edges_ns[0]:
            to_first[cause] += until_ns - since_ns
    return whole, to_first


def simplified(ledger_ns: dict[str, int], *, has_tail: bool) -> Counter[str]:
    """Return a ledger with all steps under one name; an end without a token may have either."""
    found = Counter[str]()
    for cause, ns in ledger_ns.items():
        found["step" if cause.startswith(IN_STEPS) else cause] += ns
    if has_tail:
        found["output"] += found.pop("delivery", 0)
    return found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_ledgers_state_what_each_request_waited_for(seed: int) -> None:
    engine = Engine(seed)
    collector, finals = engine.script.play(until_ms=3_000)
    assert_all_closes(collector, finals)
    by_id: dict[str, FinalRequest] = {final.request_id: final for final in finals.requests}
    assert len(by_id) == len(finals.requests) == len(engine.requests)
    for request in engine.requests:
        final, has_tail = by_id[request.name], not request.tokens_ns
        whole, to_first = expected(engine, request)
        assert simplified(final.ledger_ns, has_tail=has_tail) == +whole, request.name
        assert simplified(final.ttft_ledger_ns, has_tail=False) == +to_first, request.name
