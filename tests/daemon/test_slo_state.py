"""Objectives over collectors that come and go: nothing is counted twice, budgets survive."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from inferscope.daemon import slo_state as slo_state_module
from inferscope.daemon.slo_state import CATCH_UP_NS, SloTracker
from inferscope.records import CAUSES
from inferscope.slo import Objective, Objectives
from inferscope.slo.tally import SHED, UNKNOWN
from tests.daemon.rings import SECOND_NS, Time
from tests.daemon.running import Collector, Scrape, collecting, engine_by_hand, eventually
from tests.slo.requests import FINE

pytestmark = pytest.mark.thorough

_SLO = """
slos:
  - {metric: ttft, threshold: 60s, objective: 90%, window: 1d}
  - {name: tight, metric: ttft, threshold: 1us, objective: 50%, window: 1d}
  - {metric: availability, objective: 90%, window: 1d}
  - {metric: goodput, objective: 90%, window: 1d}
"""
_HUNG = "slos: [{metric: ttft, threshold: 1s, objective: 90%, window: 1d}]"


def config(folder: Path, text: str = _SLO) -> str:
    (folder / "slo.yaml").write_text(text, encoding="utf-8")
    return "slo: slo.yaml\npins: off\n"


def counts(scrape: Scrape, slo: str, *, family: str = "requests_total") -> tuple[float, float]:
    """Return good and bad."""
    name = f"inferscope_slo_{family}"
    good, bad = (scrape.total(name, slo=slo, result=result) for result in ("good", "bad"))
    return good, bad


def in_window(collector: Collector, slo: str) -> tuple[float, float]:
    return counts(collector.scrape(), slo, family="window_requests")


def test_what_was_counted_before_a_collector_was_killed_is_not_counted_again(
    tmp_path: Path,
) -> None:
    rings, settings = tmp_path / "rings", config(tmp_path)
    with collecting(rings, tmp_path, settings) as first, engine_by_hand(rings, "steady") as engine:
        engine.do("begin w", "end w stop", "begin a", "go a 3", "end a stop")
        engine.do("begin b", "end b error", "begin c", "begin x", "end x client_cancel")
        eventually(lambda: sum(counts(first.scrape(), "tight")) == 3)
        seen = first.scrape()
        assert counts(seen, "availability") == (2, 1)
        assert counts(seen, "goodput") == (0, 3)  # of `a`, `b` and `x` no token was in time
        assert counts(seen, "ttft") == (3, 0)
        assert counts(seen, "tight") == (0, 3)
        for slo, num in (("ttft", 1), ("availability", 0), ("goodput", 1)):
            assert seen.one("inferscope_slo_warmup_requests_total", slo=slo) == num
        causes = seen.all("inferscope_slo_breaches_total", slo="goodput")
        assert {labels["cause"] for labels, _ in causes} == {*CAUSES, SHED, UNKNOWN}
        assert sum(num for _, num in causes) == 3
        assert seen.one("inferscope_slo_threshold_seconds", slo="ttft") == 60
        assert seen.one("inferscope_slo_objective_ratio", slo="tight") == 0.5
        remaining = "inferscope_slo_budget_remaining_ratio"
        assert seen.one(remaining, slo="ttft") == 1.0
        assert seen.one(remaining, slo="tight") == pytest.approx(-1.0)
        first.process.kill()
        first.process.wait()
        engine.do("begin d", "end d stop")
        with collecting(rings, tmp_path, settings) as second:
            eventually(lambda: in_window(second, "availability") == (3, 1))
            eventually(lambda: counts(second.scrape(), "availability") == (1, 0))  # `d` alone
            assert second.scrape().one("inferscope_slo_uncounted_seconds") == 0
            engine.do("end c stop", "begin e")
            eventually(lambda: in_window(second, "availability") == (4, 1))
            assert second.stop() == 0
        engine.do("begin f")
        engine.kill()
        with collecting(rings, tmp_path, settings) as third:
            eventually(lambda: in_window(third, "availability") == (4, 3))
            breaches = "inferscope_slo_breaches_total"
            eventually(lambda: third.scrape().total(breaches, slo="goodput") == 2)
            lost = third.scrape()
            for slo in ("availability", "goodput"):
                assert counts(lost, slo)[1] == 2
                assert lost.total(breaches, slo=slo) == 2
                assert lost.one(breaches, slo=slo, cause="engine_lost") == 2
            assert third.stop() == 0
    state = rings / f".collector-{os.geteuid()}" / "slo-state.json"
    assert state.stat().st_mode & 0o077 == 0
    assert {budget["name"] for budget in json.loads(state.read_bytes())["budgets"]} == {
        *("ttft", "tight", "availability", "goodput")
    }


def test_all_in_flight_in_a_killed_engine_are_bad(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with collecting(rings, tmp_path, config(tmp_path)) as collector:
        with engine_by_hand(rings, "victim") as engine:
            engine.do("begin w", "end w stop", "begin a", "go a 2", "queue b", "begin c")
            eventually(lambda: in_window(collector, "availability") == (1, 0))
        eventually(lambda: in_window(collector, "availability") == (1, 3))
        seen = collector.scrape().of_engine("victim")
        for slo in ("availability", "goodput"):
            assert counts(seen, slo)[1] == 3
            assert seen.one("inferscope_slo_breaches_total", slo=slo, cause="engine_lost") == 3
            assert seen.total("inferscope_slo_breaches_total", slo=slo) == 3


def test_a_hung_request_is_bad_once_under_any_collector_at_its_end(tmp_path: Path) -> None:
    rings, settings = tmp_path / "rings", config(tmp_path, _HUNG)
    with collecting(rings, tmp_path, settings) as first, engine_by_hand(rings, "steady") as engine:
        engine.do("begin w", "end w stop", "queue h")
        eventually(lambda: in_window(first, "ttft")[1] == 1)
        first.process.kill()
        first.process.wait()
        with collecting(rings, tmp_path, settings) as second:
            eventually(lambda: second.scrape().all("inferscope_slo_requests_total") != [])
            engine.do("end h client_cancel", "queue i")
            eventually(lambda: in_window(second, "ttft")[1] == 2)
            seen = second.scrape()
            # The first collector has counted the request, this one its cause.
            assert counts(seen, "ttft")[1] == 1
            assert seen.total("inferscope_slo_breaches_total", slo="ttft") == 1


_OBJECTIVE = Objective("ttft", "ttft", 1_000_000_000, 0.9, 86400 * 10**9)


def kept(folder: Path, time: Time, *objectives: Objective) -> tuple[SloTracker, list[str]]:
    lines: list[str] = []
    path = folder / "state.json"
    return SloTracker(Objectives(objectives), path, clock=time, log_line=lines.append), lines


def spend(promises: SloTracker, time: Time) -> None:
    judge = promises.judge("e", counts_from_ns=0)
    judge.set_model("m", started_ns=None)
    judge.request(replace(FINE, first_token_ns=2 * SECOND_NS), "r", now_ns=time.now_ns)


def test_uncounted_time_is_reported_and_the_budget_survives(tmp_path: Path) -> None:
    time = Time()
    first, _ = kept(tmp_path, time, _OBJECTIVE)
    spend(first, time)
    first.judge("resumed", counts_from_ns=time.now_ns - 7)
    first.save({"e": time.now_ns - 1, "resumed": 0})
    time.now_ns += CATCH_UP_NS
    soon, lines = kept(tmp_path, time, _OBJECTIVE)
    assert (soon.resumes("e"), soon.resumes("new"), lines) == (True, False, [])
    saved_ns = time.now_ns - CATCH_UP_NS
    assert soon.counts_from_ns("e", time.now_ns) == saved_ns - 1
    assert soon.counts_from_ns("resumed", time.now_ns) == saved_ns - 7  # nothing folded yet
    assert saved_ns - 10 * SECOND_NS < soon.counts_from_ns("new", time.now_ns) < saved_ns
    time.now_ns += 100 * SECOND_NS
    late, lines = kept(tmp_path, time, _OBJECTIVE)
    assert not late.resumes("e")
    assert late.counts_from_ns("e", 7) == 7
    assert lines == ["objectives: no collector ran for 400 s; those requests are not counted"]
    look = late.budget_state([])
    assert look.uncounted_ns == 400 * 10**9
    (budget,) = look.budgets
    assert (budget.model, budget.num_good, budget.num_bad) == ("m", 0, 1)
    assert {budget.model for budget in late.budget_state(["n", ""]).budgets} == {"m", "n"}
    time.now_ns += 2 * 86400 * SECOND_NS
    assert {budget.model for budget in late.budget_state(["n"]).budgets} == {"n"}


def test_a_budget_is_its_promises_and_outlives_another_window(tmp_path: Path) -> None:
    time = Time()
    first, _ = kept(tmp_path, time, _OBJECTIVE)
    spend(first, time)
    first.save({"e": time.now_ns})
    longer = Objective("ttft", "ttft", 1_000_000_000, 0.99, 7 * 86400 * 10**9)
    laxer = Objective("ttft", "ttft", 2_000_000_000, 0.9, 86400 * 10**9)
    for objective, num_bad in ((longer, 1), (laxer, 0)):
        then, _ = kept(tmp_path, time, objective)
        (budget,) = then.budget_state(["m"]).budgets
        assert budget.num_bad == num_bad


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 9}', b"\xff" * 100])
def test_a_damaged_file_is_one_line_and_a_new_beginning(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    promises, lines = kept(tmp_path, Time(), _OBJECTIVE)
    assert len(lines) == 1
    assert lines[0].startswith("budgets restart at zero: ")
    assert promises.budget_state([]).budgets == ()


def test_budgets_outlive_what_is_unreadable_or_too_much_about_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    first, _ = kept(tmp_path, time, _OBJECTIVE)
    spend(first, time)
    first.save({"e": time.now_ns})
    path = tmp_path / "state.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**whole, "engines": {"e": "none"}}), encoding="utf-8")
    for most_bytes in (slo_state_module._MOST_ENGINES_BYTES, 1):
        monkeypatch.setattr(slo_state_module, "_MOST_ENGINES_BYTES", most_bytes)
        then, lines = kept(tmp_path, time, _OBJECTIVE)
        (budget,) = then.budget_state(["m"]).budgets
        assert budget.num_bad == 1
        assert not then.resumes("e")
        assert "cannot read the engines' state" in lines[0]


def test_a_disk_that_takes_nothing_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines: list[str] = []
    path = tmp_path / "file" / "state.json"
    promises = SloTracker(Objectives((_OBJECTIVE,)), path, clock=Time(), log_line=lines.append)
    for _ in range(3):
        promises.save({})
    assert len(lines) == 1
    assert lines[0].startswith("cannot write budgets to ")
