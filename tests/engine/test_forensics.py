"""What the records say of a prompt that misses the cache, in the real engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscope.engine.core import Engine
from inferscope.engine.request import BadRequest, Sampling
from inferscope.records import (
    LOOKUP_CLASSES,
    CacheLookup,
    CacheSample,
    RequestEvent,
)
from tests.probe.fakes import FakeClock, make_probe, of

WIDTH = 16
Build = Callable[..., Engine]


class Observed:
    """An engine with a probe, and its records by request."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        engine.probe = self.probe = make_probe(folder, FakeClock(step_ns=1000), capacity=1 << 20)
        self.key = random.Random(7)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.key.randrange(3, 250) for _ in range(num_tokens)]

    def serve(self, *prompts: list[int], max_tokens: int = 1, salt: str = "") -> None:
        for prompt in prompts:
            self.engine.submit(
                prompt, Sampling(max_tokens=max_tokens, ignore_eos=True), cache_salt=salt
            )
        while self.engine.has_work:
            self.engine.step()

    def lookups(self) -> list[CacheLookup]:
        assert self.probe.path is not None
        return of(CacheLookup, self.probe.path)

    def classes(self) -> list[dict[str, int]]:
        """Return the tokens of each request by class, without zeros."""
        return [
            {name: num for name in LOOKUP_CLASSES if (num := getattr(lookup, name))}
            for lookup in self.lookups()
        ]


@pytest.fixture
def observe(tiny_engine: Build, tmp_path: Path) -> Callable[..., Observed]:
    def build(**options: Any) -> Observed:
        return Observed(tiny_engine(**options), tmp_path)

    return build


def test_a_repeated_prompt_hits_but_for_the_last_block_by_rule(observe: Any) -> None:
    seen = observe(num_blocks=64)
    prompt = seen.prompt(64)
    seen.serve(prompt)
    seen.serve(prompt)
    assert seen.classes() == [{"unmatched": 48, "rule": 16}, {"hit": 48, "rule": 16}]


def test_an_evicted_prompt_names_its_evictor_and_the_time(observe: Any) -> None:
    seen = observe(num_blocks=8, max_model_tokens=120)
    first, second = seen.prompt(70), seen.prompt(100)
    seen.serve(first)
    seen.serve(second)
    seen.serve(first)
    lookup = seen.lookups()[-1]
    assert seen.classes()[-1] == {"hit": 16, "evicted": 48, "rounding": 6}
    assert lookup.evictor == 1
    events = of(RequestEvent, seen.probe.path)
    queued_ns, end_ns = (
        next(each.t_ns for each in events if each.index == 1 and each.kind == kind)
        for kind in (2, 8)
    )
    assert queued_ns < lookup.evicted_ns < end_ns
    assert not lookup.is_inferred


def test_a_duplicate_in_flight_is_pending_behind_its_twin(observe: Any) -> None:
    seen = observe(num_blocks=64)
    prompt = seen.prompt(50)
    seen.serve(prompt, prompt)
    assert seen.classes() == [
        {"unmatched": 48, "rounding": 2},
        {"pending": 48, "rounding": 2},
    ]
    assert [lookup.twin for lookup in seen.lookups()] == [-1, 0]


def test_an_equal_prompt_of_another_salt_finds_nothing_and_is_evicted_apart(observe: Any) -> None:
    seen = observe(num_blocks=9, max_model_tokens=120)
    prompt = seen.prompt(50)
    for salt in ("one", "two", "one", "two", ""):
        seen.serve(prompt, salt=salt)
    # Each takes 4 blocks and leaves 3 in the cache, so the third salt evicts one of the first.
    miss, hit = ({name: 48, "rounding": 2} for name in ("unmatched", "hit"))
    assert seen.classes() == [miss, miss, hit, hit, miss]
    seen.serve(prompt, salt="one")
    lookup = seen.lookups()[-1]
    assert seen.classes()[-1] == {"hit": 32, "evicted": 16, "rounding": 2}
    assert lookup.evictor == 4


def test_a_disabled_cache_says_so(observe: Any) -> None:
    seen = observe(prefix_cache=False)
    seen.serve(seen.prompt(20))
    (lookup,) = seen.lookups()
    assert seen.classes() == [{"off": 20}]
    assert lookup.off_reason == "the prefix cache is disabled"


def test_a_prompt_of_wrong_tokens_is_rejected_as_without_an_observation(observe: Any) -> None:
    seen = observe(num_blocks=8, max_model_tokens=120)
    seen.serve(seen.prompt(20))  # from here on, keys are computed where a prompt is submitted
    for prompt in ([-1] * 20, [2**70] * 20, [3] * 500, []):
        with pytest.raises(BadRequest):
            seen.engine.submit(prompt)
    seen.serve(seen.prompt(20))
    assert seen.classes() == [{"unmatched": 16, "rounding": 4}] * 2


def test_a_prompt_given_as_bytes_has_the_keys_of_its_items(observe: Any) -> None:
    seen = observe(num_blocks=8, max_model_tokens=120)
    first = bytes(seen.prompt(70))
    seen.serve(list(first))
    seen.serve(seen.prompt(100))
    seen.serve(first)
    assert seen.classes()[-1] == {"hit": 16, "evicted": 48, "rounding": 6}


def test_output_that_was_evicted_is_recognised_in_the_next_turn(observe: Any) -> None:
    seen = observe(num_blocks=8, max_model_tokens=120)
    first = seen.prompt(30)
    (output,) = seen.engine.generate([first], Sampling(max_tokens=40, ignore_eos=True))
    seen.serve(seen.prompt(100))
    seen.serve([*first, *output, 3])
    assert seen.classes()[-1] == {"hit": 16, "evicted": 48, "rounding": 7}


def test_a_prompt_below_one_block_is_rounding(observe: Any) -> None:
    seen = observe()
    prompt = seen.prompt(WIDTH - 1)
    seen.serve(prompt)
    seen.serve(prompt)
    assert seen.classes() == [{"rounding": 15}] * 2


def test_a_next_turn_hits_what_was_generated_too(observe: Any) -> None:
    seen = observe(num_blocks=64)
    first = seen.prompt(40)
    (output,) = seen.engine.generate([first], Sampling(max_tokens=9, ignore_eos=True))
    seen.serve([*first, *output, *seen.prompt(30)])
    assert seen.classes()[-1] == {"hit": 48, "unmatched": 16, "rounding": 15}


def test_classes_sum_to_the_prompt_and_agree_with_the_engine(observe: Any) -> None:
    seen = observe(num_blocks=24, max_running=3, token_budget=48)
    stems = [seen.prompt(num) for num in (33, 64, 90, 100, 110, 120)]
    for _ in range(12):
        batch = [
            [*seen.key.choice(stems), *seen.prompt(seen.key.randrange(1, 50))] for _ in range(3)
        ]
        seen.serve(*batch, max_tokens=3)
    events = of(RequestEvent, seen.probe.path)
    prompts = {each.index: each.prompt_tokens for each in events if each.kind == 2}
    cached = {each.index: each.cached_tokens for each in events if each.kind == 3}
    lookups = seen.lookups()
    assert [lookup.index for lookup in lookups] == sorted(prompts)
    for lookup in lookups:
        total = sum(getattr(lookup, name) for name in LOOKUP_CLASSES)
        assert (total, lookup.hit) == (prompts[lookup.index], cached[lookup.index])
    assert sum(lookup.evicted for lookup in lookups)
    samples = of(CacheSample, seen.probe.path)
    assert [sample.num_blocks for sample in samples] == [
        (prompts[sample.index] - 1) // WIDTH for sample in samples
    ]
