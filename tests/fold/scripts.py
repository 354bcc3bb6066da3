"""Records of simulated engines, written by hand on a clock that the test moves."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferscope.attribution.blame import BLAMED
from inferscope.attribution.metric_breakdown import METRICS, breakdown
from inferscope.attribution.split_rules import RULES, price_steps, rule_shares_ns
from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.fold.fold import READER, Collector
from inferscope.fold.joins import ARRIVALS_NS
from inferscope.fold.retention import ALL, Retention
from inferscope.probe.probe import digest64
from inferscope.readers.merge import Item, Merger
from inferscope.records import (
    ADMITTED,
    DECODE,
    FINISHED,
    LAST_BYTE,
    ON,
    PREEMPTED,
    PREFILL,
    QUEUED,
    RECEIVED,
    RESUMED,
    RUNNING,
    TOKENISED,
    Clock,
    Emitted,
    EngineInfo,
    Keyframe,
    Live,
    Missed,
    ProbeHealth,
    Record,
    RequestEvent,
    RingOpened,
    StepPlan,
    StepSlices,
    StepSpan,
    Tick,
    Transfer,
    encode,
)

MS = 1_000_000
START_NS = 1_000_000_000_000


@dataclass
class Finals:
    """Sink that keeps final records."""

    steps: list[FinalStep] = field(default_factory=list)
    requests: list[FinalRequest] = field(default_factory=list)

    def on_step(self, step: FinalStep) -> None:
        self.steps.append(step)

    def on_request(self, request: FinalRequest) -> None:
        self.requests.append(request)

    def only(self) -> FinalRequest:
        assert len(self.requests) == 1, [r.request_id for r in self.requests]
        return self.requests[0]


class Script:
    """Records of some rings, in the order of the test's lines; `play` folds them."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.rings: list[Ring] = []
        self.entries: list[tuple[int, Record]] = []

    def at(self, ms: float) -> None:
        """Move the clock to a time in milliseconds after the start."""
        self.now_ns = START_NS + round(ms * MS)

    def ring(
        self, role: str = "core", rank: int = 0, *, engine_id: str = "engine", ranks: int = 1
    ) -> Ring:
        """Open a ring, which begins with a keyframe."""
        ring = Ring(self, len(self.rings) + 1, role, rank)
        self.rings.append(ring)
        opened = RingOpened(
            self.now_ns, ring.number, engine_id, role, rank, 1, "host", "boot", self.now_ns, 0
        )
        self.entries.append((READER, opened))
        ring.keyframe(ranks=ranks)
        return ring

    def miss(self, ring: Ring, num_frames: int = 3) -> None:
        """Drop frames of a ring."""
        self.entries.append((READER, Missed(self.now_ns, ring.number, num_frames, "lapped")))

    def items(self, *, until_ms: float | None = None) -> list[Item]:
        """Return all written records in fold order, Ticks included."""
        merger = Merger()
        out: list[Item] = []
        for sequence, (number, record) in enumerate(self.entries):
            if isinstance(record, RingOpened):
                out.append(Item(record.t_ns, READER, 0, record, encode(record)))
            elif isinstance(record, Missed):
                merger.miss(record.ring, record.num_frames, record.reason)
            else:
                merger.add(number, sequence, record, encode(record))
        out += merger.take(None)
        if until_ms is not None:
            out += merger.take(START_NS + round(until_ms * MS))
        return out

    def play(
        self, *, until_ms: float | None = None, keep: Retention = ALL
    ) -> tuple[Collector, Finals]:
        """Fold all records, and advance to a time.

        Args:
            until_ms: end time in milliseconds; None to end with the last record.
            keep: what the fold retains.
        """
        finals = Finals()
        collector = Collector(finals, keep=keep)
        for item in self.items(until_ms=until_ms):
            collector.fold(item.ring, item.record)
        if until_ms is not None:  # a Tick without steps before it books an idle engine's steps
            collector.fold(READER, Tick(collector.now_ns, collector.now_ns))
        return collector, finals

    def play_in_report_order(self) -> tuple[Collector, Finals]:
        """Fold all records in the order of the test's lines: late records arrive late.

        A Tick follows, by which an idle engine's last step is complete.
        """
        finals = Finals()
        collector = Collector(finals)
        for number, record in self.entries:
            collector.fold(number, record)
        collector.fold(READER, Tick(self.now_ns + ARRIVALS_NS, self.now_ns + ARRIVALS_NS))
        return collector, finals


class Ring:
    """Writer of one ring."""

    def __init__(self, script: Script, number: int, role: str, rank: int) -> None:
        self.script = script
        self.number = number
        self.role = role
        self.rank = rank
        self._next = 0
        self._ids: dict[int, str] = {}
        self._digests: dict[int, int] = {}

    @property
    def now_ns(self) -> int:
        return self.script.now_ns

    def write(self, record: Record) -> None:
        self.script.entries.append((self.number, record))

    # --- itself

    def keyframe(
        self,
        *,
        state: int = ON,
        ranks: int = 1,
        dp_rank: int = 0,
        stage: int = 0,
        listed: bool = True,
        paused_ms: float | None = None,
    ) -> None:
        """Write a keyframe: identity, start of a pause, and all requests in flight."""
        paused_ns = None if paused_ms is None else START_NS + round(paused_ms * MS)
        self.write(Keyframe(self.now_ns, state, -1, paused_ns))
        own = (self.rank % ranks, stage, dp_rank, 0)
        info = EngineInfo(self.now_ns, "made-up", ranks=own, sizes=(ranks, 1, 1, 1), device="gpu")
        self.write(info)
        self.live(sorted(self._ids) if listed else [])
        self.write(Clock(self.now_ns, self.now_ns))

    def live(self, indices: Sequence[int], *, state: int = RUNNING) -> None:
        n = len(indices)
        self.write(
            Live(
                self.now_ns,
                array("I", indices).tobytes(),
                bytes([state] * n),
                array("I", [8] * n).tobytes(),
                array("I", [0] * n).tobytes(),
                array("q", [START_NS] * n).tobytes(),
                tuple(self._ids[index] for index in indices),
            )
        )

    def health(self, *, state: int = ON, through_ns: int | None = None) -> None:
        through_ns = self.now_ns if through_ns is None else through_ns
        self.write(ProbeHealth(self.now_ns, state, 0, 0, 0, through_ns))

    def forget(self, index: int) -> None:
        self._ids.pop(index, None)

    # --- requests

    def enter(
        self, kind: int, request_id: str, *, at_ms: float | None = None, **more: object
    ) -> int:
        index = self._next
        self._next += 1
        self._ids[index] = request_id
        at_ns = self.now_ns if at_ms is None else START_NS + round(at_ms * MS)
        self.write(RequestEvent(self.now_ns, index, kind, at_ns, request_id, **more))  # type: ignore[arg-type]
        return index

    def received(self, request_id: str, **more: object) -> int:
        return self.enter(RECEIVED, request_id, **more)  # type: ignore[arg-type]

    def queued(self, request_id: str, **more: object) -> int:
        return self.enter(QUEUED, request_id, prompt_tokens=8, **more)  # type: ignore[arg-type]

    def event(self, index: int, kind: int, **more: object) -> None:
        self.write(RequestEvent(self.now_ns, index, kind, self.now_ns, **more))  # type: ignore[arg-type]

    def tokenised(self, index: int) -> None:
        self.event(index, TOKENISED, prompt_tokens=8)

    def admitted(self, index: int) -> None:
        self.event(index, ADMITTED, cached_tokens=0)

    def preempted(self, index: int) -> None:
        self.event(index, PREEMPTED, reason="blocks")

    def resumed(self, index: int) -> None:
        self.event(index, RESUMED, cached_tokens=0)

    def transferred(self, index: int, start_ms: float, end_ms: float, *peer: str) -> None:
        start, end = (START_NS + round(ms * MS) for ms in (start_ms, end_ms))
        self.write(Transfer(self.now_ns, index, 4096, start, end, *peer))

    def finished(self, index: int, reason: str = "stop") -> None:
        self.forget(index)
        self.event(index, FINISHED, reason=reason)

    def last_byte(self, index: int) -> None:
        self.forget(index)
        self.event(index, LAST_BYTE)

    def emitted(
        self,
        indices: Sequence[int],
        tokens: Sequence[int] | None = None,
        *,
        step: int = -1,
        at_ns: int | None = None,
        blocked_ms: Sequence[float] = (),
    ) -> None:
        tokens = [1] * len(indices) if tokens is None else tokens
        columns = array("I", indices).tobytes(), array("I", tokens).tobytes()
        blocked_ns = array("q", [round(ms * MS) for ms in blocked_ms]).tobytes()
        self.write(Emitted(self.now_ns, *columns, step, at_ns, blocked_ns))

    # --- steps

    def plan(self, step: int) -> None:
        self.write(StepPlan(self.now_ns, step, self.now_ns, self.now_ns, 0, 1, 1, 0, 10))

    def slices(self, step: int, rows: Sequence[tuple[int, int, int]]) -> int:
        """Write a step's rows (request, tokens, context); one token with context is a decode."""
        indices = array("I", [row[0] for row in rows]).tobytes()
        tokens = array("I", [row[1] for row in rows]).tobytes()
        digest = digest64(indices, tokens)
        self.write(
            StepSlices(
                self.now_ns,
                step,
                digest,
                indices,
                bytes([DECODE if n == 1 and context else PREFILL for _, n, context in rows]),
                tokens,
                array("I", [row[2] for row in rows]).tobytes(),
                b"",
                array("H", [1] * len(rows)).tobytes(),
            )
        )
        return digest

    def span(self, step: int, start_ms: float, end_ms: float, **more: object) -> None:
        start, end = (START_NS + round(ms * MS) for ms in (start_ms, end_ms))
        record = StepSpan(self.now_ns, step, 0, start, start + 1, end)
        if more:
            from msgspec.structs import replace

            record = replace(record, **more)
        self.write(record)

    def step(
        self, step: int, rows: Sequence[tuple[int, int, int]], *, start_ms: float, end_ms: float
    ) -> None:
        """Plan, run and report a whole step, and emit a token of each request."""
        self.script.at(start_ms)
        self.plan(step)
        self.script.at(end_ms)
        self.span(step, start_ms, end_ms)
        self.slices(step, rows)
        self.emitted([row[0] for row in rows], step=step)


def assert_parts_close(final: FinalRequest) -> None:
    """Check the parts of a prompt, if it has any, against their whole."""
    if not final.parts:
        return
    assert sum(part.compute_ns for part in final.parts) == final.prefill_ns
    assert sum(part.tokens for part in final.parts) == final.prompt_tokens
    assert min(part.compute_ns for part in final.parts) >= 0
    delays = [part.ttft_ns for part in final.parts if part.ttft_ns is not None]
    assert not delays or sum(delays) == final.ttft_ledger_ns.get("prefill_own", 0)


def assert_all_closes(collector: Collector, finals: Finals) -> None:
    """Check every final number against the laws of the contract."""
    compute: dict[tuple[str, str, bool], int] = {}
    for step in finals.steps:
        parts = step.shares_ns.tolist()
        of = step.unnamed
        unnamed_ns = 0 if of is None else of.prefill_ns + of.decode_ns
        whole_ns = sum(parts) + unnamed_ns + step.padding_ns + step.unattributed_ns
        assert whole_ns == step.measured_ns
        assert min([0, *parts]) == 0
        assert_other_rules_divide_the_same_time(step)
        for request_id, phase, ns in zip(step.request_ids, step.phases, parts, strict=True):
            key = (step.engine_id, request_id, bool(phase == PREFILL))
            compute[key] = compute.get(key, 0) + ns
    names = [(final.engine_id, final.request_id) for final in finals.requests]
    for final in finals.requests:
        assert min([0, *final.ledger_ns.values()]) == 0
        assert min([0, *final.ttft_ledger_ns.values()]) == 0
        for cause, ns in final.ttft_ledger_ns.items():
            assert ns <= final.ledger_ns[cause]
        assert final.output_tokens == sum(final.tokens_per_event)
        assert len(final.tokens_per_event) == len(final.token_times_ns)
        assert len(final.preempted_ns) == final.num_preemptions
        blamed = Counter[str]()
        for cause, request_id, ns in final.blame:
            assert ns > 0
            assert request_id != final.request_id
            blamed[cause] += ns
        rows = {cause: ns for cause, ns in final.ledger_ns.items() if cause in BLAMED}
        assert blamed == rows
        if final.joined_late or final.ledger_missing:
            continue
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns, final
        if final.first_token_ns is not None:
            ttft_ns = final.first_token_ns - final.arrived_ns
            assert sum(final.ttft_ledger_ns.values()) == ttft_ns, final
        for metric in METRICS:
            took = None if final.ledger_missing else breakdown(final, metric)
            if took is not None:
                assert min([0, *took.by_cause.values()]) == 0
                assert sum(took.by_cause.values()) == took.whole_ns, (metric, final)
        assert_parts_close(final)
        if names.count((final.engine_id, final.request_id)) == 1:
            key = (final.engine_id, final.request_id)
            assert final.prefill_ns == compute.get((*key, True), 0)
            assert final.decode_ns == compute.get((*key, False), 0)
    for device in collector.devices():
        assert sum(device.seconds_by_ns.values()) == device.wall_ns
        assert min(device.seconds_by_ns.values()) >= 0


def assert_other_rules_divide_the_same_time(step: FinalStep) -> None:
    """Check the views over a step's components against its shares, long after its split."""
    of = step.components
    if of is None:
        assert not len(step.request_ids)
        assert step.busy_ns == 0 or step.unnamed is not None
        return
    priced, busy_ns = price_steps([of]), np.array([step.busy_ns])
    assert rule_shares_ns("fair", priced, busy_ns).tolist() == step.shares_ns.tolist()
    for rule in RULES:
        divided = rule_shares_ns(rule, priced, busy_ns).tolist()
        assert len(divided) == len(step.request_ids)
        assert sum(divided) == step.busy_ns
        assert min([0, *divided]) == 0
