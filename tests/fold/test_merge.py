from __future__ import annotations

from inferscope.readers.merge import Merger
from inferscope.records import TICK_NS, Clock, Tick, encode

NOW_NS = 50 * TICK_NS


def test_a_tick_goes_by_when_the_clocks_were_read_not_by_when_that_was_written() -> None:
    merger = Merger()
    clock = Clock(NOW_NS, 7_000_000, host_ns=NOW_NS - 30_000_000)
    merger.add(1, 1, clock, encode(clock))
    ticks = [item.record for item in merger.take(NOW_NS + 2 * TICK_NS)]
    offsets_ns = [tick.real_ns - tick.t_ns for tick in ticks if isinstance(tick, Tick)]
    assert offsets_ns
    assert set(offsets_ns) == {7_000_000 - (NOW_NS - 30_000_000)}


def test_a_clock_that_no_machine_has_is_in_no_tick() -> None:
    merger = Merger()
    for place, clock in enumerate(
        (Clock(NOW_NS, 7_000_000), Clock(NOW_NS, 1 << 62, host_ns=-(1 << 63)))
    ):
        merger.add(1, place, clock, encode(clock))
    ticks = [item.record for item in merger.take(NOW_NS + TICK_NS)]
    offsets_ns = [tick.real_ns - tick.t_ns for tick in ticks if isinstance(tick, Tick)]
    assert offsets_ns
    assert set(offsets_ns) == {7_000_000 - NOW_NS}
