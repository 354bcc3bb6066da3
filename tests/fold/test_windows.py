from __future__ import annotations

import random

import pytest

from inferscope.fold import windows
from inferscope.fold.windows import Windows


@pytest.mark.parametrize("num_durations", [1, 20, 200, 5000])
def test_durations_count_alike_one_by_one_and_many_at_once(num_durations: int) -> None:
    draw = random.Random(num_durations)
    told = [(round(10 ** draw.uniform(0, 12)), draw.randint(1, 64)) for _ in range(num_durations)]
    at_once, one_by_one = Windows(), Windows()
    for duration_ns, num in told:
        at_once.at(0).durations["tbt"].add(duration_ns, num)
        one_by_one.at(0).durations["tbt"].add(duration_ns, num)
        one_by_one.at(0).settle()
    found, expected = (windows.quantiles("tbt", each.last(1)) for each in (at_once, one_by_one))
    assert found == expected
    assert found.num == sum(num for _, num in told)
    assert found.max_ns == max(duration_ns for duration_ns, _ in told)
