"""The verdict on a run in a sentence, and its headline numbers."""

from __future__ import annotations

from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import Column, Inline, Marked, Number, Prose, Section, Table, prose
from inferscope.text import SYNTHETIC, run_verdict


def verdict(engine: EngineFacts) -> Section:
    """Return the verdict and the headline numbers."""
    severe = any(each.severity == "high" for each in engine.found.findings or ())
    mark: tuple[Inline, ...] = (Marked("", "alarm"),) if severe else ()
    sentences = [Prose((*mark, run_verdict(engine.found)), "strong")]
    if engine.found.is_synthetic:
        sentences.insert(0, prose(SYNTHETIC, role="alarm"))
    finished = sum(engine.num_by_finish.values())
    span_ns = None
    if engine.first_arrival_ns is not None and engine.last_delivery_ns is not None:
        span_ns = engine.last_delivery_ns - engine.first_arrival_ns
    p50, p95, _ = engine.ttft.percentiles_ns()
    tbt50, _, tbt99 = engine.tbt.percentiles_ns()
    headline = (
        Number.count("finished", finished),
        Number.duration("span_ns", span_ns),
        Number.rate("finished_s", finished * 1e9 / span_ns if span_ns else None),
        Number.duration("ttft.p50_ns", p50),
        Number.duration("ttft.p95_ns", p95),
        Number.duration("tbt.p50_ns", tbt50),
        Number.duration("tbt.p99_ns", tbt99),
        Number.duration("e2e.p95_ns", engine.e2e.percentiles_ns()[1]),
    )
    headings = (
        "finished",
        "first arrival to last delivery",
        "requests/s",
        "TTFT p50",
        "TTFT p95",
        "TBT p50",
        "TBT p99",
        "E2E p95",
    )
    table = Table(tuple(Column(each, "number") for each in headings), (headline,))
    return Section("verdict", "Verdict", (*sentences, table))
