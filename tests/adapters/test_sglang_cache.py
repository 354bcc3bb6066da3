"""What a radix cache lost, and what an admitted prompt found, through the hooks."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscope.adapters.sglang.cache import CacheHooks, CacheRecorder
from inferscope.adapters.sglang.state import MARK, Followed
from inferscope.records import LOOKUP_CLASSES, CacheLookup, ProbeHealth
from tests.probe.fakes import FakeClock, make_probe, of


class UnifiedRadixCache:
    """Counts what it is asked; what is in it, a test decides."""

    def __init__(self, *, disable: bool = False) -> None:
        self.disable = disable

    def checkpoint_into_tree(self, req: Any, *, up_to: int) -> None:
        """Insert."""

    def _evict(self, num_tokens: int) -> Any:
        return SimpleNamespace(num_tokens_evicted=num_tokens)

    def reset(self) -> None:
        """Clear."""


class Seen:
    """A tree under the hooks, and requests that are admitted as a test asks."""

    def __init__(self, folder: Path, tree: Any = None, **scheduler: Any) -> None:
        self.probe = make_probe(folder, FakeClock(step_ns=10))
        self.tree = tree or UnifiedRadixCache()
        self.hooks = CacheHooks(lambda hook, *args: hook(*args))
        self.placed = self.hooks.by_target("tree", "batch")
        options = {"page_size": 1, "max_total_num_tokens": 20_000, "tree_cache": self.tree}
        self.recorder = self.hooks.open(SimpleNamespace(**{**options, **scheduler}), self.probe)
        self.left: deque[Any] = deque()

    @property
    def cache(self) -> CacheRecorder:
        assert self.recorder is not None
        return self.recorder

    def call(self, name: str, *args: Any, **kw: Any) -> Any:
        (target,) = (each for each in self.placed if each.endswith(name))
        original = getattr(type(args[0]), name)
        return self.placed[target](original, *args, **kw)

    def request(self, tokens: list[int], hit: int = 0, **more: Any) -> Any:
        prompt = array("q", tokens)
        made = SimpleNamespace(
            origin_input_ids=prompt,
            full_untruncated_fill_ids=prompt,
            return_logprob=False,
            finished=lambda: False,
            **more,
        )
        index = self.probe.queued("r", prompt_tokens=len(tokens))
        followed = Followed(index, self.left)
        setattr(made, MARK, followed)
        self.cache.arrived(made, followed, hit)
        return made

    def evict(self, num_tokens: int, *requests: Any) -> None:
        batch = SimpleNamespace(reqs=list(requests))
        prepare = self.placed["batch.prepare_for_extend"]
        prepare(lambda batch: self.call("_evict", self.tree, num_tokens), batch)

    def lookups(self) -> list[CacheLookup]:
        assert self.probe.path is not None
        return of(CacheLookup, self.probe.path)

    def classes(self) -> list[dict[str, int]]:
        return [
            {name: num for name in LOOKUP_CLASSES if (num := getattr(lookup, name))}
            for lookup in self.lookups()
        ]


def index_of(request: Any) -> int:
    found = getattr(request, MARK)
    assert isinstance(found, Followed)
    return found.index


PROMPT = list(range(1000, 1100))


def test_what_was_in_the_tree_and_is_not_found_was_evicted(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    second, third = seen.request([1] * 50), seen.request([2] * 50)
    seen.evict(10, second)
    seen.evict(70, third, second)
    seen.request(PROMPT, hit=20)
    assert seen.classes()[3] == {"hit": 20, "evicted": 76, "unmatched": 3, "rule": 1}
    lookup = seen.lookups()[3]
    assert lookup.is_inferred
    assert lookup.evictors == (index_of(second), index_of(third))
    assert (lookup.evictor, lookup.num_evictors) == (index_of(second), 2)


def test_a_prompt_waits_for_one_that_is_not_in_the_tree_yet(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    seen.request(PROMPT)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=64)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    assert seen.classes() == [
        {"unmatched": 99, "rule": 1},
        {"pending": 96, "unmatched": 3, "rule": 1},
    ]
    assert seen.lookups()[1].twin == index_of(first)


def test_a_next_turn_that_was_evicted_includes_the_output(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    first.full_untruncated_fill_ids = array("q", [*PROMPT, *range(40)])
    first.finished = lambda: True
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=140)
    seen.request([*PROMPT, *range(40), *[7] * 20])
    assert seen.classes()[1] == {"evicted": 128, "unmatched": 31, "rule": 1}


def test_a_reset_tree_is_cleared(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.call("checkpoint_into_tree", seen.tree, seen.request(PROMPT), up_to=100)
    seen.call("reset", seen.tree)
    seen.request(PROMPT)
    assert seen.classes()[1] == {"cleared": 96, "unmatched": 3, "rule": 1}


def test_another_salt_finds_nothing(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT, cache_salt="one")
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    seen.request(PROMPT, cache_salt="two")
    assert seen.classes()[1] == {"unmatched": 99, "rule": 1}


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (UnifiedRadixCache(disable=True), "the prefix cache is disabled"),
        (SimpleNamespace(), "the cache is a SimpleNamespace"),
    ],
)
def test_a_cache_that_cannot_be_followed_is_off(tmp_path: Path, tree: Any, reason: str) -> None:
    seen = Seen(tmp_path, tree)
    seen.request(PROMPT)
    assert seen.classes() == [{"off": 100}]
    assert seen.lookups()[0].off_reason == reason


def test_log_probabilities_of_the_prompt_are_off(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.request(PROMPT, logprob_start_len=0)
    made = seen.request(PROMPT, logprob_start_len=0)
    made.return_logprob = True
    seen.cache.arrived(made, getattr(made, MARK), 0)
    assert seen.classes()[-1] == {"off": 100}


def test_a_fault_costs_the_forensics_alone(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    followed = Followed(seen.probe.queued("r", prompt_tokens=1), seen.left)
    seen.cache.arrived(None, followed, 0)
    seen.call("_evict", seen.tree, 5)
    assert seen.probe.on
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")


def test_a_scheduler_without_a_tree_is_unsupported(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    assert CacheHooks(lambda *_: None).open(SimpleNamespace(), probe) is None
    probe.close()
    (what,) = of(ProbeHealth, Path(str(probe.path)))[-1].unsupported
    assert what == "cache forensics: the scheduler has no tree_cache"
