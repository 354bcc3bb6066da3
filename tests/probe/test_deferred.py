"""Facts that are recorded later: each once, in their order, and before they are overdue."""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.probe.deferred import OVERDUE_NS, Deferred
from inferscope.records import Emitted, ProbeHealth
from tests.probe.fakes import FakeClock, make_probe, of


def test_facts_are_recorded_in_order_and_the_probe_states_since_when(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    deferred, index = Deferred(probe), probe.queued("r", prompt_tokens=1)
    path = probe.path
    assert path is not None
    for at_ns in (clock.now_ns, clock.now_ns + 1):
        deferred.add(at_ns, lambda at_ns: probe.emitted([index], [1], at_ns=at_ns), at_ns)
    assert (len(deferred.facts), probe._spans.deferred_ns, of(Emitted, path)) == (
        2,
        clock.now_ns,
        [],
    )
    clock.now_ns += 2
    deferred.flush()
    assert [one.left_ns for one in of(Emitted, path)] == [clock.now_ns - 2, clock.now_ns - 1]
    assert (len(deferred.facts), probe._spans.deferred_ns) == (0, 0)
    probe.close()


def test_reports_are_complete_up_to_the_oldest_fact(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    path = probe.path
    assert path is not None
    since_ns = clock.now_ns
    deferred = Deferred(probe)
    deferred.add(since_ns, int)
    clock.now_ns += 7
    probe._life.report(clock.now_ns)
    deferred.flush()
    probe._life.report(clock.now_ns)
    assert [one.complete_through_ns for one in of(ProbeHealth, path)[-2:]] == [
        since_ns, clock.now_ns
    ]  # fmt: skip
    probe.close()


def test_what_is_recorded_behind_a_launch_is_counted_as_hidden(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    probe = make_probe(tmp_path, clock)
    deferred, index = Deferred(probe), probe.queued("r", prompt_tokens=1)
    assert probe.path is not None
    costs_ns = []
    for flush in (deferred.flush_hidden, deferred.flush):
        for _ in range(3):
            deferred.add(clock.now_ns, lambda: probe.emitted([index], [1], at_ns=clock.now_ns))
        cost_ns = probe._log.cost_ns
        flush()
        costs_ns.append(probe._log.cost_ns - cost_ns)
    probe._life.report(clock.now_ns)
    health = of(ProbeHealth, probe.path)[-1]
    assert min(costs_ns) > 0
    assert health.hidden_ns == costs_ns[0]
    assert health.cost_ns >= sum(costs_ns)
    probe.close()


def test_overdue_facts_are_recorded_by_the_probes_own_thread(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    deferred, done = Deferred(probe), []
    probe.look_after(deferred.flush_overdue)
    deferred.add(clock.now_ns, done.append, "fact")
    for waits_ns, expected in ((0, []), (OVERDUE_NS, []), (1, ["fact"]), (OVERDUE_NS, ["fact"])):
        clock.now_ns += waits_ns
        probe._keeper.tend()
        assert done == expected
    probe.close()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(flushes=st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_each_fact_is_recorded_once_by_any_flush(flushes: list[int], tmp_path: Path) -> None:
    for old in tmp_path.glob("*.ring"):
        old.unlink()
    probe = make_probe(tmp_path, FakeClock())
    deferred, done = Deferred(probe), []
    has_ended = threading.Event()

    def aside() -> None:
        while not has_ended.is_set():
            deferred.flush_overdue(1 << 62)

    other = threading.Thread(target=aside)
    other.start()
    number = 0
    for num in flushes:
        for _ in range(num):
            deferred.add(1, done.append, number)
            number += 1
        deferred.flush()
        assert done == list(range(number))
    has_ended.set()
    other.join()
    probe.close()
