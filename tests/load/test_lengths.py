from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.errors import BadInput
from inferscope.load.lengths import MOST_TOKENS, parse_lengths

tokens = st.integers(1, MOST_TOKENS)
widths = st.floats(0, 1e6, allow_nan=False)
written = st.one_of(
    tokens.map(str),
    st.tuples(tokens, tokens).map(lambda pair: f"{min(pair)}..{max(pair)}"),
    st.tuples(st.sampled_from(["normal", "lognormal"]), tokens, widths).map(
        lambda parts: f"{parts[0]}:{parts[1]},{parts[2]!r}"
    ),
)


def draws(text: str, num: int = 4000) -> list[int]:
    random = Random(1)
    lengths = parse_lengths(text)
    return [lengths.draw(random) for _ in range(num)]


@given(written)
def test_every_draw_is_a_length_a_prompt_can_have(text: str) -> None:
    assert all(1 <= length <= MOST_TOKENS for length in draws(text, 20))


@given(written)
def test_the_same_random_numbers_give_the_same_lengths(text: str) -> None:
    assert draws(text, 10) == draws(text, 10)


def test_one_number_is_that_length() -> None:
    assert set(draws("512")) == {512}


def test_a_range_is_even_and_has_both_its_ends() -> None:
    found = draws("3..6")
    assert set(found) == {3, 4, 5, 6}
    assert all(900 < found.count(length) < 1100 for length in set(found))


def test_a_normal_has_its_mean_and_deviation() -> None:
    found = draws("normal:512,100")
    assert statistics.mean(found) == pytest.approx(512, abs=6)
    assert statistics.stdev(found) == pytest.approx(100, rel=0.05)


def test_a_lognormal_has_its_median_and_two_thirds_within_sigma() -> None:
    found = draws("lognormal:512,0.5")
    assert statistics.median(found) == pytest.approx(512, rel=0.05)
    within = sum(512 * 0.6065 <= length <= 512 * 1.6487 for length in found)
    assert within / len(found) == pytest.approx(0.683, abs=0.02)


def test_what_falls_below_one_becomes_one() -> None:
    assert min(draws("normal:1,5")) == 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "many", "5..2", "0..4", "3..", "..3", "normal:5", "normal:5,-1",
     "normal:0,1", "normal:nan,1", "normal:5,inf", "lognormal:5,nan", "poisson:3,1", "1000001"],
)  # fmt: skip
def test_what_is_no_length_is_named_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not a token length.*lognormal:MEDIAN,SIGMA") as caught:
        parse_lengths(text)
    assert repr(text) in str(caught.value)
