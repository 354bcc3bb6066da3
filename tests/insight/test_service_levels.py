"""Objectives that change while requests are judged, and their forms as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inferscope.cli.screen import judged_source
from inferscope.errors import BadInput
from inferscope.insight import LevelsWatch
from inferscope.insight.service_levels import DEFAULTS
from inferscope.readers import open_source
from inferscope.slo import Objectives, file_of, line_of, objectives_of_line, read_objectives

SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"
OBJECTIVES = read_objectives(SAMPLE.with_name("slo.yaml"))
WHOLE_NS = 320 * 10**9


@pytest.mark.thorough
def test_a_trial_counts_what_a_change_then_counts() -> None:
    levels = LevelsWatch(OBJECTIVES)
    source = judged_source(
        lambda sinks, listen: open_source(SAMPLE, sinks=sinks, listen=listen), levels
    )
    (view,) = source.snapshot(WHOLE_NS).engines
    assert view.levels is not None
    before = view.levels.objectives
    levels.trial = objectives_of_line("ttft 1s 99%, tbt 20ms 99%, goodput 99%", OBJECTIVES.all)
    (view,) = source.snapshot(WHOLE_NS).engines
    assert view.levels is not None
    tried = {each.objective.name: each for each in view.levels.trial}
    assert list(tried) == ["ttft", "tbt", "goodput"]
    for one in before:
        if one.objective.name in tried:
            present = tried[one.objective.name]
            assert (present.present_good, present.present_bad) == (one.num_good, one.num_bad)
    levels.change(levels.trial, origin="here")
    levels.trial = None
    (view,) = source.snapshot(WHOLE_NS).engines
    source.close()
    assert view.levels is not None
    assert view.levels.trial == ()
    assert {one.objective.name: (one.num_good, one.num_bad) for one in view.levels.objectives} == {
        name: (each.num_good, each.num_bad) for name, each in tried.items()
    }
    assert tried["ttft"].num_bad < before[0].num_bad
    assert tried["tbt"].num_bad > before[1].num_bad


def test_objectives_survive_the_line_and_the_file(tmp_path: Path) -> None:
    for objectives in (OBJECTIVES, DEFAULTS):
        assert objectives_of_line(line_of(objectives.all), objectives.all) == objectives
        file = tmp_path / "slo.yaml"
        file.write_text(file_of(objectives.all))
        read = read_objectives(file)
        assert line_of(read.all) == line_of(objectives.all)
        assert [one.window_ns for one in read.all] == [one.window_ns for one in objectives.all]
    of_model = Objectives(tuple(replace(one, model="it's") for one in OBJECTIVES.all))
    file.write_text(file_of(of_model.all))
    assert read_objectives(file) == of_model


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "there is no objective"),
        ("ttft", "needs a threshold"),
        ("ttft 500ms", "needs a target share"),
        ("ttft 500ms 100%", "neither a time"),
        ("ttft 0ms 99%", "needs a threshold"),
        ("ttft 500ms 99%, ttft 1s 95%", "twice"),
        ("speed 5ms 99%", "speed is not an objective"),
        ("availability 5ms 99%", "has no threshold of its own"),
        ("goodput 99%", "needs a threshold to meet"),
    ],
)
def test_an_invalid_line_is_explained(line: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        objectives_of_line(line, ())
