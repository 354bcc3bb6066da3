"""Independence of results from the fold's window boundaries."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from inferscope.fold.engine import EngineFold
from inferscope.fold.fold import Collector
from inferscope.readers.merge import Item
from tests.fold.scripts import MS, START_NS, Finals, Script, assert_all_closes
from tests.fold.test_properties import _Engine

_BY_THE_FIT = ("saved", "fit_id", "counters")
"""Fields that depend on the current model at the request's end."""


class _Pipelined(_Engine):
    """Engine whose steps begin before their predecessors end; some requests are in both."""

    def _step(self, step: int, start_us: int) -> int:
        end_us = super()._step(step, start_us)
        return start_us + max(1, (end_us - start_us) // self.rng.choice((1, 2, 4)))

    def _write_spans(self, step: int, start_us: int, end_us: int) -> None:
        # Steps end in order, like a queue of launches, and their tokens leave later.
        self._last_end_us = max(end_us, getattr(self, "_last_end_us", 0) + 1)
        self._written_us = max(self._written_us, self._last_end_us)
        super()._write_spans(step, start_us, self._last_end_us)


def folded(items: Sequence[Item], cut: Callable[[], bool]) -> tuple[Collector, Finals]:
    """Fold records, with a window boundary after each that `cut` selects, and at the end."""
    finals = Finals()
    collector = Collector(finals)
    fold_window = EngineFold._fold_window

    def hold(engine: EngineFold, *, is_last: bool = False) -> None:
        """Cut no window."""

    for item in items:
        EngineFold._fold_window = hold  # type: ignore[method-assign]
        try:
            collector.fold(item.ring, item.record)
        finally:
            EngineFold._fold_window = fold_window  # type: ignore[method-assign]
        if cut():
            for engine in collector.engines.values():
                engine._fold_window(is_last=True)
    for engine in collector.engines.values():
        engine._fold_window(is_last=True)
    collector.end()
    return collector, finals


def facts_of(finals: Finals) -> list[dict[str, Any]]:
    """Return all fields of final requests, except those that depend on the current fit."""
    found = []
    for final in finals.requests:
        fields = asdict(final)
        for name in _BY_THE_FIT:
            del fields[name]
        fields["token_times_ns"] = list(final.token_times_ns)
        found.append(fields)
    return sorted(found, key=lambda fields: (fields["engine_id"], fields["request_id"]))


def assert_cuts_do_not_show(items: Sequence[Item], rng: random.Random) -> tuple[Collector, Finals]:
    collector, often = folded(items, lambda: True)
    for cut in (lambda: False, lambda: rng.random() < 0.1, lambda: rng.random() < 0.5):
        _, finals = folded(items, cut)
        assert facts_of(finals) == facts_of(often)
    return collector, often


def stream(rng: random.Random) -> Script:
    """Return the records of an engine that plans its steps, so that none is reported late.

    A step without a plan is known only at its end: requests that ended by then are not in it.
    """
    engine = (_Pipelined if rng.random() < 0.5 else _Engine)(rng)
    engine.has_plans = True
    return engine.run()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
@example(
    245226
)  # cancelled between the plan and the launch of a step, behind one that is held back
def test_results_do_not_depend_on_window_boundaries(seed: int) -> None:
    rng = random.Random(seed)
    script = stream(rng)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=20_000), rng)
    assert_all_closes(collector, finals)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
@example(61)  # a step is cut by a preemption when another of its members is final
@example(1096)  # a member is final when a step begins that it was planned for
def test_results_do_not_depend_on_window_boundaries_if_records_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    script = stream(rng)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(script.entries) // 2, len(script.entries))
        if type(script.entries[at][1]).__name__ in ("StepSpan", "StepSlices", "Emitted"):
            del script.entries[at]
    script.now_ns = START_NS + 15_000 * MS
    script.rings[0].health()
    _, finals = assert_cuts_do_not_show(script.items(until_ms=20_000), rng)
    for final in finals.requests:
        assert min([0, *final.ledger_ns.values(), *final.ttft_ledger_ns.values()]) == 0
        for cause, ns in final.ttft_ledger_ns.items():
            assert ns <= final.ledger_ns[cause]
