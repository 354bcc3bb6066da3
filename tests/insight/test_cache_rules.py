"""Each cause of cache misses is produced on the real engine, found, and not found without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferscope.engine import Engine, EngineOptions
from inferscope.records import RequestIndex
from tests.insight.runs import VOCAB, Ask, Judged, serve

ROOMY = EngineOptions(num_blocks=512)
_RULES = {
    "prompt_changes_early",
    "cache_too_small",
    "prefix_below_block",
    "namespace_splits",
    "duplicates_in_flight",
    "documents_reordered",
}
_NUM = 24


class Texts:
    """Texts that have nothing in common but by chance."""

    def __init__(self) -> None:
        self._draw = random.Random(3)

    def new(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(num_tokens)]

    def shuffled(self, documents: list[list[int]]) -> list[int]:
        """Return documents one after the other, in another order each time."""
        chosen = self._draw.sample(documents, len(documents))
        return [token for document in chosen for token in document]


def compare_prompts(engine: Engine) -> None:
    """Compare each prompt with earlier ones, as a front end does."""
    probe, submit = engine.probe, engine.submit
    queued = probe.queued
    prompts: dict[str, Sequence[int]] = {}

    def submitting(prompt: Sequence[int], *given: Any, **more: Any) -> str:
        request_id = submit(prompt, *given, **more)
        prompts[request_id] = prompt
        return request_id

    def comparing(request_id: str, **more: Any) -> RequestIndex:
        index = queued(request_id, **more)
        probe.compare_prompt(index, prompts[request_id])
        return index

    engine.submit = submitting  # type: ignore[method-assign]
    probe.queued = comparing  # type: ignore[method-assign,assignment]


def early(texts: Texts) -> Iterator[list[int]]:
    """A timestamp before the same instructions."""
    system = texts.new(200)
    for _ in range(_NUM):
        yield [*texts.new(20), *system, *texts.new(20)]


def late(texts: Texts) -> Iterator[list[int]]:
    """The same with the timestamp behind them."""
    system = texts.new(200)
    for _ in range(_NUM):
        yield [*system, *texts.new(40)]


def turns(texts: Texts) -> Iterator[list[int]]:
    """Six conversations in turn, each with a long history."""
    chats = [texts.new(200) for _ in range(6)]
    for number in range(_NUM):
        yield [*chats[number % len(chats)], *texts.new(10)]


def twins(texts: Texts) -> Iterator[list[int]]:
    """The same long prompt four times at once."""
    for _ in range(_NUM // 4):
        prompt = texts.new(220)
        for _ in range(4):
            yield [*prompt, *texts.new(10)]


def documents(texts: Texts) -> Iterator[list[int]]:
    """The same four documents in every order."""
    found = [texts.new(60) for _ in range(4)]
    system = texts.new(16)
    for _ in range(_NUM):
        yield [*system, *texts.shuffled(found), *texts.new(10)]


CASES: dict[str, tuple[Callable[[Texts], Iterator[list[int]]], EngineOptions, int]] = {
    "prompt_changes_early": (early, ROOMY, 1),
    "cache_too_small": (turns, EngineOptions(num_blocks=48), 1),
    "prefix_below_block": (late, EngineOptions(num_blocks=64, block_tokens=256), 1),
    "duplicates_in_flight": (twins, EngineOptions(num_blocks=512, token_budget=1024), 4),
    "documents_reordered": (documents, ROOMY, 1),
}
"""Prompts, engine, and requests that arrive at once."""
HEALTHY = {
    "prompt_changes_early": (late, ROOMY, 1),
    "cache_too_small": (turns, ROOMY, 1),
    "prefix_below_block": (late, ROOMY, 1),
    "duplicates_in_flight": (twins, ROOMY, 1),
    "documents_reordered": (turns, ROOMY, 1),
}
"""The same without the mistake."""


def served(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[Callable[[Texts], Iterator[list[int]]], EngineOptions, int],
) -> Judged:
    prompts, options, at_once = case
    asked = [
        Ask(1000 * (number // at_once), prompt, 2) for number, prompt in enumerate(prompts(Texts()))
    ]
    return serve(folder, monkeypatch, asked, options, change=compare_prompts)


@pytest.mark.thorough
@pytest.mark.parametrize("finding_id", CASES)
def test_each_cause_is_found_in_its_workload_and_not_without_it(
    finding_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = served(tmp_path / "wrong", monkeypatch, CASES[finding_id])
    assert wrong.ids & _RULES == {finding_id}
    for final in wrong.finals.requests:
        assert final.cache is not None
        assert sum(final.cache.tokens.values()) == final.prompt_tokens
        assert sum((final.cache.gpu_ns or {}).values()) == final.prefill_ns
    right = served(tmp_path / "right", monkeypatch, HEALTHY[finding_id])
    assert finding_id not in right.ids
