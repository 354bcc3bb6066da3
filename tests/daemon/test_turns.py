"""A turn over many engines, which may have to end before it has come to all of them."""

from __future__ import annotations

from pathlib import Path

from inferscope.daemon.engines import Engines
from tests.daemon.rings import Ring, Time
from tests.fold.scripts import Finals


def test_a_turn_can_end_between_two_engines_and_the_next_one_folds_the_rest(tmp_path: Path) -> None:
    time = Time()
    rings = [
        Ring(tmp_path, time, engine_id=name, pid=number) for number, name in enumerate("abc", 1)
    ]
    for ring in rings:
        ring.write_all()
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    for ring in rings:
        ring.pass_time(1)
    num_asked = 0

    def is_over() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked == 2

    engines.advance(is_over)
    assert num_asked == 2
    assert engines.through_ns() == 0  # the third one's turn has not come
    assert len(engines.snapshot().engines) == 2
    engines.advance()
    assert engines.through_ns() > 0
    assert len(engines.snapshot().engines) == 3
    engines.close()
    for ring in rings:
        ring.close()
