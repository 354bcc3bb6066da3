"""Laws that hold for any engine behaviour and any order of records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.fold.fold import Collector
from inferscope.fold.view import snapshot
from tests.fold.scripts import (
    MS,
    START_NS,
    Ring,
    Script,
    assert_all_closes,
    assert_parts_close,
)

US = 1_000
_NEVER = 10**9


@dataclass
class _Life:
    """Request in the simulated engine; times in microseconds since the start."""

    index: int
    arrives: int
    prompt: int
    max_tokens: int
    ends: int = _NEVER
    """Time at which it is aborted, or has ended."""
    leaves: int = _NEVER
    """Time at which its client disconnects."""
    computed: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    tokens: int = 0
    state: str = "waiting"
    recorded_until_us: int = 0


class _Engine:
    """Simulation of an engine: chunks, preemptions, aborts, overlap, ranks, a front end."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.script = Script()
        self.core = self.script.ring()
        self.front = self.script.ring("frontend") if rng.random() < 0.6 else None
        self.workers: list[Ring] = []
        if rng.random() < 0.3:
            self.workers = [self.script.ring("worker", rank, ranks=2) for rank in range(2)]
        self._written_us = 0
        self.late_us = [rng.randrange(300) for _ in range(2)]
        self.early_us = rng.randrange(500)
        self.has_overlap = rng.random() < 0.5
        self.has_plans = rng.random() < 0.8
        self.has_numbers = rng.random() < 0.7
        """Whether emissions name their steps."""
        self.has_slices_first = rng.random() < 0.4
        """Whether a step's slices are written as it starts, not with its results."""
        self._todo: list[tuple[int, int, Callable[[], None]]] = []
        arrivals = sorted(rng.randrange(40_000) for _ in range(rng.randint(1, 7)))
        self.lives = [
            _Life(at, arrives, rng.randint(1, 20), rng.randint(1, 6))
            for at, arrives in enumerate(arrivals)
        ]

    def later(self, at_us: int, write: Callable[[], None]) -> None:
        self._todo.append((at_us, len(self._todo), write))

    def run(self) -> Script:
        rng = self.rng
        for life in self.lives:
            self._arrive(life)
        now_us, num_steps = 0, rng.randint(0, 25)
        for step in range(num_steps):
            now_us = self._step(step, now_us + rng.choice([0, 1, 300, 5_000]))
        for life in self.lives:
            if life.ends == _NEVER:
                self._end(
                    life, max(now_us, life.arrives, life.recorded_until_us) + 10, "server_abort"
                )
        for at_us, _, write in sorted(self._todo, key=lambda entry: entry[:2]):
            self.script.now_ns = START_NS + at_us * US
            write()
        return self.script

    def _arrive(self, life: _Life) -> None:
        rng, core, front = self.rng, self.core, self.front
        name, at_us = f"r{life.index}", life.arrives
        if rng.random() < 0.5:
            kinds = rng.sample(["system", "retrieved", "history", "user"], k=rng.randint(1, 4))
            life.parts = tuple((kind, rng.randint(1, 6)) for kind in kinds)
        labels = {} if front is not None and rng.random() < 0.7 else {"prompt_parts": life.parts}
        if front is not None:
            written_us = max(0, at_us - self.early_us)
            self.later(written_us, lambda: _skip(front.received(name, prompt_parts=life.parts)))
            if rng.random() < 0.3:
                life.leaves = at_us + rng.randrange(60_000)
        self.later(at_us, lambda: _skip(core.queued(name, **labels)))
        if rng.random() < 0.25:
            self._end(life, at_us + rng.randrange(1, 50_000), "client_cancel")

    def _end(self, life: _Life, at_us: int, reason: str) -> None:
        core, front, index = self.core, self.front, life.index
        life.ends = at_us
        self.later(at_us, lambda: core.finished(index, reason))
        if front is not None:
            last_us = min(life.leaves, at_us + self.rng.randrange(1, 2_000))
            last_us = max(last_us, life.arrives)
            self.later(last_us, lambda: front.last_byte(index))

    def _step(self, step: int, start_us: int) -> int:
        rng, core = self.rng, self.core
        there = [x for x in self.lives if x.arrives < start_us < x.ends]
        for life in there:
            if life.state == "running" and rng.random() < 0.1:
                life.state, life.computed = "held", 0
                self.later(start_us, lambda index=life.index: core.preempted(index))
        members = [x for x in there if rng.random() < 0.7 and x.tokens < x.max_tokens]
        end_us = start_us + rng.randrange(1, 9_000)
        if not members:
            return end_us
        rows, emitting = [], []
        for life in members:
            if life.state != "running":
                write = core.admitted if life.state == "waiting" else core.resumed
                self.later(start_us, lambda write=write, index=life.index: write(index))
                life.state = "running"
            missing = life.prompt + life.tokens - life.computed
            chunk = min(missing, rng.randint(1, 8)) if missing > 1 else 1
            rows.append((life.index, chunk, life.computed))
            life.computed += chunk
            if life.computed >= life.prompt + life.tokens:
                emitting.append(life)
        if self.has_plans:
            self.later(start_us, lambda: core.plan(step))
        self._write_spans(step, start_us, end_us)
        late_us = rng.choice([4_000, 20_000])
        written_us = end_us + (rng.randrange(late_us) if self.has_overlap else 1)
        written_us = self._written_us = max(self._written_us, written_us)  # in the order of steps
        sliced_us = start_us if self.has_slices_first else written_us
        self.later(sliced_us, lambda: _skip(core.slices(step, rows)))
        number = step if self.has_numbers else -1
        self._emit(number, [x for x in emitting if x.ends > written_us], written_us)
        return end_us if self.has_overlap else written_us

    def _write_spans(self, step: int, start_us: int, end_us: int) -> None:
        tellers = self.workers or [self.core]
        for origin in tellers:
            late_us = self.late_us[origin.rank] if self.workers else 0
            first, last = (start_us + late_us) / 1e3, (end_us + late_us) / 1e3
            self.later(
                end_us + late_us,
                lambda origin=origin, first=first, last=last: origin.span(step, first, last),
            )

    def _emit(self, step: int, lives: list[_Life], at_us: int) -> None:
        if not lives:
            return
        counts = [self.rng.choice([1, 1, 1, 3]) for _ in lives]
        indices = [life.index for life in lives]
        self.later(at_us, lambda: self.core.emitted(indices, counts, step=step))
        edge_us = at_us + self.rng.randrange(1, 300)
        for life, count in zip(lives, counts, strict=True):
            life.tokens += 1
            life.computed = max(life.computed, life.prompt + life.tokens - 1)
            life.recorded_until_us = edge_us
            front, index = self.front, life.index
            if front is not None and edge_us < min(life.leaves, life.ends):
                blocked = [self.rng.uniform(0, 30)] if self.rng.random() < 0.3 else []
                self.later(edge_us, partial(front.emitted, [index], [count], blocked_ms=blocked))
                if blocked:
                    more = [self.rng.uniform(0, 9)]
                    report = partial(front.emitted, [index], [0], blocked_ms=more)
                    self.later(edge_us + self.rng.randrange(500), report)
            if life.tokens >= life.max_tokens and life.ends == _NEVER:
                self._end(life, edge_us + 1, "length")


def _skip(_: object) -> None:
    pass


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_every_ledger_closes_and_every_nanosecond_is_conserved(seed: int) -> None:
    engine = _Engine(random.Random(seed))
    collector, finals = engine.run().play(until_ms=20_000)
    assert sorted(final.request_id for final in finals.requests) == sorted(
        f"r{life.index}" for life in engine.lives
    )
    assert collector.num_unjoined == 0
    assert not any(final.joined_late for final in finals.requests)
    labelled = {f"r{life.index}" for life in engine.lives if life.parts}
    assert {final.request_id for final in finals.requests if final.parts} == labelled
    assert_all_closes(collector, finals)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_snapshots_change_no_fold_and_ended_requests_leave_no_state(
    seed: int, look_again: int
) -> None:
    script = _Engine(random.Random(seed)).run()
    folded, _ = script.play(until_ms=20_000)
    unseen, seen = Collector(), Collector()
    for number, item in enumerate(script.items(until_ms=20_000)):
        unseen.fold(item.ring, item.record)
        seen.fold(item.ring, item.record)
        if number % look_again == 0:
            for engine in seen.engines.values():
                for request in engine.lives.table.alive():
                    snapshot(seen, window_ns=10**10, mode="live", focus=request.request_id)
                    engine.lives.parts_of(request)
    assert unseen.digest() == seen.digest() == folded.digest()
    ledger = unseen.engines["engine"].lives.table.ledger
    assert not ledger._blocks
    assert not ledger.replicas._assumed
    for replica in ledger.replicas.by_rank.values():
        blame, holds = replica.blame, replica.blame._holds
        for kept in (blame._held, blame._found, holds._waiting, holds._running):
            assert not kept
        assert not holds._marks._kept
        assert not any(pairs is not None and pairs.any() for pairs in blame._pairs)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_laws_hold_for_records_that_come_late_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    script = _Engine(rng).run()
    records = script.entries
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(records) // 2, len(records))
        entry = records.pop(at)
        if rng.random() < 0.5:
            records.insert(min(len(records), at + rng.randrange(30)), entry)
    script.now_ns = START_NS + 30_000 * MS
    script.rings[0].health()
    collector, finals = script.play_in_report_order()
    for step in finals.steps:
        parts = step.shares_ns.tolist()
        assert sum(parts) + step.padding_ns + step.unattributed_ns == step.measured_ns
    for final in finals.requests:
        if final.ledger_missing:  # the only span of all was lost
            assert not final.ledger_ns
            continue
        assert min([0, *final.ledger_ns.values()]) == 0
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert_parts_close(final)
        assert min([0, *final.ttft_ledger_ns.values()]) == 0
        if final.ttft_ledger_ns and final.first_token_ns is not None:
            ttft_ns = final.first_token_ns - final.arrived_ns
            assert sum(final.ttft_ledger_ns.values()) == ttft_ns
    for device in collector.devices():
        assert sum(device.seconds_by_ns.values()) == device.wall_ns
        assert min(device.seconds_by_ns.values()) >= 0
