from __future__ import annotations

import random

import numpy as np
import pytest

from inferscope.fold import windows
from inferscope.fold.windows import SECOND_NS, Windows


@pytest.mark.parametrize("num_durations", [1, 20, 200, 5000])
def test_durations_count_alike_one_by_one_and_many_at_once(num_durations: int) -> None:
    draw = random.Random(num_durations)
    durations = [round(10 ** draw.uniform(0, 12)) for _ in range(num_durations)]
    at_ns = np.sort(np.array([draw.randint(0, 2 * SECOND_NS) for _ in durations]))
    at_once, noted, one_by_one = Windows(), Windows(), Windows()
    at_once.observe("tbt", np.array(durations), at_ns)
    for duration_ns, each_ns in zip(durations, at_ns.tolist(), strict=True):
        noted.observe_one("tbt", duration_ns, each_ns)
        one_by_one.observe_one("tbt", duration_ns, each_ns)
        one_by_one.at(each_ns).settle()
    for window_ns in (SECOND_NS, 3 * SECOND_NS):
        found, expected, settled = (
            windows.quantiles("tbt", each.last(window_ns)) for each in (at_once, noted, one_by_one)
        )
        assert found == expected == settled
    assert found.num == len(durations)
    assert found.max_ns == max(durations)
