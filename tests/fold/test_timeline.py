from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.recent import Recent
from inferscope.fold.timeline import Timeline


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 30))
def test_facts_are_taken_in_the_order_of_time_and_then_of_arrival(
    times: list[int], before_ns: int
) -> None:
    timeline = Timeline()
    pushed = [(at_ns, number) for number, at_ns in enumerate(times)]
    for at_ns, number in pushed:
        timeline.push(at_ns, print, number)

    def taken(until_ns: int) -> list[tuple[int, int]]:
        return [(at_ns, number) for at_ns, _, (number,) in timeline.take(until_ns)]

    assert taken(before_ns) == sorted(entry for entry in pushed if entry[0] < before_ns)
    assert taken(31) == sorted(entry for entry in pushed if entry[0] >= before_ns)
    assert not list(timeline.waiting())


@given(st.lists(st.integers(0, 40), max_size=100))
def test_the_newest_are_remembered_and_not_many_more(keys: list[int]) -> None:
    recent: Recent[int] = Recent(5)
    for at_ns, key in enumerate(keys):
        recent.note(key, at_ns)
    last = {key: at_ns for at_ns, key in enumerate(keys)}
    newest = sorted(last, key=lambda key: -last[key])
    assert all(recent.at_ns(key) == last[key] for key in newest[:5])
    known = [key for key in last if recent.at_ns(key) >= 0]
    assert len(known) <= 10
    assert all(recent.at_ns(key) == last[key] for key in known)
    assert recent.at_ns(99) == -1


@given(st.lists(st.integers(0, 200), max_size=400), st.integers(1, 300))
def test_the_newest_are_remembered_for_a_time(keys: list[int], for_ns: int) -> None:
    recent: Recent[int] = Recent(150, for_ns=for_ns)
    for at_ns, key in enumerate(keys):
        recent.note(key, at_ns)
    last = {key: at_ns for at_ns, key in enumerate(keys)}
    newest = sorted(last, key=lambda key: -last[key])[:150]
    young = [key for key in newest if last[key] >= len(keys) - 1 - for_ns]
    assert all(recent.at_ns(key) == last[key] for key in young)
    known = [key for key in last if recent.at_ns(key) >= 0]
    assert all(recent.at_ns(key) == last[key] for key in known)
    assert len(known) <= max(64, min(187, for_ns + 1 + (for_ns + 1) // 4))
