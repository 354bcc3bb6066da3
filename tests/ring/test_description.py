"""Laws of the description of an engine in its ring, whenever its process ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.records import EngineInfo, Keyframe, encode
from inferscope.ring import layout
from inferscope.ring.description import description_of_rings
from inferscope.ring.writer import RingWriter
from tests.probe.fakes import make_ring


def begin_keyframe(ring: RingWriter, t_ns: int) -> None:
    ring.write(
        Keyframe.CODE,
        encode(Keyframe(t_ns, 0, ring.last_keyframe)),
        flags=layout.STARTS_KEYFRAME,
    )


def describe(ring: RingWriter, t_ns: int, model: str) -> None:
    ring.write(EngineInfo.CODE, encode(EngineInfo(t_ns, "made-up", model=model)))


@pytest.mark.parametrize("is_published", [True, False])
def test_an_engine_is_described_by_its_last_keyframe(tmp_path: Path, is_published: bool) -> None:
    ring = make_ring(tmp_path)
    for t_ns, model in ((1, "first"), (2, "second")):
        begin_keyframe(ring, t_ns)
        describe(ring, t_ns, model)
    if is_published:  # the header is up to 50 ms behind the frames otherwise
        ring.beat(3)
    found = description_of_rings([ring.path])
    assert found is not None
    assert found.model == "second"


def test_an_engine_that_ended_inside_a_keyframe_is_described_by_the_one_before(
    tmp_path: Path,
) -> None:
    ring = make_ring(tmp_path)
    begin_keyframe(ring, 1)
    describe(ring, 1, "first")
    begin_keyframe(ring, 2)
    found = description_of_rings([ring.path])
    assert found is not None
    assert found.model == "first"


def test_a_ring_without_a_description_has_none(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    assert description_of_rings([ring.path]) is None
    begin_keyframe(ring, 1)
    assert description_of_rings([ring.path]) is None
