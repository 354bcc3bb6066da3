"""Splits of steps, which do not depend on the number of steps split together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from inferscope.cost.step_table import StepTable
from inferscope.fold.fold import Collector
from inferscope.fold.splitting import _pure_steps
from tests.fold.scripts import Finals
from tests.fold.test_properties import _Engine
from tests.fold.test_work import DENSE, some_traffic


def facts_of(finals: Finals) -> list[dict[str, Any]]:
    """Return the fields of all steps, arrays as lists."""
    found = []
    for step in finals.steps:
        fields = asdict(step)
        delay = fields.pop("delay")
        components = fields.pop("components")
        fields["is_divided"] = components is not None
        fields |= {} if delay is None else asdict(delay)
        found.append({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()})
    return found


def assert_tables_do_not_show(items: list[Any], seed: int) -> None:
    draw, stories = random.Random(seed), []
    for chance in (0.0, 0.2, 1.0):
        finals = Finals()
        collector = Collector(finals)
        for item in items:
            collector.fold(item.ring, item.record)
            if draw.random() < chance:
                for engine in collector.engines.values():
                    engine.joins.settle()
        collector.end()
        stories.append((facts_of(finals), collector.digest()))
    assert stories[1] == stories[0]
    assert stories[2] == stories[0]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_steps_of_several_ranks_and_modes_do_not_depend_on_tables(seed: int) -> None:
    script = _Engine(random.Random(seed)).run()
    assert_tables_do_not_show(script.items(until_ms=20_000), seed)


@pytest.mark.thorough
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_nor_do_steps_with_drafts_chunks_and_recomputed_tokens(seed: int) -> None:
    traffic, _ = some_traffic(seed, DENSE)
    assert_tables_do_not_show(traffic.script.items(until_ms=1_000), seed)


def test_only_steps_of_one_phase_that_teach_bound_others() -> None:
    """Split a chunk with a decode, a prompt alone, decodes, and decodes in a cold step."""
    tokens = np.array([16, 1, 13, 1, 1, 1])
    contexts = np.array([0, 100, 7, 500, 3000, 9])
    table = StepTable(tokens, contexts, np.ones_like(tokens), tokens > 1, np.array([2, 1, 2, 1]))
    found = _pure_steps(table, [90, 60, 30, 20], [True, True, True, False])
    assert found == [None, (13, 7, 60), (1, 3000, 30), None]


def test_steps_get_to_sinks_whole() -> None:
    traffic, finals = some_traffic(1, DENSE)
    assert [step.step for step in finals.steps] == list(range(len(traffic.steps)))
    for step in finals.steps:
        assert int(step.shares_ns.sum()) == step.busy_ns == 8_000_000
