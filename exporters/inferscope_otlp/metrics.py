"""Server metrics of the conventions: three histograms per engine, with their own bounds.

Counts are cumulative: a failed post loses nothing once a later one arrives.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from inferscope.fold import FinalRequest
from inferscope_otlp import names
from inferscope_otlp.attributes import Attributes, operation_of
from inferscope_otlp.finished import EngineResource
from inferscope_otlp.trace_sampling import FAILURES
from inferscope_otlp.wire import histogram_metric, histogram_point

BOUNDS = {
    names.METRIC_DURATION: (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    names.METRIC_TTFT: (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        10.0,
    ),
    names.METRIC_TPOT: (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
}
"""Bounds in seconds; semantic conventions for generative AI metrics."""
_SAYS = {
    names.METRIC_DURATION: "Generative AI server request duration",
    names.METRIC_TTFT: "Time to generate first token for successful responses",
    names.METRIC_TPOT: "Time per output token generated after the first token",
}
_ANSWERS = ("stop", "length")


class HistogramSeries(msgspec.Struct):
    """Counts of one histogram, one per bound and one above the last, and the sum in seconds."""

    counts: list[int]
    total: float = 0.0


class EngineMetrics:
    """Histograms of one engine since `start_ns` on the wall clock."""

    def __init__(self, start_ns: int) -> None:
        """Start empty."""
        self._start_ns = start_ns
        self._series: dict[tuple[str, str, str], HistogramSeries] = {}
        """Series by metric, operation and error."""

    def on_request(self, request: FinalRequest) -> None:
        """Count a request that was fully observed."""
        if request.joined_late:
            return
        operation = operation_of(request)
        error = request.finish if request.finish in FAILURES else ""
        took_ns = request.delivered_ns - request.arrived_ns
        self._add(names.METRIC_DURATION, operation, error, took_ns)
        first_ns, last_ns = request.first_token_ns, request.last_token_ns
        if request.finish not in _ANSWERS or request.is_in_one_piece or first_ns is None:
            return
        self._add(names.METRIC_TTFT, operation, "", first_ns - request.arrived_ns)
        if last_ns is not None and request.output_tokens > 1:
            each_ns = (last_ns - first_ns) / (request.output_tokens - 1)
            self._add(names.METRIC_TPOT, operation, "", each_ns)

    def encoded(self, engine: EngineResource, end_ns: int) -> list[bytes]:
        """Return all histograms as fields of a ScopeMetrics message."""
        metrics = []
        for name, bounds in BOUNDS.items():
            points = [
                histogram_point(
                    _attributes(engine, operation, error),
                    start_ns=min(self._start_ns, end_ns),
                    end_ns=end_ns,
                    bounds=bounds,
                    counts=series.counts,
                    total=series.total,
                )
                for (metric, operation, error), series in self._series.items()
                if metric == name
            ]
            if points:
                metrics.append(histogram_metric(name, _SAYS[name], points))
        return metrics

    def _add(self, metric: str, operation: str, error: str, duration_ns: float) -> None:
        key = (metric, operation, error)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = HistogramSeries([0] * (len(BOUNDS[metric]) + 1))
        duration_s = duration_ns / 1e9
        series.counts[bisect_left(BOUNDS[metric], duration_s)] += 1
        series.total += duration_s


def _attributes(engine: EngineResource, operation: str, error: str) -> Attributes:
    attributes: Attributes = {names.OPERATION_NAME: operation}
    if engine.kind:
        attributes[names.PROVIDER_NAME] = engine.kind
    if engine.model:
        attributes[names.REQUEST_MODEL] = attributes[names.RESPONSE_MODEL] = engine.model
    if error:
        attributes[names.ERROR_TYPE] = error
    return attributes
