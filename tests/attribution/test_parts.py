from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.prompt_parts import OUTPUT, PromptCost, PromptPart, part_spans
from inferscope.cost.flops import FlopRates, flop_rates
from inferscope.records import Shape

RATES: FlopRates = flop_rates(Shape(2, 64, 4, 2, 16, 128, 512, 16, 16, 16))
NAMES = st.sampled_from(["system", "history", "retrieved", "tools", "user", "output", "mine"])
DECLARED_PARTS = st.lists(st.tuples(NAMES, st.integers(1, 40)), min_size=1, max_size=12)


@dataclass
class Chunk:
    """A row of a step."""

    tokens: int
    context: int
    share_ns: int
    own_ns: int
    pair_share: float
    is_recomputed: bool


@dataclass
class Life:
    """A labelled prompt, and all prefills of it."""

    declared_parts: list[tuple[str, int]]
    prompt_tokens: int
    cached_tokens: int
    chunks: list[Chunk]

    def cost(self) -> PromptCost:
        cost = PromptCost(self.declared_parts, self.prompt_tokens)
        for one in self.chunks:
            cost.add(
                one.tokens,
                one.context,
                share_ns=one.share_ns,
                own_ns=one.own_ns,
                pair_share=one.pair_share,
                is_recomputed=one.is_recomputed,
            )
            cost.count(one.tokens, one.context, 1, RATES)
        return cost

    @property
    def prefill_ns(self) -> int:
        return sum(one.share_ns for one in self.chunks)

    def parts(self, *, ttft_own_ns: int | None = None) -> tuple[PromptPart, ...]:
        return self.cost().parts(
            self.prefill_ns,
            cached_tokens=self.cached_tokens,
            ttft_own_ns=ttft_own_ns,
            has_flops=True,
        )


@st.composite
def life_cases(draw: st.DrawFn) -> Life:
    """Any chunking behind any cache, with what preemptions threw away computed again."""
    parts = draw(DECLARED_PARTS)
    off = draw(st.integers(-10, 10))
    prompt_tokens = max(1, sum(tokens for _, tokens in parts) + off)
    cached = draw(st.integers(0, prompt_tokens - 1))
    chunks, at, seen = [], cached, cached
    last = prompt_tokens + draw(st.integers(0, 8))
    for _ in range(draw(st.integers(0, 12))):
        limit = seen if at < seen else prompt_tokens
        if at < limit:
            tokens = draw(st.integers(1, limit - at))
            chunks.append(
                Chunk(
                    tokens,
                    at,
                    draw(st.integers(0, 10**12)),
                    draw(st.integers(0, 10**9)),
                    draw(st.floats(0, 1)),
                    at < seen,
                )
            )
            at += tokens
        elif draw(st.booleans()):
            seen = max(seen, last) if at >= prompt_tokens else max(seen, at)
            at = draw(st.integers(0, cached))
        seen = max(seen, at)
    return Life(parts, prompt_tokens, cached, chunks)


def by_token(life: Life) -> dict[str, float]:
    """Divide every chunk token by token, each seeing all that stand before it."""
    names = [name for name, tokens in life.declared_parts for _ in range(tokens)][
        : life.prompt_tokens
    ]
    names += ["other"] * (life.prompt_tokens - len(names))
    spent: dict[str, float] = {}
    for one in life.chunks:
        seen = [one.context + j + 1 for j in range(one.tokens)]
        for position, visible in zip(range(one.context, 10**9), seen, strict=False):
            name = names[position] if position < len(names) else OUTPUT
            weight = (1 - one.pair_share) / one.tokens + one.pair_share * visible / sum(seen)
            spent[name] = spent.get(name, 0.0) + weight * one.share_ns
    return spent


@given(life_cases(), st.integers(0, 10**12))
def test_parts_sum_to_what_the_request_was_charged_whatever_was_chunked_cached_or_lost(
    life: Life, ttft_own_ns: int
) -> None:
    parts = life.parts(ttft_own_ns=ttft_own_ns)
    assert sum(part.compute_ns for part in parts) == life.prefill_ns
    assert sum(part.tokens for part in parts) == life.prompt_tokens
    assert sum(part.cached_tokens for part in parts) == life.cached_tokens
    again = sum(one.tokens for one in life.chunks if one.is_recomputed)
    assert sum(part.recomputed_tokens for part in parts) == again
    flops = sum(RATES.of_slices(one.tokens, one.context, 1) for one in life.chunks)
    assert sum(part.flops or 0 for part in parts) == flops
    delays = [part.ttft_ns for part in parts if part.ttft_ns is not None]
    is_computed = any(one.own_ns and not one.is_recomputed for one in life.chunks)
    assert delays == [] or sum(delays) == ttft_own_ns
    assert bool(delays) == (is_computed or not ttft_own_ns)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)


@given(life_cases())
def test_each_part_pays_for_its_own_positions(life: Life) -> None:
    expected = by_token(life)
    for part in life.parts():
        exact = expected.pop(part.name, 0.0)
        assert abs(part.compute_ns - exact) <= 1 + 1e-9 * exact
    assert sum(expected.values()) == 0


@given(life_cases())
def test_what_came_from_the_cache_costs_nothing(life: Life) -> None:
    for part in life.parts(ttft_own_ns=10**6):
        if part.cached_tokens == part.tokens and not part.recomputed_tokens:
            assert (part.compute_ns, part.ttft_ns or 0, part.flops) == (0, 0, 0)


@given(life_cases(), st.data())
def test_a_part_cut_in_two_costs_what_it_cost_whole(life: Life, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(life.declared_parts) - 1))
    name, tokens = life.declared_parts[at]
    first = data.draw(st.integers(0, tokens))
    halves = [("first_half", first), ("second_half", tokens - first)]
    parts = [*life.declared_parts[:at], *halves, *life.declared_parts[at + 1 :]]
    whole = {part.name: part.compute_ns for part in life.parts()}
    cut = {part.name: part.compute_ns for part in Life(parts, *_rest(life)).parts()}
    apart = sum(cut.pop(half, 0) for half in ("first_half", "second_half"))
    assert abs(apart + cut.pop(name, 0) - whole.pop(name, 0)) <= len(parts) + 1
    assert all(abs(cut.get(other, 0) - ns) <= 1 for other, ns in whole.items())


def _rest(life: Life) -> tuple[int, int, list[Chunk]]:
    return life.prompt_tokens, life.cached_tokens, life.chunks


def test_a_later_part_costs_more_for_it_sees_what_stands_before_it() -> None:
    cost = PromptCost([("system", 100), ("user", 100)], 200)
    cost.add(200, 0, share_ns=10**6, own_ns=10**6, pair_share=0.5, is_recomputed=False)
    parts = cost.parts(10**6, cached_tokens=0, ttft_own_ns=500, has_flops=False)
    pairs = 200 * 201 / 2
    late = 0.5 * 0.5 + 0.5 * (pairs - 100 * 101 / 2) / pairs
    assert [part.compute_ns for part in parts] == [
        10**6 - round(late * 10**6),
        round(late * 10**6),
    ]
    assert [part.ttft_ns for part in parts] == [500 - round(500 * late), round(500 * late)]
    assert [part.flops for part in parts] == [None, None]


def test_parts_of_one_name_are_one_part() -> None:
    declared = [("history", 10), ("tools", 5), ("history", 10)]
    cost = PromptCost(declared, 25)
    cost.add(25, 0, share_ns=2500, own_ns=0, pair_share=0.0, is_recomputed=False)
    history, tools = cost.parts(2500, cached_tokens=12, ttft_own_ns=None, has_flops=False)
    assert (history.name, history.tokens, history.cached_tokens) == ("history", 20, 10)
    assert (tools.name, tools.tokens, tools.cached_tokens) == ("tools", 5, 2)
    assert (history.compute_ns, tools.compute_ns) == (2000, 500)


def test_a_prompt_that_was_labelled_after_its_first_chunk_has_no_parts() -> None:
    cost = PromptCost([("user", 10)], 10)
    cost.add(5, 5, share_ns=700, own_ns=0, pair_share=0.0, is_recomputed=False)
    assert cost.parts(1400, cached_tokens=0, ttft_own_ns=None, has_flops=False) == ()
    assert cost.parts(700, cached_tokens=0, ttft_own_ns=None, has_flops=False) != ()


@pytest.mark.parametrize(
    ("declared", "prompt_tokens", "laid"),
    [
        ([("system", 3), ("user", 2)], 5, [("system", 3), ("user", 5)]),
        ([("system", 3), ("user", 2)], 4, [("system", 3), ("user", 4)]),
        ([("system", 3), ("user", 2)], 3, [("system", 3)]),
        ([("system", 3)], 5, [("system", 3), ("other", 5)]),
        ([("system", -3), ("user", 2)], 2, [("user", 2)]),
        ([], 2, [("other", 2)]),
        ([("user", 2**64)], 7, [("user", 7)]),
        ([("user", 7)], 0, []),
    ],
)
def test_declared_parts_cover_the_prompt_and_no_more(
    declared: list[tuple[str, int]], prompt_tokens: int, laid: list[tuple[str, int]]
) -> None:
    assert part_spans(declared, prompt_tokens) == laid
