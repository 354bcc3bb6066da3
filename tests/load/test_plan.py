from __future__ import annotations

import dataclasses
import heapq
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.load.arrivals import bursts, poisson
from inferscope.load.http import parts_of
from inferscope.load.lengths import parse_lengths
from inferscope.load.planning import MIX, Composer, of_kind, of_lengths, plan, stream
from inferscope.load.prompts import WORDS, WordPrompts
from inferscope.load.workload import KINDS, PlannedRequest


def lengths(seed: int, *, tokens_per_word: float = 1.0, prompt: str = "20..60") -> Composer:
    words = WordPrompts(
        stream(seed, "prompts"), tokens_per_word=tokens_per_word, shared_tokens=30, share=0.5
    )
    return of_lengths(seed, words, prompt=parse_lengths(prompt), output=parse_lengths("1..9"))


def asks(
    seed: int, compose: Composer, *, num: int = 30, rate_s: float = 5.0
) -> list[PlannedRequest]:
    arrivals = poisson(stream(seed, "arrivals"), rate_s)
    return list(itertools.islice(plan(seed, arrivals, compose, is_traced=True), num))


@settings(max_examples=20, deadline=None)
@given(st.integers(), st.sampled_from([*KINDS, MIX]))
def test_the_same_seed_plans_the_same_load(seed: int, kind: str) -> None:
    assert asks(seed, of_kind(seed, kind)) == asks(seed, of_kind(seed, kind))
    assert asks(seed, lengths(seed)) == asks(seed, lengths(seed))
    assert asks(seed, lengths(seed)) != asks(seed + 1, lengths(seed + 1))


def test_other_lengths_leave_arrivals_and_traces_where_they_were() -> None:
    def without_content(stream: list[PlannedRequest]) -> list[PlannedRequest]:
        return [
            dataclasses.replace(
                ask, kind="", prompt="", max_tokens=0, sections=(), repeated_share=None
            )
            for ask in stream
        ]

    some = without_content(asks(3, lengths(3)))
    assert some == without_content(asks(3, lengths(3, prompt="900", tokens_per_word=2.0)))
    assert some == without_content(asks(3, of_kind(3, MIX)))


def test_a_prompt_knows_how_much_of_it_an_earlier_one_begins_with() -> None:
    for ask in asks(3, of_kind(3, "rag")):
        assert ask.repeated_share == 0.0
    sent: list[str] = []
    for ask in asks(3, of_kind(3, "agent")):
        shared = max((common(ask.prompt, other) for other in sent), default=0)
        assert ask.repeated_share is not None
        by_chance = shared - round(ask.repeated_share * len(ask.prompt))
        assert 0 <= by_chance <= 16, "excerpts of our own source may begin with one indentation"
        sent.append(ask.prompt)
    behind = [ask for ask in asks(3, lengths(3)) if len(ask.sections) == 2]
    assert behind[0].repeated_share == 0.0
    assert [ask.repeated_share for ask in behind][1:] == [
        ask.sections[0][1] / len(ask.prompt) for ask in behind[1:]
    ]


def common(one: str, other: str) -> int:
    """Return how many characters two prompts have in common at their beginning."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def test_the_tokenizer_decides_the_words_and_not_the_lengths() -> None:
    one = asks(3, lengths(3))
    two = asks(3, lengths(3, tokens_per_word=2.0))
    assert [ask.max_tokens for ask in one] == [ask.max_tokens for ask in two]
    for plain, halved in zip(one, two, strict=True):
        assert len(plain.prompt.split()) == pytest.approx(2 * len(halved.prompt.split()), abs=3)


def test_a_prompt_has_the_tokens_asked_for_at_any_length() -> None:
    words = WordPrompts(stream(0, "prompts"), tokens_per_word=1.5, template_tokens=12)
    for num_tokens in (1, 7, 100, 1000, 50_000):
        num_words = len(words.prompt(num_tokens)[0].split())
        assert num_words == max(1, round((num_tokens - 12) / 1.5))
    assert len(WORDS) == len(set(WORDS)) == 243


def test_a_share_of_the_prompts_has_the_prefix_and_the_rest_is_unique() -> None:
    prompts = [ask.prompt.split() for ask in asks(1, lengths(1, prompt="40"), num=400)]
    longest = max(prompts, key=len)
    shared = [prompt for prompt in prompts if prompt[:30] == longest[:30]]
    assert len(shared) / len(prompts) == pytest.approx(0.5, abs=0.08)
    own = [tuple(prompt[30:36]) for prompt in shared]
    own += [tuple(prompt[:6]) for prompt in prompts if prompt[:30] != longest[:30]]
    assert len(set(own)) == len(prompts)


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_a_prompts_sections_cover_it_and_state_what_is_what(kind: str) -> None:
    named = set()
    for ask in asks(2, of_kind(2, kind) if kind else lengths(2), num=60):
        assert sum(num_chars for _, num_chars in ask.sections) == len(ask.prompt)
        named |= {name for name, num_chars in ask.sections if num_chars}
        assert ask.sections[-1][0] == "user"
    assert (
        named
        == {
            "": {"system", "user"},
            "chat": {"user"},
            "rag": {"retrieved", "user"},
            "agent": {"system", "history", "user"},
        }[kind]
    )


def test_the_shared_prefix_is_the_systems() -> None:
    stream = asks(1, lengths(1, prompt="40"), num=40)
    begin = max((ask.prompt for ask in stream), key=len).split()[:30]
    for ask in stream:
        if ask.prompt.split()[:30] == begin:
            assert parts_of(ask, 2.0) == "system=60,user=80"
        else:
            assert parts_of(ask, 2.0) == "user=80"


def test_names_and_traces_are_unique_and_well_formed() -> None:
    stream = asks(5, lengths(5), num=200)
    assert len({ask.name for ask in stream}) == 200
    assert len({ask.traceparent for ask in stream}) == 200
    for ask in stream:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", ask.traceparent)
        assert not re.search(r"-0+-", ask.traceparent)


def test_poisson_gaps_are_exponential_at_the_rate() -> None:
    times = list(itertools.islice(poisson(stream(2, "arrivals"), 20.0), 5000))
    gaps = [late - early for early, late in itertools.pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Of exponential gaps e^-1 are longer than the mean, e^-3 than three times that.
    for multiple, expected in ((1, 0.3679), (3, 0.0498)):
        assert sum(gap > multiple * mean for gap in gaps) / len(gaps) == pytest.approx(
            expected, abs=0.02
        )


def test_every_period_has_its_burst_in_the_middle() -> None:
    assert list(itertools.islice(bursts(2, 30.0), 5)) == [15.0, 15.0, 45.0, 45.0, 75.0]
    merged = heapq.merge(poisson(stream(0, "arrivals"), 2.0), bursts(8, 10.0))
    within = [at_s for at_s in itertools.islice(merged, 500) if at_s <= 30]
    assert within == sorted(within)
    assert [within.count(at_s) for at_s in (5.0, 15.0, 25.0)] == [8, 8, 8]
