from __future__ import annotations

from typing import Any

import pytest

from inferscope.engine import BadRequest, Sampling
from tests.engine.steps import make_request


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_impossible_sampling_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(values))):
        Sampling(**values)


def test_todo_counts_tokens_that_are_not_computed() -> None:
    request = make_request(0, [1, 2, 3])
    assert (request.todo, request.num_output) == (3, 0)
    request.computed = 3
    request.tokens.append(4)
    assert (request.todo, request.num_output) == (1, 1)


def test_request_finishes_at_a_stop_token_or_its_length() -> None:
    request = make_request(0, [1], max_tokens=3)
    request.stop_ids = frozenset([9])
    request.tokens += [5, 9]
    assert request.finish_after(5) is None
    assert request.finish_after(9) == "stop"
    request.tokens.append(6)
    assert request.finish_after(6) == "length"


@pytest.mark.parametrize(
    ("prompt", "output", "num_reasoning"),
    [
        ([1, 2], [5, 9, 6], 2),
        ([1, 2], [9], 1),
        ([1, 2], [5, 9, 9, 6], 2),
        ([1, 2], [5, 6], 2),
        ([1, 9], [5, 6], 0),
        ([1, 9], [5, 9, 6], 2),
        ([1, 2], [], 0),
    ],
)
def test_reasoning_ends_with_the_first_end_token(
    prompt: list[int], output: list[int], num_reasoning: int
) -> None:
    request = make_request(0, prompt)
    request.tokens += output
    assert request.reasoning_tokens(9) == num_reasoning


def test_a_token_that_is_not_sampled_yet_is_no_reasoning() -> None:
    request = make_request(0, [1, 2])
    request.take_token(5)
    request.expect_token()
    assert (request.num_output, request.reasoning_tokens(9)) == (1, 1)
