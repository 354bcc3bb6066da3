"""The verdict on a run in a sentence, and its headline numbers."""

from __future__ import annotations

from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import (
    Column,
    Inline,
    Marked,
    Number,
    Prose,
    Role,
    Section,
    Table,
    prose,
)
from inferscope.text import BAD_FINISHES, SYNTHETIC, run_verdict


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
    headline = {
        "finished": Number.count("finished", finished),
        "in flight": Number.count("in_flight", engine.view.num_requests),
        "duration": Number.duration("span_ns", span_ns),
        "requests/s": Number.rate("finished_s", finished * 1e9 / span_ns if span_ns else None),
        "TTFT p50": Number.duration("ttft.p50_ns", p50),
        "TTFT p95": Number.duration("ttft.p95_ns", p95),
        "TBT p50": Number.duration("tbt.p50_ns", tbt50),
        "TBT p99": Number.duration("tbt.p99_ns", tbt99),
        "E2E p95": Number.duration("e2e.p95_ns", engine.e2e.percentiles_ns()[1]),
    }
    table = Table(tuple(Column(each, "number") for each in headline), (tuple(headline.values()),))
    return Section("verdict", "Verdict", (*sentences, table, _requests(engine)))


def _requests(engine: EngineFacts) -> Prose:
    """Return how the requests ended, and their tokens."""
    ends: list[Inline] = []
    for finish, num in sorted(engine.num_by_finish.items(), key=lambda item: (-item[1], item[0])):
        role: Role = "alarm" if finish in BAD_FINISHES else ""
        ends += [", " if ends else "Finished: "]
        ends += [Number.count(f"finish.{finish}", num), " ", Marked(finish, role)]
    if not ends:
        return Prose(("No request has finished.",))
    cached = engine.cached_tokens / engine.prompt_tokens if engine.prompt_tokens else None
    return Prose(
        (
            *ends,
            ". Prompts: ",
            Number.count("prompt_tokens", engine.prompt_tokens),
            " tokens, ",
            Number.share("cached_share", cached),
            " of them from the prefix cache. Output: ",
            Number.count("output_tokens", engine.output_tokens),
            " tokens. Preemptions: ",
            Number.count("preemptions", engine.num_preemptions),
            ".",
        )
    )
