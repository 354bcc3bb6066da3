"""The size of a page: its series, and its labels."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_prometheus import PrometheusExporter
from inferscope_prometheus.bounded import bounded
from inferscope_prometheus.metric import family_of
from inferscope_prometheus.page import MOST_LABEL, page

from inferscope.errors import BadInput
from tests.daemon.running import Scrape
from tests.exporters.otlp.conftest import Finals


def num_series(scrape: Scrape) -> int:
    return sum(len(family.samples) for family in scrape.families.values())


@pytest.mark.thorough
def test_a_page_leaves_out_the_newest_engines_as_a_whole(finals: Finals) -> None:
    assert finals.view is not None
    (view,) = finals.view.engines
    exporter = PrometheusExporter({"port": 0, "max_series": 1500})
    exporter.open()
    try:
        pages = []
        for num in (1, 8):
            views = tuple(replace(view, engine_id=f"e{number}") for number in range(num))
            exporter.on_snapshot(replace(finals.view, engines=views))
            pages.append(Scrape(exporter._published.render(False).decode()))
    finally:
        exporter.close()
    alone, crowded = pages
    assert alone.one("inferscope_series_left_out") == 0
    num_each = num_series(alone) - 1
    assert 1500 - num_each < num_series(crowded) <= 1501
    whole = 1500 // num_each
    shown = [labels["engine_id"] for labels, _ in crowded.all("inferscope_engine_info")]
    assert shown == [f"e{number}" for number in range(whole)]
    assert crowded.one("inferscope_series_left_out") == (8 - whole) * num_each


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12), st.integers(1, 200))
def test_no_page_has_more_series_than_it_may_nor_a_guest_more_than_half(
    engines: list[tuple[int, int]], most: int
) -> None:
    order = [f"e{number}" for number in range(len(engines))]
    guests = {name: uid for name, (uid, _) in zip(order, engines, strict=True) if uid}
    rows = [
        (("m", "k", name, str(at), "both"), 1.0)
        for name, (_, num) in zip(order, engines, strict=True)
        for at in range(num)
    ]
    *kept, left_out = bounded(
        [family_of("requests_running", rows)], order=order, guests=guests, most=most
    )
    shown = [sample.labels["engine_id"] for family in kept for sample in family.samples]
    assert len(shown) <= most
    assert len(shown) + left_out.samples[0].value == len(rows)
    sizes = {name: num for name, (_, num) in zip(order, engines, strict=True)}
    assert all(len(list(group)) == sizes[name] for name, group in groupby(sorted(shown)))
    for uid in set(guests.values()):
        assert 2 * sum(guests.get(name) == uid for name in shown) <= most


def test_long_values_of_labels_are_cut_and_stay_apart() -> None:
    names = ["x" * 5000 + end for end in ("a", "b")]
    rows = [(("m", "k", name, "0", "both"), 1.0) for name in names]
    family = family_of("requests_running", rows)
    samples = (
        Scrape(page([family], is_open=False).decode())
        .families["inferscope_requests_running"]
        .samples
    )
    values = [sample.labels["engine_id"] for sample in samples]
    assert [len(value) for value in values] == [MOST_LABEL] * 2
    assert values[0] != values[1]


@pytest.mark.parametrize("value", [0, 999, 2.5, True, "many", 10**9])
def test_a_maximum_that_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(BadInput, match="max_series"):
        PrometheusExporter({"max_series": value})
