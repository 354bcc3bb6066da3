from __future__ import annotations

import itertools
from collections import Counter

import pytest

from inferscope.load.workload import KINDS, PlannedRequest, Workload


def asks(num: int, *, seed: int = 0, rate_s: float = 10.0) -> list[PlannedRequest]:
    return list(itertools.islice(Workload(seed, rate_s=rate_s).asks(), num))


def test_the_same_seed_asks_the_same() -> None:
    assert asks(50, seed=3) == asks(50, seed=3)
    assert asks(50, seed=3) != asks(50, seed=4)


def test_arrivals_come_in_order_at_the_rate_asked_for() -> None:
    stream = asks(4000, rate_s=20.0)
    times = [ask.at_s for ask in stream]
    assert times == sorted(times)
    assert len(stream) / times[-1] == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize("rate_s", [0.5, 2.0, 50.0])
def test_bursts_are_part_of_the_rate(rate_s: float) -> None:
    stream = asks(1500, rate_s=rate_s)
    assert len(stream) / stream[-1].at_s == pytest.approx(rate_s, rel=0.15)


def test_gaps_vary_as_those_of_independent_arrivals_do() -> None:
    times = [ask.at_s for ask in asks(4000, rate_s=20.0)]
    gaps = [late - early for early, late in itertools.pairwise(times) if late > early]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(1.0, abs=0.15)


def test_all_kinds_are_asked_and_bursts_are_chats() -> None:
    stream = asks(500)
    assert set(Counter(ask.kind for ask in stream)) == set(KINDS)
    at_once = Counter(ask.at_s for ask in stream)
    bursts = {at_s for at_s, num in at_once.items() if num > 1}
    assert bursts
    assert {ask.kind for ask in stream if ask.at_s in bursts} == {"chat"}


def test_agents_share_a_prefix_that_documents_do_not() -> None:
    stream = asks(400)
    agents = [ask.prompt for ask in stream if ask.kind == "agent"]
    documents = [ask.prompt for ask in stream if ask.kind == "rag"]
    assert len({prompt[:600] for prompt in agents}) == 1
    assert len({prompt[:200] for prompt in documents}) > 0.9 * len(documents)


def test_names_are_unique() -> None:
    assert len({ask.name for ask in asks(1000)}) == 1000
