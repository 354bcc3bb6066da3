"""Load of the busiest expert if each token chose its experts at random.

    E[max] = Σ over x ≥ 0 of 1 - F(x)^experts        F: binomial(tokens, per_token / experts)

The experts of a token are distinct, and the formula takes loads as independent: that is within 2 %
from 64 tokens on, and 6 % low for 4. Few tokens make an even router look uneven: one token loads
`per_token` experts and no other.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

import numpy as np

_MOST_TOKENS = 1 << 16
"""Number of tokens from which the busiest expert of an even router has the mean load."""


@lru_cache(maxsize=8192)
def even_busiest(num_tokens: int, num_experts: int, per_token: int) -> float:
    """Return the expected number of tokens of the busiest expert in one layer."""
    if num_tokens <= 0 or per_token >= num_experts or num_tokens >= _MOST_TOKENS:
        return max(0, num_tokens) * per_token / num_experts
    share = per_token / num_experts
    numbers = np.arange(1, num_tokens + 1)
    ratios = (num_tokens + 1 - numbers) / numbers * (share / (1 - share))
    log_pmf = np.concatenate([[0.0], np.log(ratios).cumsum()]) + num_tokens * log(1 - share)
    below = np.exp(log_pmf).cumsum().clip(max=1.0)
    expected: float = (1.0 - below[:-1] ** num_experts).sum().item()
    return max(expected, -(-num_tokens * per_token // num_experts))
