"""Requests judged by the real fold's word: deadlines, ends, causes, and each only once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.fold import Collector
from inferscope.fold.slo_sink import Judging
from inferscope.records import FAILED, OFF, OVER_BUDGET
from inferscope.slo import Objective, Objectives
from inferscope.slo.judge import MOST_WARM_UP, Judge
from tests.fold.scripts import MS, START_NS, Finals, Ring, Script

TTFT = Objective("ttft", "ttft", 1_000_000_000, 0.99, 86400 * 10**9)
E2E = Objective("e2e", "e2e", 4_000_000_000, 0.99, 86400 * 10**9)
AVAILABLE = Objective("availability", "availability", None, 0.99, 86400 * 10**9)
GOODPUT = Objective("goodput", "goodput", None, 0.99, 86400 * 10**9)
ALL = (TTFT, AVAILABLE, GOODPUT)

Verdicts = list[tuple[str, str]]


class Telling:
    """Writes down what is decided, in order."""

    def __init__(self) -> None:
        self.counted: Verdicts = []

    def decided(self, objective: Objective, is_good: bool) -> None:
        self.counted.append((objective.name, "good" if is_good else "bad"))

    def warmed_up(self, objective: Objective) -> None:
        self.counted.append((objective.name, "warm-up"))

    def explained(self, objective: Objective, cause: str | None) -> None:
        self.counted.append((objective.name, f"for {cause}"))


def judged(
    script: Script,
    *,
    until_ms: float,
    objectives: Sequence[Objective] = ALL,
    from_ms: float = 0,
    to_ms: float | None = None,
) -> tuple[Verdicts, Collector, Finals]:
    """Fold a script under objectives; count what is decided in a part of it.

    All records are folded once time has reached `until_ms`.
    """
    recorder, finals = Telling(), Finals()
    judge = Judge(Objectives(tuple(objectives)), recorder)
    judge.counts_from_ns = START_NS + round(from_ms * MS)
    judging = Judging(lambda _: judge, finals)
    collector = Collector(judging)
    judging.watch(collector)
    for item in script.items(until_ms=until_ms):
        if to_ms is not None and item.t_ns > START_NS + to_ms * MS:
            break
        collector.fold(item.ring, item.record)
        judging.on_record(item.ring, item.record)
    return recorder.counted, collector, finals


def warm(script: Script) -> Ring:
    """Return an engine that has answered: its next requests are not of its warm-up."""
    core = script.ring()
    mine = core.queued("warm")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=5)
    script.at(6)
    core.finished(mine)
    script.at(10)
    return core


def hang(core: Ring, *, from_ms: float, until_ms: float, step_ms: float | None = None) -> None:
    """Keep an engine's process alive while its current step, if any, does not end."""
    at_ms = from_ms
    while at_ms <= until_ms:
        core.script.at(at_ms)
        core.health(through_ns=None if step_ms is None else START_NS + round(step_ms * MS))
        at_ms += 400


@pytest.mark.parametrize("has_front_end", [False, True])
def test_what_is_shed_is_bad_and_what_the_client_got_wrong_is_not_counted(
    has_front_end: bool,
) -> None:
    script = Script()
    core = warm(script)
    front = script.ring("frontend") if has_front_end else None
    for number, finish in enumerate(("shed", "rejected")):
        asked = None if front is None else front.received(f"r{number}")
        core.finished(core.queued(f"r{number}"), finish)
        if front is not None and asked is not None:
            front.finished(asked, finish)
            front.last_byte(asked)
    verdicts, _, finals = judged(script, until_ms=1000)
    assert [final.finish for final in finals.requests] == ["stop", "shed", "rejected"]
    bad = [("availability", "bad"), ("goodput", "bad")]
    assert verdicts == [*WARMED, *bad, ("availability", "for shed"), ("goodput", "for shed")]


WARMED = [("ttft", "warm-up"), ("availability", "good"), ("goodput", "warm-up")]


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_hung_engines_deadline_passes_on_the_tick_half_a_second_later(is_admitted: bool) -> None:
    script = Script()
    core = warm(script)
    mine = core.queued("a")
    if is_admitted:
        core.admitted(mine)
        core.plan(1)
    hang(core, from_ms=10, until_ms=3010, step_ms=10 if is_admitted else None)
    before, _, _ = judged(script, until_ms=3010, to_ms=1510)
    verdicts, _, finals = judged(script, until_ms=3010, to_ms=1600)
    assert before == WARMED
    assert verdicts == [*WARMED, ("ttft", "bad"), ("goodput", "bad")]
    assert [final.request_id for final in finals.requests] == ["warm"]


def test_a_hung_engine_is_explained_ten_seconds_later_by_what_is_known_then() -> None:
    script = Script()
    core = warm(script)
    core.queued("a")
    hang(core, from_ms=10, until_ms=14_000)
    verdicts, _, _ = judged(script, until_ms=14_000, to_ms=11_700)
    causes = [what for _, what in verdicts if what.startswith("for ")]
    assert len(causes) == 2
    again, _, _ = judged(script, until_ms=14_000)
    assert again == verdicts


def test_all_in_flight_in_a_killed_engine_are_bad_because_it_was_lost() -> None:
    script = Script()
    core = warm(script)
    decoding = core.queued("a")
    core.queued("b")
    core.admitted(decoding)
    core.step(1, [(decoding, 8, 0)], start_ms=11, end_ms=20)
    verdicts, _, finals = judged(script, until_ms=6000)
    assert [f.finish for f in finals.requests] == ["stop", "engine_lost", "engine_lost"]
    new = verdicts[len(WARMED) :]
    for name in ("availability", "goodput"):
        assert new.count((name, "bad")) == 2
        assert new.count((name, "for engine_lost")) == 2
        assert new.count((name, "good")) == 0
    assert [what for name, what in new if name == "ttft"] == ["bad", "good", "for engine_lost"]


def test_token_in_time_is_good_although_its_record_follows_a_long_step() -> None:
    script = Script()
    core = warm(script)
    mine = core.queued("a")
    core.admitted(mine)
    script.at(100)
    core.plan(1)
    script.at(500)
    core.plan(2)  # the next step begins before the first one's tokens are out
    script.at(900)
    core.span(1, 100, 800)
    core.slices(1, [(mine, 8, 0)])
    core.emitted([mine])
    hang(core, from_ms=901, until_ms=4000, step_ms=500)
    script.at(4001)
    core.span(2, 500, 4000)
    core.slices(2, [(mine, 1, 8)])
    core.emitted([mine])
    core.finished(mine)
    while_hung, _, _ = judged(script, until_ms=5000, to_ms=3900)
    assert while_hung == WARMED
    verdicts, _, _ = judged(script, until_ms=5000)
    assert verdicts[len(WARMED) :] == [
        ("ttft", "good"),
        ("availability", "good"),
        ("goodput", "good"),
    ]


@pytest.mark.parametrize(
    ("at_ms", "expected"),
    [
        (900, []),
        (
            1200,
            [("ttft", "bad"), ("goodput", "bad"), ("ttft", "for it"), ("goodput", "for it")],
        ),
    ],
)
@pytest.mark.parametrize("is_stepping", [True, False])
def test_cancellation_before_the_deadline_is_not_counted_and_after_it_is_bad(
    at_ms: int, expected: Verdicts, is_stepping: bool
) -> None:
    script = Script()
    core = warm(script)
    mine = core.queued("a")
    if is_stepping:
        core.plan(1)
    script.at(at_ms)
    core.finished(mine, "client_cancel")
    hang(core, from_ms=at_ms + 1, until_ms=3000, step_ms=10 if is_stepping else None)
    script.at(3001)
    core.health()
    verdicts, _, _ = judged(script, until_ms=8000)
    names = [(name, "for it" if what.startswith("for ") else what) for name, what in verdicts]
    assert names[len(WARMED) :] == expected


def test_an_engine_that_never_answers_is_bad_beyond_its_warm_up() -> None:
    script = Script()
    core = script.ring()
    for number in range(MOST_WARM_UP + 7):
        core.queued(f"r{number}")
    hang(core, from_ms=10, until_ms=3000)
    verdicts, _, _ = judged(script, until_ms=3000, objectives=[TTFT])
    assert verdicts.count(("ttft", "warm-up")) == MOST_WARM_UP
    assert verdicts.count(("ttft", "bad")) == 7


def test_an_answer_that_never_ends_is_bad_for_e2e() -> None:
    script = Script()
    core = warm(script)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(1, [(mine, 8, 0)], start_ms=11, end_ms=20)
    script.at(20.5)
    core.plan(2)
    hang(core, from_ms=21, until_ms=6000, step_ms=20)
    verdicts, _, _ = judged(script, until_ms=6000, objectives=[TTFT, E2E, GOODPUT])
    assert verdicts[3:] == [("e2e", "bad"), ("goodput", "bad")]


@pytest.mark.parametrize("state", [FAILED, OVER_BUDGET, OFF])
def test_ending_probe_makes_no_request_bad(state: int) -> None:
    script = Script()
    core = warm(script)
    core.queued("a")
    script.at(400)
    core.health(state=state)
    verdicts, _, _ = judged(script, until_ms=20_000)
    assert verdicts == WARMED


BUSY_OBJECTIVES = (TTFT, E2E, AVAILABLE, GOODPUT)


def busy() -> Script:
    """Return an engine that answers, is left, hangs, goes on and is killed."""
    script = Script()
    core = warm(script)
    step = 1
    for number in range(8):
        mine = core.queued(f"r{number}")
        if number % 4 == 3:
            script.at(10 + 700 * number + 300)
            core.finished(mine, "client_cancel")
            continue
        core.admitted(mine)
        start_ms = 10 + 700 * number
        core.step(step, [(mine, 8, 0)], start_ms=start_ms, end_ms=start_ms + 200)
        core.step(step + 1, [(mine, 1, 8)], start_ms=start_ms + 201, end_ms=start_ms + 400)
        step += 2
        if number % 4 != 2:
            core.finished(mine, "stop" if number % 4 else "error")
    late = [core.queued("late-1"), core.queued("late-2")]
    hang(core, from_ms=5700, until_ms=9000)
    core.admitted(late[0])
    core.step(step, [(late[0], 8, 0)], start_ms=9001, end_ms=9100)
    return script


def test_a_fold_under_objectives_is_the_same_fold() -> None:
    script = busy()
    _, collector, finals = judged(script, until_ms=25_000)
    plain, plain_finals = script.play(until_ms=25_000)
    assert collector.digest() == plain.digest()
    assert [f.request_id for f in finals.requests] == [f.request_id for f in plain_finals.requests]
    assert all(final.judged is not None for final in finals.requests)


@pytest.fixture(scope="module")
def whole() -> Verdicts:
    """Return what is decided of a busy engine, counted by one judge."""
    return judged(busy(), until_ms=25_000, objectives=BUSY_OBJECTIVES)[0]


@pytest.mark.thorough
@settings(max_examples=40)
@given(one_ms=st.floats(0, 25_000), other_ms=st.floats(0, 25_000))
def test_successor_counts_the_rest_and_nothing_twice(
    whole: Verdicts, one_ms: float, other_ms: float
) -> None:
    script = busy()
    first_ms, second_ms = sorted((one_ms, other_ms))
    parts: Verdicts = []
    for from_ms, to_ms in [(0.0, first_ms), (first_ms, second_ms), (second_ms, None)]:
        parts += judged(
            script, until_ms=25_000, objectives=BUSY_OBJECTIVES, from_ms=from_ms, to_ms=to_ms
        )[0]
    assert parts == whole
    bad = [name for name, what in whole if what == "bad"]
    explained = [name for name, what in whole if what.startswith("for ")]
    assert sorted(bad) == sorted(explained)
    assert len(bad) > 4
