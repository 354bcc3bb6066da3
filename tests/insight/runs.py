"""Runs of the built-in engine, made to order, and their findings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.insight.findings import EngineFindings, RunSummarizer, findings
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.probe import Probe
from inferscope.readers.source import catch_up, open_source
from tests.fold.scripts import Finals

VOCAB = 250
"""Vocabulary size of the built-in model, without a few special tokens."""


@dataclass(frozen=True)
class Ask:
    """A prompt that arrives before a step."""

    step: int
    prompt: Sequence[int]
    max_tokens: int
    salt: str = ""


@dataclass(frozen=True)
class Judged:
    """A run and what was found."""

    run: RunSummary
    of_engine: EngineFindings
    finals: Finals

    @property
    def ids(self) -> set[str]:
        assert self.of_engine.findings is not None
        return {finding.id for finding in self.of_engine.findings}


def asks(
    num: int,
    *,
    every: float,
    prompt_tokens: int,
    max_tokens: int,
    shared: Sequence[int] = (),
    seed: int = 1,
) -> list[Ask]:
    """Return requests at a steady pace, whose prompts have only `shared` in common."""
    rng = random.Random(seed)
    return [
        Ask(
            int(number * every),
            [*shared, *(rng.randrange(VOCAB) for _ in range(prompt_tokens - len(shared)))],
            max_tokens,
        )
        for number in range(num)
    ]


def serve(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[Ask],
    options: EngineOptions,
    *,
    change: Callable[[Engine], None] = lambda engine: None,
) -> Judged:
    """Serve requests on a schedule of steps, and judge the records of it."""
    monkeypatch.setenv("INFERSCOPE_DIR", str(folder))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "8")
    engine = load_engine("builtin", options, open_probe=Probe.open)
    change(engine)
    due = sorted(asked, key=lambda ask: ask.step)
    step = 0
    while due or engine.has_work:
        while due and (due[0].step <= step or not engine.has_work):
            ask = due.pop(0)
            sampling = Sampling(max_tokens=ask.max_tokens, ignore_eos=True)
            engine.submit(ask.prompt, sampling, cache_salt=ask.salt)
        engine.step()
        step += 1
    engine.close()
    engine.probe.close()
    return judge(folder)


def judge(folder: Path) -> Judged:
    """Judge a folder of rings."""
    watch, finals = RunSummarizer(), Finals()
    source = open_source(folder, sinks=(watch, finals), listen=watch.on_record)
    catch_up(source)
    source.close()
    (found,) = findings(watch)
    (run,) = watch.runs.values()
    return Judged(run, found, finals)
