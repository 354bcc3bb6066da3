"""The report of one run as a page: the sections of each engine, in their order.

A section is one function from an engine's facts to a `Section`, or to None if it has nothing to
show. A new one is a module with such a function, and a line in `SECTIONS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from inferscope.insight.run import EngineFacts, RunFacts
from inferscope.report.blocks import Section
from inferscope.report.page import Page
from inferscope.report.run.course import course
from inferscope.report.run.findings import found
from inferscope.report.run.latency import latencies
from inferscope.report.run.ledger import ledger
from inferscope.report.run.machine import machine, records
from inferscope.report.run.objectives import objectives
from inferscope.report.run.phases import phases
from inferscope.report.run.prefix_cache import prefix_cache
from inferscope.report.run.roofline import roofline
from inferscope.report.run.slowest import slowest
from inferscope.report.run.source import Source
from inferscope.report.run.verdict import verdict
from inferscope.report.run.worst_second import worst_second

SECTIONS: tuple[Callable[[EngineFacts], Section | None], ...] = (
    verdict,
    objectives,
    found,
    course,
    latencies,
    ledger,
    worst_second,
    slowest,
    phases,
    prefix_cache,
    roofline,
    machine,
)


def run_page(facts: RunFacts, source: Source) -> Page:
    """Return the report of a run."""
    sections: list[Section] = []
    for number, engine in enumerate(facts.engines, 1):
        made = [made for make in SECTIONS if (made := make(engine)) is not None]
        if len(facts.engines) > 1:
            sections.append(Section(f"engine-{number}", engine.engine_id, (), level=1))
            made = [replace(each, id=f"engine-{number}-{each.id}") for each in made]
        sections += made
    sections.append(records(facts, source))
    return Page(
        title=f"Run report: {_subject(facts, source)}",
        subtitle=_when(facts, source),
        sections=tuple(sections),
    )


def _subject(facts: RunFacts, source: Source) -> str:
    models = dict.fromkeys(
        f"{engine.view.model} on {engine.view.engine}"
        for engine in facts.engines
        if engine.view.model
    )
    return ", ".join(models) or source.name


def _when(facts: RunFacts, source: Source) -> str:
    starts = [
        engine.first_arrival_ns + engine.real_offset_ns
        for engine in facts.engines
        if engine.first_arrival_ns is not None and engine.real_offset_ns is not None
    ]
    began = f", from {utc(min(starts))}" if starts else ""
    live = ", still running" if source.is_live else ""
    refit = ", refit: priced by the final cost models" if source.is_refit else ""
    return f"{source.name}{began}{live}{refit}"


def utc(real_ns: int) -> str:
    """Return a wall time in UTC, which reads the same everywhere."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(real_ns // 1_000_000_000))
