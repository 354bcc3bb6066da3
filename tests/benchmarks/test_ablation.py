"""The ablation on the smallest model: what is served before, and what runs before a run."""

from __future__ import annotations

import importlib
import random
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from inferscope.engine.runner import Batch


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return `served` and `ablation`, which import each other as programs do."""
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("served"), importlib.import_module("ablation")


class Spy:
    """What a runner has executed: how many tokens of each request."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[list[int]] = []
        execute = runner.execute

        def spied(batch: Batch) -> Tensor:
            self.ran.append(batch.ragged.counts.tolist())
            return execute(batch)

        monkeypatch.setattr(runner, "execute", spied)


@pytest.mark.thorough
def test_the_load_fills_the_budget_of_some_mixed_steps_and_leaves_it_in_others(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = modules
    engine, runner = served.open_engine("random:tiny", "float32")
    spy = Spy(runner, monkeypatch)
    num_steps = served.serve(engine, random.Random(1), 600)
    assert len(spy.ran) == num_steps >= 600
    mixed = [sum(counts) for counts in spy.ran if 1 in counts and max(counts) > 1]
    full = mixed.count(served.ON_CPU.token_budget)
    assert full > 30
    assert len(mixed) - full > 30
    assert len(set(mixed)) > 30


def test_before_a_coalition_is_timed_its_decodes_run_alone(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, ablation = modules
    engine, runner = served.open_engine("random:tiny", "float32")
    draw = random.Random(2)
    chunks = (ablation.Part(20, 0, True),)
    decodes = tuple(ablation.Part(1, 30 + at, True) for at in range(2))
    shape = ablation.StepShape(chunks, decodes, is_pooled=False)
    scene = ablation.Scene(engine, runner, shape, draw)
    coalitions = ablation.coalitions(shape, 2.0)
    spy = Spy(runner, monkeypatch)
    runs = ablation.measure(scene, coalitions.members, repeats=3, draw=draw)
    scene.close()

    left = iter(spy.ran[1:])  # the first run is not timed: what it samples is compared with
    for at in runs.coalition:
        tokens = [shape.parts[member].num_tokens for member in coalitions.members[at]]
        num_decodes = tokens.count(1)
        for _ in range(ablation.SETTLING_STEPS if num_decodes else 0):
            assert next(left) == [1] * num_decodes
        assert sorted(next(left)) == sorted(tokens)
    assert next(left, None) is None
    assert engine.pool.num_used == 0


def test_a_device_is_timed_by_its_own_stopwatch_and_needs_no_settling(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, ablation = modules
    engine, runner = served.open_engine("random:tiny", "float32")
    draw = random.Random(3)
    decodes = tuple(ablation.Part(1, 20 + at, True) for at in range(3))
    shape = ablation.StepShape((ablation.Part(16, 0, True),), decodes, is_pooled=False)
    timed: list[int] = []

    def stopwatch(work: Any) -> tuple[list[int], int]:
        tokens = work()
        timed.append(len(tokens))
        return tokens, 7 * len(tokens)

    scene = ablation.Scene(engine, runner, shape, draw, stopwatch=stopwatch, settling_steps=0)
    coalitions = ablation.coalitions(shape, 2.0)
    spy = Spy(runner, monkeypatch)
    runs = ablation.measure(scene, coalitions.members, repeats=9, draw=draw, until_s=0.0)
    scene.close()
    assert len(spy.ran) == len(timed) == 1 + 2 * 15  # two rounds, for the halves of them
    assert runs.round.max() == 1
    assert runs.took_ns.tolist() == [7 * len(coalitions.members[at]) for at in runs.coalition]
