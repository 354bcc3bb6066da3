"""Second pass over a run's records: what can only be collected once the first has ended.

The first pass finds the slowest requests and the worst second; this one collects the evidence of
the former and the steps of the latter.
"""

from __future__ import annotations

from dataclasses import replace

from inferscope.insight.request_source import RequestSource
from inferscope.insight.run.facts import EngineFacts, RunFacts
from inferscope.insight.run.worst_second import StepsOfSecond
from inferscope.slo import Objectives

MOST_EXPLAINED = 5
"""Slowest requests whose evidence is collected; each adds a few percent to the pass."""


def with_details(
    facts: RunFacts, source: RequestSource, objectives: Objectives | None = None
) -> RunFacts:
    """Return facts with the steps of the worst second and the evidence of the slowest requests.

    Args:
        facts: facts of the first pass.
        source: the same records.
        objectives: objectives to judge the requests by.
    """
    engines = tuple(_with_details(engine, source, objectives) for engine in facts.engines)
    return replace(facts, engines=engines)


def _with_details(
    engine: EngineFacts, source: RequestSource, objectives: Objectives | None
) -> EngineFacts:
    slowest = engine.slowest[:MOST_EXPLAINED]
    if not slowest:
        return engine
    if engine.worst_second is None:
        return replace(engine, explained=source.facts_of_run(slowest, promised=objectives))
    kept = StepsOfSecond(engine.engine_id, engine.worst_second)
    explained = source.facts_of_run(slowest, promised=objectives, sinks=(kept,))
    return replace(
        engine,
        explained=explained,
        worst_steps=tuple(kept.steps),
        worst_names=kept.names,
        num_worst_left_out=kept.num_left_out,
    )
