"""A page has what its families hold, in both formats, as the client library reads them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_prometheus.engine_counters import DurationHistogram, Exemplar
from inferscope_prometheus.page import (
    HistogramFamily,
    compressed,
    page,
    takes_gzip,
    wants_open,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_open,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

BOUNDS = (0.001, 0.1, 2.5)
_TRACE = "0af7651916cd43dd8448eb211c80319c"


def read(families: list[Metric], *, is_open: bool) -> dict[str, Metric]:
    text = page(families, is_open=is_open).decode()
    return {family.name: family for family in (read_open if is_open else read_text)(text)}


def family_of(histogram: DurationHistogram) -> HistogramFamily:
    family = HistogramFamily("x_seconds", "says", labels=("a", "b"), bounds_s=BOUNDS)
    family.add(("one", "two"), histogram, 10**9)
    return family


@pytest.mark.parametrize("is_open", [False, True])
@given(durations=st.lists(st.integers(0, 4 * 10**9), max_size=30))
def test_a_histogram_is_read_as_it_was_counted(is_open: bool, durations: list[int]) -> None:
    histogram = DurationHistogram(BOUNDS)
    histogram.add_all(np.array(durations, dtype=np.int64))
    (family,) = read([family_of(histogram)], is_open=is_open).values()
    assert family.type == "histogram"
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert values["x_seconds_count", None] == len(durations)
    assert values["x_seconds_sum", None] == pytest.approx(sum(durations) / 1e9, abs=1e-12)
    for bound_s in BOUNDS:
        expected = sum(ns <= round(bound_s * 1e9) for ns in durations)
        assert values["x_seconds_bucket", str(bound_s)] == expected
    assert values["x_seconds_bucket", "+Inf"] == len(durations)
    assert all({"a", "b"} <= sample.labels.keys() for sample in family.samples)


def test_the_newest_exemplar_stands_in_any_order_of_arrival() -> None:
    histogram = DurationHistogram(BOUNDS)
    for at_ns, trace in ((5, "first"), (9, "newest"), (7, "late"), (9, "as new")):
        histogram.show(Exemplar(trace, 50_000_000, at_ns))
    assert [each.trace_id for each in histogram.exemplars.values()] == ["as new"]


def test_exemplars_stand_at_their_bucket_and_in_open_metrics_only() -> None:
    histogram = DurationHistogram(BOUNDS)
    histogram.add(50_000_000)
    histogram.show(Exemplar(_TRACE, 50_000_000, 7 * 10**9))
    (family,) = read([family_of(histogram)], is_open=True).values()
    (sample,) = [each for each in family.samples if each.exemplar is not None]
    assert sample.labels["le"] == "0.1"
    assert sample.exemplar.labels == {"trace_id": _TRACE}
    assert sample.exemplar.value == 0.05
    assert float(sample.exemplar.timestamp) == 8.0
    (family,) = read([family_of(histogram)], is_open=False).values()
    assert all(each.exemplar is None for each in family.samples)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", "n\u00e4\u6f22", ""])
def test_whatever_stands_in_a_label_comes_back(is_open: bool, value: str) -> None:
    gauge = GaugeMetricFamily("x", 'says "so"\nand so', labels=["a"])
    gauge.add_metric([value], 1.5)
    (family,) = read([gauge], is_open=is_open).values()
    assert family.samples[0].labels == {"a": value}
    assert family.samples[0].value == 1.5


def test_numbers_that_are_none_are_written_as_the_format_has_them() -> None:
    gauge = GaugeMetricFamily("x", "says", labels=["a"])
    for at, value in enumerate((float("inf"), float("-inf"), float("nan"), 1e300)):
        gauge.add_metric([str(at)], value)
    text = page([gauge], is_open=False).decode()
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["+Inf", "-Inf", "NaN", "1e+300"]


def test_accept_headers_are_parsed() -> None:
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    assert wants_open(prometheus)
    assert not wants_open("text/plain")
    assert not wants_open("*/*")
    assert takes_gzip("deflate, gzip;q=1.0")
    assert not takes_gzip("identity")
    assert len(compressed(b"a" * 1000)) < 100
