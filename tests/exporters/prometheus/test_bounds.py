"""Bounds of the histograms: what they reach, how far a quantile is off, and who names them."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_prometheus import names
from inferscope_prometheus.engine_counters import DurationHistogram, ReplicaCounters
from inferscope_prometheus.metric_table import (
    BOUNDS_A,
    BOUNDS_B,
    BOUNDS_S,
    METRICS,
    REQUEST_HISTOGRAMS,
)
from prometheus_client.exposition import choose_encoder

from tests.dashboards.reading import dashboards, queries

ROOT = Path(__file__).parents[3]
LONGEST_ANSWER_S = 480.0
_ACCEPT = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;"
    "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""Sent by Prometheus 2.42 with `--enable-feature=native-histograms`."""


def quantile_s(histogram: DurationHistogram, bounds_s: tuple[float, ...], share: float) -> float:
    """Interpolate as `histogram_quantile` does."""
    rank, below = share * sum(histogram.counts), 0
    for (low_s, high_s), count in zip(pairwise((0.0, *bounds_s)), histogram.counts, strict=False):
        if below + count >= rank:
            return low_s + (high_s - low_s) * (rank - below) / count
        below += count
    return bounds_s[-1]


def spelt() -> dict[str, set[str]]:
    """Return the bounds of every histogram as a page spells them."""
    counts = ReplicaCounters()
    assert counts.step_ns.keys() == set(names.STEP_PHASES)
    return {
        row.full_name: {*map(str, BOUNDS_S[row.kind])}
        for row in METRICS.values()
        if row.kind in BOUNDS_S
    }


def test_every_part_of_a_long_answer_is_within_the_bounds() -> None:
    of_requests = [name for name in REQUEST_HISTOGRAMS if not re.search("between|per_output", name)]
    assert len(of_requests) == 6
    for name in of_requests:
        bounds_s = BOUNDS_S[METRICS[name].kind]
        assert bounds_s[-2] < LONGEST_ANSWER_S <= bounds_s[-1]
        assert len(bounds_s) == 25


@pytest.mark.parametrize(
    ("bounds_s", "from_s", "to_s", "most"),
    [
        (BOUNDS_A, 0.005, 640.0, 2.0),
        (BOUNDS_A, 0.04, 2.5, 1.67),
        (BOUNDS_B, 0.001, 1.0, 2.0),
        (BOUNDS_B, 0.004, 1.0, 1.67),
    ],
)
@given(data=st.data(), share=st.floats(0.01, 0.99))
def test_a_quantile_is_off_by_less_than_is_documented(
    bounds_s: tuple[float, ...],
    from_s: float,
    to_s: float,
    most: float,
    data: st.DataObject,
    share: float,
) -> None:
    spans_ns = st.integers(round(from_s * 1e9) + 1, round(to_s * 1e9))
    took_ns = sorted(data.draw(st.lists(spans_ns, min_size=1, max_size=50)))
    histogram = DurationHistogram(bounds_s)
    for each_ns in took_ns:
        histogram.add(each_ns)
    found_s = quantile_s(histogram, bounds_s, share)
    ranks = [number / len(took_ns) for number in range(1, len(took_ns) + 1)]
    true_s = took_ns[bisect_left(ranks, share)] / 1e9
    assert 1 / most <= found_s / true_s <= most


def test_the_page_lists_the_bounds() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, bounds_s in (("A", BOUNDS_A), ("B", BOUNDS_B)):
        (row,) = re.findall(rf"^\| {name}, of .* \| ([\d. ]+) \|$", text, re.MULTILINE)
        assert tuple(map(float, row.split())) == bounds_s


def test_every_bound_that_a_dashboard_names_is_one() -> None:
    found = [
        (metric, bound)
        for dashboard in dashboards().values()
        for query in queries(dashboard)
        for metric, matchers in re.findall(r"(\w+)_bucket\{([^}]*)\}", query.expr)
        for bound in re.findall(r'le="([^"]*)"', matchers)
    ]
    assert len(found) >= 2
    for metric, bound in found:
        assert bound in spelt()[metric]


def test_the_client_library_exposes_no_native_histogram_that_a_prometheus_asks_for() -> None:
    """Where this fails, the client has learned it: offer native histograms, change the docs."""
    _, content_type = choose_encoder(_ACCEPT)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
