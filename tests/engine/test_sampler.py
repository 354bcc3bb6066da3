from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.request import Request, Sampling
from inferscope.engine.sampler import choose_tokens, uniform
from inferscope.records import RequestIndex

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def request(seed: int = 0, num_tokens: int = 3, **sampling: Any) -> Request:
    return Request(
        index=RequestIndex(0),
        request_id="0",
        tokens=[1] * num_tokens,
        num_prompt=3,
        max_tokens=8,
        sampling=Sampling(**sampling),
        stop_ids=frozenset(sampling.get("stop_token_ids", ())),
        seed=seed,
    )


def choose(*requests: Request, logits: torch.Tensor = LOGITS) -> list[int]:
    positions = [len(request.tokens) for request in requests]
    rows = logits.repeat(len(requests), 1)
    chosen: list[int] = choose_tokens(rows, requests, positions).tolist()
    return chosen


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose(request()) == [1]


def test_the_first_of_equal_logits_is_taken() -> None:
    rounded = torch.arange(2000.0).bfloat16().repeat(2)
    assert (rounded == rounded.max()).sum() > 2
    assert choose(request(), request(), logits=rounded) == [int(rounded.argmax())] * 2


@given(
    temperature=st.floats(0.0, 9e-6, exclude_max=True),
    top_k=st.integers(0, 5),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_temperature_near_zero_takes_the_likeliest(
    temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    assert choose(request(seed, temperature=temperature, top_k=top_k, top_p=top_p)) == [1]
    assert choose(request(seed, temperature=1e-39)) == [1]


@given(
    temperature=st.floats(0.0, allow_infinity=False),
    top_k=st.integers(0, 2**63 - 1),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.integers(0, 16),
    stop_token_ids=st.lists(st.integers(0, 4)),
    scale=st.sampled_from([0.0, 1.0, 1e30, float("inf"), float("nan")]),
)
def test_every_valid_sampling_chooses_a_token(
    stop_token_ids: list[int], scale: float, **sampling: Any
) -> None:
    sampled_request = request(stop_token_ids=tuple(stop_token_ids), **sampling)
    (token,) = choose(sampled_request, logits=LOGITS * scale)
    assert 0 <= token < 5


def test_choice_does_not_depend_on_the_batch() -> None:
    mine = [request(seed=7, num_tokens=n, temperature=1.5) for n in range(3, 40)]
    alone = [choose(one)[0] for one in mine]
    others = [request(), request(seed=1, temperature=0.7, top_k=2), request(temperature=2.0)]
    assert [choose(*others, one)[-1] for one in mine] == alone
    assert len(set(alone)) > 1


def test_frequencies_follow_the_distribution() -> None:
    num_draws = 4000
    drawn = choose(*(request(seed=seed, temperature=1.0) for seed in range(num_draws)))
    frequencies = torch.bincount(torch.tensor(drawn), minlength=5) / num_draws
    assert torch.allclose(frequencies, LOGITS.softmax(dim=0), atol=0.025)


def test_top_k_keeps_k_tokens() -> None:
    drawn = choose(*(request(seed=seed, temperature=5.0, top_k=2) for seed in range(200)))
    assert set(drawn) == {1, 3}


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    # 0.64, 0.23, 0.09, ...: the second token is needed to reach 0.7, the third is not.
    drawn = choose(*(request(seed=seed, temperature=1.0, top_p=0.7) for seed in range(200)))
    assert set(drawn) == {1, 3}


def test_tiny_top_p_keeps_the_likeliest() -> None:
    assert choose(request(temperature=1.0, top_p=1e-9)) == [1]


def test_stop_token_waits_for_the_minimum() -> None:
    assert choose(request(min_tokens=2, stop_token_ids=(1,))) == [3]
    assert choose(request(min_tokens=2, num_tokens=5, stop_token_ids=(1,))) == [1]


@given(seed=st.integers(0, 2**64), position=st.integers(0, 2**20))
def test_uniform_numbers_stay_below_one(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) != uniform(seed, position + 1)
