"""Latencies with prefill and decode on separate workers: interference removed.

To first order: each request's TTFT without the decodes in its prefill steps, and each gap between
tokens without the prefills in it. The queue and the batches stay as they were; the KV cache
transfer, which disaggregation adds to TTFT, is not included.
"""

from __future__ import annotations

import msgspec

from inferscope.insight.findings.run_summary import RunSummary
from inferscope.log_histogram import LogHistogram


class Distribution(msgspec.Struct, frozen=True):
    """Distribution of a metric over all requests, or over all gaps."""

    num: int
    """Number of values."""
    mean_ns: int
    """Mean."""
    p50_ns: int
    """Median."""
    p95_ns: int
    """95th percentile."""
    p99_ns: int
    """99th percentile."""


class Disaggregation(msgspec.Struct, frozen=True):
    """TTFT and TBT with and without interference."""

    ttft: Distribution
    """Time to first token."""
    ttft_without_interference: Distribution
    """Time to first token without other requests' decodes."""
    tbt: Distribution
    """Gap between tokens."""
    tbt_without_interference: Distribution
    """Gap between tokens without other requests' prefills."""
    method: str = "first-order, modelled"
    """Method of the values without interference."""


def disaggregation(run: RunSummary) -> Disaggregation | None:
    """Return latencies without interference; None if no response had several tokens."""
    requests = run.requests
    ttft, tbt = _of(requests.ttft), _of(requests.tbt)
    apart_ttft, apart_tbt = _of(requests.ttft_without_decodes), _of(requests.tbt_without_prefills)
    if ttft is None or apart_ttft is None or tbt is None or apart_tbt is None:
        return None
    return Disaggregation(ttft, apart_ttft, tbt, apart_tbt)


def _of(durations: LogHistogram) -> Distribution | None:
    mean_ns = durations.mean_ns
    if mean_ns is None:
        return None
    p50, p95, p99 = (found_ns or 0 for found_ns in durations.percentiles_ns())
    return Distribution(durations.num, round(mean_ns), p50, p95, p99)
