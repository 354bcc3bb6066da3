from __future__ import annotations

import itertools

import pytest

from inferscope.fold.fold import Collector
from inferscope.records import EngineInfo, RingOpened

WORDS = {"frontend": "as served", "worker": "by path", "core": "the model"}


@pytest.mark.parametrize("order", list(itertools.permutations(WORDS)))
def test_the_cores_engine_info_is_used_in_any_order_of_rings(order: tuple[str, ...]) -> None:
    fold = Collector()
    for number, role in enumerate(order, 1):
        fold.fold(0, RingOpened(number, number, "e", role, 0, number, "host", "boot", 1, 1))
        fold.fold(number, EngineInfo(number, "made-up", model=WORDS[role]))
    info = fold.engines["e"].info
    assert info is not None
    assert info.model == "the model"


def test_without_a_core_a_workers_engine_info_replaces_a_front_ends() -> None:
    fold = Collector()
    for number, role in enumerate(("worker", "frontend"), 1):
        fold.fold(0, RingOpened(number, number, "e", role, 0, number, "host", "boot", 1, 1))
        fold.fold(number, EngineInfo(number, "made-up", model=WORDS[role]))
    info = fold.engines["e"].info
    assert info is not None
    assert info.model == "by path"
