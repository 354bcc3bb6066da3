"""Naive rules that split a step without a cost model, as a baseline for the fair split.

Each takes the tokens of the step's requests and its time, and gives whole nanoseconds by request.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.split import to_whole_ns

Ints = NDArray[np.int64]


def by_tokens(tokens: Ints, busy_ns: int) -> Ints:
    """Divide in proportion to scheduled tokens: a prompt pays for the weights that decodes need."""
    return to_whole_ns(tokens.astype(np.float64), busy_ns)


def equal(tokens: Ints, busy_ns: int) -> Ints:
    """Divide equally: a decode pays as much as a prompt of thousands of tokens."""
    return to_whole_ns(np.ones(len(tokens)), busy_ns)
