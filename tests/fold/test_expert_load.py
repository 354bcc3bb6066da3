from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.fold.expert_load import ExpertLoads
from inferscope.fold.fold import Collector
from inferscope.fold.snapshots import ExpertsView
from inferscope.fold.view import snapshot
from inferscope.probe.columns import OddValues
from inferscope.probe.expert_load import MOST_EXPERTS, expert_load
from inferscope.records import ExpertLoad, encode
from tests.fold.scripts import Script
from tests.probe.fakes import FakeClock, make_probe, of

EVEN = [[2, 2, 2, 2], [2, 2, 2, 2]]
SKEWED = [[4, 4, 0, 0], [1, 3, 2, 2]]
"""Routing of four tokens to two of four experts, by layer."""


def load(counts: list[list[int]], *, first_layer: int = 0) -> ExpertLoad:
    return expert_load(1, 0, counts, 2, first_layer, OddValues())


def test_loads_add_up_over_steps_and_layers() -> None:
    loads = ExpertLoads()
    for counts in (EVEN, SKEWED, SKEWED):
        assert loads.add(load(counts)) is not None
    assert loads.mean_tokens == sum(map(sum, EVEN + SKEWED + SKEWED)) / 4
    assert loads.busiest_tokens == sum(map(max, EVEN + SKEWED + SKEWED))
    assert loads.imbalance == pytest.approx(18 / 12)
    assert loads.hottest == (0, 0, 1.0)


def test_stages_of_a_pipeline_are_layers_of_one_model() -> None:
    whole, halves = ExpertLoads(), ExpertLoads()
    whole.add(load(SKEWED))
    for first in (1, 0):
        halves.add(load(SKEWED[first : first + 1], first_layer=first))
    assert halves.busiest_tokens == whole.busiest_tokens
    assert (halves.mean_tokens, halves.even_tokens) == (whole.mean_tokens, whole.even_tokens)
    assert halves.hottest == whole.hottest


@pytest.mark.parametrize(
    "damaged",
    [
        ExpertLoad(1, 0, 4, 2, b"odd", b"\1\0\0\0", b"\0\0"),
        ExpertLoad(1, 0, 4, 2, bytes(16), b"\1\0\0\0", b"\7\0"),
        ExpertLoad(1, 0, 4, 9, bytes(16), b"\1\0\0\0", b"\0\0"),
        ExpertLoad(1, 0, 4, 2, bytes(16), b"\1\0\0\0", b""),
        ExpertLoad(1, 0, 4, 2, b"", b"", b""),
        ExpertLoad(1, 0, 4, 2, bytes(16), b"\1\0\0\0", b"\0\0", first_layer=1 << 31),
    ],
)
def test_damaged_record_is_counted_and_changes_nothing(damaged: ExpertLoad) -> None:
    assert ExpertLoads().add(damaged) is None
    script = Script()
    script.ring().write(damaged)
    collector, _ = script.play()
    assert collector.num_unjoined == 1
    assert shown(collector) is None


def test_view_has_the_load_of_a_mixture_only() -> None:
    script = Script()
    ring = script.ring()
    assert shown(script.play()[0]) is None
    ring.write(load(SKEWED))
    experts = shown(script.play()[0])
    assert experts is not None
    assert (experts.num_experts, experts.mean_tokens, experts.busiest_tokens) == (4, 4.0, 7)
    assert experts.mean_tokens < experts.even_tokens < experts.busiest_tokens
    assert (experts.layer, experts.expert, experts.expert_share) == (0, 0, 1.0)


def shown(collector: Collector) -> ExpertsView | None:
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    return view.experts


def test_probe_writes_a_record_of_bounded_size(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    probe.routed(3, SKEWED, per_token=2, first_layer=5)
    probe.routed(4, [[0] * (MOST_EXPERTS + 1)], per_token=2)
    probe.routed(5, [], per_token=2)
    probe.routed(6, [[1, 2], [3]], per_token=2)
    probe.close()
    assert probe.path is not None
    (record,) = of(ExpertLoad, probe.path)
    assert (record.step, record.tokens, record.first_layer) == (3, 4, 5)
    assert record.experts == b"\5\0\0\0\7\0\0\0\2\0\0\0\2\0\0\0"
    assert record.busiest_experts == b"\0\0\1\0"
    whole = [[16] * 128] * 48
    assert len(encode(expert_load(1, 0, whole, 8, 0, OddValues()))) < 1024
