"""Expected pages, computed from the log to the second, and actual pages, computed by promtool."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests import debian

HOUR_S = 3600.0


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the benchmark, which imports its scenarios as a program does."""
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("alert_trust")


def of(trust: ModuleType, *pieces: tuple[float, float, float], **more: Any) -> Any:
    """Return hours with requests at even spaces: of each piece minutes, good and bad per second."""
    start_s, first_s, at_s = [], [], 0.0
    for minutes, good_s, bad_s in pieces:
        for rate_s, wait_s in ((good_s, 0.1), (bad_s, 2.0)):
            times = np.arange(at_s, at_s + minutes * 60, 1 / rate_s) if rate_s else np.array([])
            start_s.append(times)
            first_s.append(times + wait_s)
        at_s += minutes * 60
    starts, firsts = np.concatenate(start_s), np.concatenate(first_s)
    order = np.argsort(starts)
    engine = trust.Engine("e0", 0.0, np.inf, starts[order], firsts[order] + 3.0)
    engine.decide(firsts[order])
    seen_s = np.maximum(np.arange(round(at_s) + 1) - 1.0, 0.0)
    fields = {"kind": "breach", "seed": 0, "incident_s": None, "seen_s": seen_s, **more}
    return trust.Scenario(length_s=at_s, engines=(engine,), **fields)


def test_a_page_is_owed_where_a_budget_burns_for_long_and_allowed_sooner(
    trust: ModuleType,
) -> None:
    it = of(trust, (60, 1.0, 0.0), (30, 0.5, 0.5), (60, 1.0, 0.0))
    ((expected_s, expected_until_s),) = trust.expected_pages(it)
    ((allowed_s, allowed_until_s),) = trust.allowed(it)
    # 6 % of what was since the beginning, half of all being bad: after 8 minutes and a bit.
    assert 60 + 0.9 * 8 < allowed_s / 60 < expected_s / 60 < 60 + 1.3 * 8
    assert 90 < expected_until_s / 60 < allowed_until_s / 60 < 121


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (((150, 1.0, 0.002),), "a fifth of what is allowed"),
        (((60, 1.0, 0.0), (0.15, 0.0, 1.0), (90, 1.0, 0.0)), "nine bad ones"),
        (((150, 0.05, 0.05),), "too few requests for a page"),
    ],
)
def test_nothing_is_allowed_where(trust: ModuleType, pieces: Any, why: str) -> None:
    assert trust.allowed(of(trust, *pieces)) == [], why


def test_a_collector_behind_for_long_owes_a_page_and_for_a_minute_allows_none(
    trust: ModuleType,
) -> None:
    def stuck(minutes: float) -> Any:
        seen_s = np.arange(round(2 * HOUR_S) + 1, dtype=float)
        until_s = round(HOUR_S + 60 * minutes)
        seen_s[round(HOUR_S) : until_s] = HOUR_S
        return of(trust, (120, 1.0, 0.0), seen_s=seen_s)

    ((expected_s, until_s),) = trust.expected_pages(stuck(10))
    assert HOUR_S + 60 < expected_s < HOUR_S + 80
    assert until_s == HOUR_S + 595
    assert trust.allowed(stuck(1.5)) == []


def test_a_scheduler_that_admits_nothing_owes_a_page_and_a_full_engine_does_not(
    trust: ModuleType, tmp_path: Path
) -> None:
    at_s = (1200.0, 1500.0)
    it = of(trust, (35, 0.05, 0.0), kind="livelock", incident_s=at_s)
    (engine,) = it.engines
    is_held = (engine.start_s >= at_s[0]) & (engine.start_s < at_s[1])
    engine.admitted_s = np.where(is_held, at_s[1], engine.start_s)
    engine.end_s = np.maximum(engine.end_s, engine.admitted_s + 3.0)
    # A queue behind full slots: nothing is admissible.
    assert (trust.expected_pages(it), trust.allowed(it)) == ([], [])
    engine.stuck_s = at_s
    ((expected_s, until_s),) = trust.expected_pages(it)
    assert at_s[0] + 60 < expected_s < at_s[0] + 90
    assert until_s == at_s[1] - 5
    debian.program("promtool")
    trust.write_rules(tmp_path)
    found = trust.score(it, trust.pages(trust.firing(it, tmp_path)))
    assert (found.num_owed, found.num_missed, found.num_false, found.num_repeated) == (1, 0, 0, 0)
    ((_, fired),) = found.pages
    assert fired == ["InferScopeNotAdmitting"]


def test_missed_false_and_repeated_are_counted(trust: ModuleType) -> None:
    it = of(trust, (60, 1.0, 0.0), (30, 0.5, 0.5), (60, 1.0, 0.0))
    ((expected_s, _),) = trust.expected_pages(it)
    alert = ["InferScopeBudgetBurnsFast/ttft"]

    def scored(*spans: tuple[float, float]) -> tuple[int, int, int]:
        found = trust.score(it, [(span, alert) for span in spans])
        return (found.num_missed, found.num_false, found.num_repeated)

    assert scored((expected_s, expected_s + 600)) == (0, 0, 0)
    assert scored() == (1, 0, 0)
    assert scored((600.0, 700.0)) == (1, 1, 0)
    assert scored((expected_s, expected_s), (expected_s + 900, expected_s + 930)) == (0, 0, 1)


def test_blindness_holds_back_budgets_and_gaps_are_bridged(trust: ModuleType) -> None:
    burns, blind = "InferScopeBudgetBurnsFast/ttft", "InferScopeBlind"
    fires = {30.0: [burns], 60.0: [blind, burns], 240.0: [burns], 900.0: [blind, burns]}
    assert trust.pages(fires) == [((30.0, 240.0), [burns]), ((900.0, 900.0), [blind])]


@pytest.mark.thorough
def test_every_kind_is_drawn_the_same_again(trust: ModuleType) -> None:
    for kind in trust.KINDS:
        one, other = (trust.series(trust.scenario(kind, 3)) for _ in range(2))
        assert one == other
        num_scrapes = {len(re.sub(r"_x\d+", "", values).split()) for values in one.values()}
        assert max(num_scrapes) - min(num_scrapes) <= 1  # each host has moments of its own


@pytest.mark.thorough
def test_the_rules_page_for_what_is_owed_and_not_for_what_is_not_allowed(
    trust: ModuleType, tmp_path: Path
) -> None:
    debian.program("promtool")
    trust.write_rules(tmp_path)
    burning = of(trust, (60, 1.0, 0.0), (30, 0.5, 0.5), (60, 1.0, 0.0))
    found = trust.score(burning, trust.pages(trust.firing(burning, tmp_path)))
    assert (found.num_owed, found.num_missed, found.num_false, found.num_repeated) == (1, 0, 0, 0)
    ((at_s, fired),) = found.pages
    assert fired == ["InferScopeBudgetBurnsFast/ttft"]
    assert trust.allowed(burning)[0][0] < at_s < trust.expected_pages(burning)[0][0] + 300
    quiet = of(trust, (90, 1.0, 0.002))
    assert trust.firing(quiet, tmp_path) == {}


def test_other_output_of_promtool_is_no_silence(trust: ModuleType) -> None:
    with pytest.raises(SystemExit, match="unknown field"):
        trust.parse_report("  FAILED:\nyaml: unknown field")
