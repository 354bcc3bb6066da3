from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from inferscope.adapters.live_table import LiveTable
from inferscope.probe import Probe
from inferscope.probe.requests import MAX_LIVE
from inferscope.records import ProbeHealth
from tests.probe.fakes import FakeClock, make_probe, of


@given(
    calls=st.lists(st.tuples(st.sampled_from(["put", "pop"]), st.integers(0, 9))),
    most=st.integers(1, 5),
)
def test_a_table_holds_the_newest_and_counts_the_others(
    calls: list[tuple[str, int]], most: int
) -> None:
    table: LiveTable[int] = LiveTable(Probe.disabled(), most=most)
    model: list[str] = []
    num_dropped = 0
    for call, number in calls:
        name = str(number)
        if call == "pop":
            table.pop(name, None)
            model = [each for each in model if each != name]
            continue
        if name not in model:
            model.append(name)
        table.put(name, number)
        num_dropped += len(model) > most
        model = model[-most:]
        assert list(table) == model
        assert table.num_dropped == num_dropped


def test_a_full_table_refuses_an_entry_until_one_leaves() -> None:
    table: LiveTable[int] = LiveTable(Probe.disabled(), most=1)
    assert table.has_room()
    table.put("a", 1)
    assert not table.has_room()
    assert (list(table), table.num_dropped) == (["a"], 1)
    del table["a"]
    assert table.has_room()


def test_dropping_is_reported_once_and_costs_the_same_however_many_came(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1))
    table: LiveTable[int] = LiveTable(probe)
    for number in range(3 * MAX_LIVE):
        table.put(str(number), number)
    assert (len(table), table.num_dropped) == (MAX_LIVE, 2 * MAX_LIVE)
    path = probe.path
    assert path is not None
    probe.close()
    (feature,) = of(ProbeHealth, path)[-1].unsupported
    assert feature == "more than 65536 live requests: the oldest are not followed"
