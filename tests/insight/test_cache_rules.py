"""Each cause of cache misses is produced on the real engine, found, and not found without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    submitted: dict[str, tuple[Sequence[int], str]] = {}

    def submitting(prompt: Sequence[int], *given: Any, cache_salt: str = "", **more: Any) -> str:
        request_id = submit(prompt, *given, cache_salt=cache_salt, **more)
        submitted[request_id] = prompt, cache_salt
        return request_id

    def comparing(request_id: str, **more: Any) -> RequestIndex:
        index = queued(request_id, **more)
        prompt, salt = submitted[request_id]
        probe.compare_prompt(index, prompt, salt=salt or None)
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


class Case(NamedTuple):
    """A workload on an engine.

    Attributes:
        at_once: number of requests that arrive at once.
        num_salts: number of cache salts that the requests have in turn; 0 for none.
    """

    prompts: Callable[[Texts], Iterator[list[int]]]
    options: EngineOptions
    at_once: int = 1
    num_salts: int = 0


CASES = {
    "prompt_changes_early": Case(early, ROOMY),
    "cache_too_small": Case(turns, EngineOptions(num_blocks=48)),
    "prefix_below_block": Case(late, EngineOptions(num_blocks=64, block_tokens=256)),
    "namespace_splits": Case(late, ROOMY, num_salts=12),
    "duplicates_in_flight": Case(twins, EngineOptions(num_blocks=512, token_budget=1024), 4),
    "documents_reordered": Case(documents, ROOMY),
}
HEALTHY = {
    "prompt_changes_early": Case(late, ROOMY),
    "cache_too_small": Case(turns, ROOMY),
    "prefix_below_block": Case(late, ROOMY),
    "namespace_splits": Case(late, ROOMY, num_salts=1),
    "duplicates_in_flight": Case(twins, ROOMY),
    "documents_reordered": Case(turns, ROOMY),
}
"""The same without the mistake."""


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> Judged:
    asked = [
        Ask(1000 * (number // case.at_once), prompt, 2, _salt(case, number))
        for number, prompt in enumerate(case.prompts(Texts()))
    ]
    return serve(folder, monkeypatch, asked, case.options, change=compare_prompts)


def _salt(case: Case, number: int) -> str:
    return f"of-client-{number % case.num_salts}" if case.num_salts else ""


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


@pytest.mark.thorough
def test_equal_prompts_of_other_salts_are_priced_and_the_salts_are_in_no_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["namespace_splits"]
    run = served(tmp_path, monkeypatch, case)
    caches = [final.cache for final in run.finals.requests]
    apart = [cache for cache in caches if cache is not None and cache.tokens.get("namespace")]
    # The system prompt's whole blocks, at the first request of each salt but the first one.
    assert [cache.tokens["namespace"] for cache in apart] == [192] * (case.num_salts - 1)
    for cache in apart:
        assert cache.difference is not None
        assert cache.difference.differs == ("salt",)
        assert (cache.gpu_ns or {})["namespace"] > 0
    rings = b"".join(path.read_bytes() for path in tmp_path.rglob("*.ring"))
    assert b"request-0" in rings
    assert b"of-client-" not in rings
