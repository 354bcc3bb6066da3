from __future__ import annotations

import math

import pytest

from inferscope.fold import CountersView, KindSums
from inferscope.insight import (
    Ceiling,
    Load,
    ceilings,
    compute_bound_from,
    load_of,
    point_of,
    speedup,
    total,
)

H200 = Ceiling("spec", 989e12, 4.8e12)
DECODE = KindSums(
    steps=100, wall_ns=610_000_000, device_ns=610_000_000, flops=100 * 31 * 16_000_000_000,
    read_bytes=100 * (16_400_000_000 + 31 * 184_000_000), write_bytes=100 * 31 * 150_000,
    weight_bytes=100 * 16_400_000_000, kv_bytes=100 * 31 * 180_000_000, decode_tokens=3_100,
    requests=3_100,
)  # fmt: skip


def test_the_ridge_is_where_both_ceilings_meet() -> None:
    assert H200.ridge == pytest.approx(206.04, abs=0.01)
    assert H200.attainable(H200.ridge) == pytest.approx(989e12)
    assert H200.attainable(1.0) == 4.8e12
    assert H200.attainable(1e6) == 989e12
    assert Ceiling("spec", None, 4.8e12).ridge is None
    assert Ceiling("spec", None, 4.8e12).attainable(2.0) == 9.6e12
    assert Ceiling("spec", None, None).attainable(2.0) is None


def test_ceilings_are_the_known_ones_with_the_measured_one_first() -> None:
    both = CountersView(
        memory_peaks_bytes_s={"spec": 4.8e12, "measured": 4.0e12},
        compute_peaks_flops_s={"spec": 989e12, "measured": 740e12},
    )
    assert [each.name for each in ceilings(both)] == ["measured", "spec"]
    assert ceilings(CountersView()) == []
    assert ceilings(CountersView(memory_peaks_bytes_s={"spec": 1.0})) == [
        Ceiling("spec", None, 1.0)
    ]


def test_a_point_is_work_over_time_and_unknown_without_either() -> None:
    point = point_of(DECODE)
    assert point is not None
    assert point.flops_s == pytest.approx(DECODE.flops / 0.61)
    assert point.flops_s / point.bytes_s == pytest.approx(point.intensity)
    assert point_of(KindSums()) is None
    assert point_of(KindSums(steps=1, wall_ns=1, device_ns=1, read_bytes=1)) is None
    assert total([DECODE, DECODE]).flops == 2 * DECODE.flops
    assert total([]) == KindSums()


@pytest.mark.parametrize("ridge_share", [0.3, 1.0, 7.0])
def test_at_the_crossing_a_step_has_the_intensity_of_the_ridge(ridge_share: float) -> None:
    load = load_of(DECODE, is_prefill=False)
    assert load is not None
    assert load.units == 31
    ceiling = Ceiling("spec", 50 * ridge_share, 1.0)
    units = compute_bound_from(load, ceiling, weight_bytes=load.weight_bytes)
    assert units is not None
    if math.isinf(units):
        assert load.unit_flops / load.unit_bytes <= ceiling.ridge  # type: ignore[operator]
        return
    moved = load.weight_bytes + units * load.unit_bytes
    assert units * load.unit_flops / moved == pytest.approx(ceiling.ridge)


def test_no_crossing_is_known_without_a_ridge() -> None:
    load = Load(1, 1, 1, 1)
    assert compute_bound_from(load, Ceiling("spec", 1.0, None), weight_bytes=1) is None
    assert speedup(load, Ceiling("spec", 1.0, None), times_units=2, weight_bytes=1) is None


def test_speedups_follow_the_bytes_left_of_the_ridge_and_the_flops_right_of_it() -> None:
    load = load_of(DECODE, is_prefill=False)
    assert load is not None
    weights, kv = load.weight_bytes, 31 * load.unit_bytes
    twice = speedup(load, H200, times_units=2, weight_bytes=weights)
    assert twice == pytest.approx(2 * (weights + kv) / (weights + 2 * kv))
    half = speedup(load, H200, times_weights=0.5, weight_bytes=weights)
    assert half == pytest.approx((weights + kv) / (weights / 2 + kv))
    slow = Ceiling("spec", 1.0, 4.8e12)
    assert speedup(load, slow, times_units=2, weight_bytes=weights) == pytest.approx(1.0)
    assert speedup(load, H200, weight_bytes=weights) == pytest.approx(1.0)


def test_more_requests_that_would_read_more_experts_have_no_speedup() -> None:
    load = load_of(DECODE, is_prefill=False)
    assert load is not None
    assert speedup(load, H200, times_units=2, weight_bytes=2 * load.weight_bytes) is None
    assert speedup(load, H200, times_weights=0.5, weight_bytes=2 * load.weight_bytes) is not None


def test_a_prefill_is_loaded_by_its_tokens() -> None:
    sums = KindSums(
        steps=2, wall_ns=2, device_ns=2, flops=800, read_bytes=600, write_bytes=100,
        weight_bytes=300, prefill_tokens=40, requests=3,
    )  # fmt: skip
    assert load_of(sums, is_prefill=True) == Load(20, 150, 10, 20)
    assert load_of(KindSums(), is_prefill=True) is None
