from __future__ import annotations

import numpy as np
import pytest

from inferscope.cost.routing import even_busiest


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token"),
    [(1, 8, 2), (4, 8, 2), (64, 8, 2), (8, 128, 8), (512, 128, 8), (100, 4, 4)],
)
def test_busiest_expert_of_an_even_router_has_the_load_of_random_choices(
    num_tokens: int, num_experts: int, per_token: int
) -> None:
    draw = np.random.default_rng(3)
    busiest = []
    for _ in range(200):
        ranks = draw.random((num_tokens, num_experts)).argsort(axis=1)
        busiest.append(np.bincount(ranks[:, :per_token].ravel()).max())
    expected = even_busiest(num_tokens, num_experts, per_token)
    assert expected == pytest.approx(np.mean(busiest), rel=0.08)
    assert num_tokens * per_token / num_experts <= expected <= num_tokens


def test_long_steps_and_none_are_bounded() -> None:
    assert even_busiest(0, 8, 2) == 0.0
    assert even_busiest(1 << 20, 8, 2) == (1 << 20) / 4
    assert even_busiest(60_000, 128, 8) == pytest.approx(60_000 / 16, rel=0.05)
