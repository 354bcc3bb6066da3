"""Two ranks in processes of their own, one of which hangs, as a scrape tells it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.daemon.running import Collector, collecting, engine_by_hand, eventually

pytestmark = pytest.mark.thorough

RANK = Path(__file__).with_name("rank_by_hand.py")


def overdue_s(collector: Collector) -> dict[str, float]:
    series = collector.scrape().all("inferscope_rank_overdue_seconds")
    return {labels["rank"]: value for labels, value in series}


def test_the_rank_that_hangs_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with (
        engine_by_hand(rings, "pair") as core,
        engine_by_hand(rings, "pair", script=RANK) as rank,
        collecting(rings, tmp_path, "pins: off\n") as collector,
    ):
        core.do("begin a")
        rank.do("step 0")
        eventually(lambda: overdue_s(collector) == {"0": 0, "1": 0})
        rank.process.send_signal(signal.SIGSTOP)
        core.do("go a 1")
        eventually(lambda: overdue_s(collector)["1"] > 5)
        assert overdue_s(collector)["0"] == 0
        rank.process.send_signal(signal.SIGCONT)
        rank.do("step 1")
        eventually(lambda: overdue_s(collector) == {"0": 0, "1": 0})
        core.do("go a 1")
        rank.do("hang 2")
        eventually(lambda: overdue_s(collector)["1"] > 2)
        assert overdue_s(collector)["0"] == 0
        assert collector.scrape().one("inferscope_source_up", source="probe") == 1
