"""Requests that never end take bounded memory, and those beyond the bound are counted."""

from __future__ import annotations

from inferscope.fold.fold import READER, Collector
from inferscope.fold.retention import Retention
from inferscope.records import Tick
from tests.fold.scripts import Finals, Ring, Script


def played(script: Script, *, until_ms: float, most: int) -> tuple[Collector, Finals]:
    finals = Finals()
    collector = Collector(finals, keep=Retention(in_flight=most))
    for item in script.items(until_ms=until_ms):
        collector.fold(item.ring, item.record)
    collector.fold(READER, Tick(collector.now_ns, collector.now_ns))
    return collector, finals


def finish(core: Ring, index: int, step: int, at_ms: float) -> None:
    """Serve a request of one token from a time on."""
    core.script.at(at_ms)
    core.admitted(index)
    core.step(step, [(index, 8, 0)], start_ms=at_ms + 1, end_ms=at_ms + 2)
    core.script.at(at_ms + 3)
    core.finished(index)


def test_requests_beyond_the_bound_are_counted_and_make_way_as_others_end() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    queued = [core.queued(f"request-{number}") for number in range(10)]
    for number in range(10):
        front.received(f"request-{number}")  # those that are followed are known by two rings
    finish(core, queued[0], 0, 10)
    finish(core, queued[9], 1, 20)  # refused: its step, tokens and end are not counted
    script.at(30)
    core.queued("later")
    front.received("too many")
    collector, finals = played(script, until_ms=2000, most=3)
    (engine,) = collector.engines.values()
    table = engine.lives.table
    assert len(table.by_id) == 3
    assert table.num_refused == 7 + 7 + 1 + 1
    assert not finals.requests


def test_a_request_that_ends_leaves_its_room_to_the_next() -> None:
    script = Script()
    core = script.ring()
    for number in range(8):
        script.at(1000 * number)
        finish(core, core.queued(f"request-{number}"), number, 1000 * number + 1)
    collector, finals = played(script, until_ms=9000, most=3)
    (engine,) = collector.engines.values()
    assert engine.lives.table.num_refused == 0
    assert len(finals.requests) == 8
