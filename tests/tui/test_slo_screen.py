"""Numbers of the SLO screen, against the export of the same recording and `slo check`."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input

from inferscope.cli.main import main
from inferscope.cli.screen import judged_source
from inferscope.fold.snapshots import BIN_EDGES_NS, EngineView
from inferscope.insight import LevelsWatch
from inferscope.insight.service_levels import binned
from inferscope.readers import open_source
from inferscope.slo import line_of, read_objectives
from inferscope.text.bodies import slo_body
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels.distribution import shown_bins
from inferscope.text.panels.objectives import burn_sentence
from inferscope.text.plots import per_second
from inferscope.tui.app import InferScopeApp
from inferscope.tui.screens import DetailScreen
from tests.tui.live_screen import Screen, play, screen
from tests.tui.recorded import OBJECTIVES, SAMPLE, WHOLE_NS, recorded
from tests.tui.scenes import engine_view
from tests.tui.test_panels import empty_view


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(text_of(line) for line in slo_body(recorded().view, 160, 50))


@pytest.mark.parametrize(
    "view",
    [engine_view(), empty_view(), replace(engine_view(), levels=None)],
    ids=["busy", "empty", "unjudged"],
)
@pytest.mark.parametrize("size", [(80, 20), (100, 30), (120, 36), (160, 46), (240, 70)])
def test_the_body_fills_exactly_its_size(view: EngineView, size: tuple[int, int]) -> None:
    width, height = size
    lines = slo_body(view, width, height, cursor=2)
    assert [width_of(line) for line in lines] == [width] * height
    assert all(text_of(line).isprintable() for line in lines)


def test_an_unknown_cause_is_stated_with_its_reason() -> None:
    levels = engine_view().levels
    assert levels is not None
    worst = max(levels.objectives, key=lambda one: one.num_bad)
    for cause, named in (("unknown", "an unknown cause"), ("queue", "queue")):
        objectives = (replace(worst, causes={cause: worst.num_bad}),)
        view = replace(engine_view(), levels=replace(levels, objectives=objectives))
        assert f"100.0% of its bad requests for {named}." in burn_sentence(view.levels)
        text = "\n".join(text_of(line) for line in slo_body(view, 120, 36))
        assert ("unknown: no ledger or few good peers" in text) is (cause == "unknown")


def test_good_ratios_and_causes_are_those_of_slo_check(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = SAMPLE.with_name("slo.yaml")
    assert main(["slo", "check", str(file), str(SAMPLE), "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    levels = recorded().view.levels
    assert levels is not None
    for count, one in zip(engine["counts"], levels.objectives, strict=True):
        assert (one.num_good, one.num_bad, one.num_warm_up) == (
            count["num_good"], count["num_bad"], count["num_warm_up"],
        )  # fmt: skip
        assert one.causes == {cause: num for cause, num in count["causes"].items() if num}
        assert [(window.num_good, window.num_bad) for window in one.windows] == [
            (one.num_good, one.num_bad)
        ] * 2  # the recording is shorter than both windows
        share = one.num_good / (one.num_good + one.num_bad)
        row = next(
            line
            for line in text.splitlines()
            if line.startswith(f"│ {count['objective']['name']} ")
        )
        assert ("100 %" if share == 1 else f"{100 * share:.2f} %") in row
        burn = (1 - share) / (1 - one.objective.objective)
        assert f"{burn:.1f}x" in row


def test_distributions_are_those_of_the_exported_requests(text: str) -> None:
    rows = list(recorded().exported("request"))
    ttft = [row["first_token_ns"] - row["arrived_ns"] for row in rows if row["first_token_ns"]]
    gaps = [gap for row in rows for gap in row["tbt_ns"]]
    levels = recorded().view.levels
    assert levels is not None
    for name, values in (("ttft", ttft), ("tbt", gaps)):
        expected = Counter(next((at for at, edge in enumerate(BIN_EDGES_NS) if value <= edge),
                                len(BIN_EDGES_NS)) for value in values)  # fmt: skip
        assert levels.bins[name] == tuple(expected[at] for at in range(len(BIN_EDGES_NS) + 1))
    late = sum(value > 500_000_000 for value in ttft)
    assert f"target 500 ms, {late} beyond" in text
    slow = sum(value > 200_000_000 for value in gaps)
    assert f"target 200 ms, {slow} beyond" in text
    assert f"{len(ttft)} requests" in text
    assert f"{len(gaps)} gaps" in text


def test_the_worst_requests_are_those_furthest_beyond_a_threshold(text: str) -> None:
    limits = {"ttft": 500_000_000, "tbt": 200_000_000}
    beyond = {}
    for row in recorded().exported("request"):
        values = {
            "ttft": (row["first_token_ns"] or row["delivered_ns"]) - row["arrived_ns"],
            "tbt": max(row["tbt_ns"], default=0),
        }
        ratio = max(values[name] / limits[name] for name in limits)
        if ratio > 1:
            beyond[row["external_id"]] = ratio
    levels = recorded().view.levels
    assert levels is not None
    ranked = sorted(beyond, key=lambda name: -beyond[name])
    assert [one.row.external_id for one in levels.worst] == ranked[: len(levels.worst)]
    for name in ranked[:5]:
        assert re.search(rf"{name} .* {beyond[name]:.1f}x", text)


def test_requests_without_a_miss_and_their_tokens_are_counted_over_the_window(text: str) -> None:
    levels = recorded().view.levels
    assert levels is not None
    rows = {row["request"]: row for row in recorded().exported("request")}
    bad = {one.row.request_id for one in levels.worst}
    assert len(bad) < 20  # all of them are listed
    num_good, window_s = len(rows) - len(bad), recorded().view.window_ns / 1e9
    assert f"{num_good} of {len(rows)} finished requests" in text
    rates = f"{per_second(num_good / window_s)} of {per_second(len(rows) / window_s)} requests/s"
    assert rates in text
    assert levels.num_good_tokens == sum(
        row["output_tokens"] for name, row in rows.items() if name not in bad
    )


@pytest.mark.thorough
def test_other_objectives_are_tried_while_typing_and_kept_by_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        levels = LevelsWatch(OBJECTIVES, origin="slo.yaml")
        source = judged_source(
            lambda sinks, listen: open_source(SAMPLE, sinks=sinks, listen=listen), levels
        )
        app = InferScopeApp(source, window_ns=WHOLE_NS)
        async with app.run_test(size=(120, 40)) as pilot:
            running = Screen(app, pilot)

            async def until(text: str) -> None:
                deadline_s = time.monotonic() + 120  # the recording is folded meanwhile
                while time.monotonic() < deadline_s:
                    if text in running.text:
                        return
                    await pilot.pause(0.05)
                raise AssertionError(f"{text!r} is not in\n{running.text}")

            await running.press("5")
            await until("slo.yaml")
            await running.press("o")
            box = app.screen.query_one(Input)
            assert box.value == line_of(OBJECTIVES.all)
            box.value = "ttft 1s 99%, nonsense 5%"
            await until("nonsense is not an objective")
            box.value = "ttft 1s 99%"
            await until("Objectives on trial")
            await until("fewer bad of 100")
            await running.press("escape")
            await until("slo.yaml, observed")
            assert levels.objectives == OBJECTIVES
            await running.press("o")
            box.value = "ttft 1s 98%"
            await running.press("enter")
            await until("ttft ≤ 1 s")
            await until("set here, observed")
            assert list(tmp_path.iterdir()) == []  # nothing is written unless asked for
            await running.press("W")
            await until("wrote inferscope-slo.yaml")
        assert read_objectives(tmp_path / "inferscope-slo.yaml").all == levels.objectives.all

    play(scenario)


def test_enter_opens_the_ledger_of_the_selected_request_and_escape_returns() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("5", "down", "down", "enter")
            assert isinstance(running.app.screen, DetailScreen)
            worst = engine_view().levels.worst  # type: ignore[union-attr]
            assert running.app.screen.row.request_id == worst[2].row.request_id
            await running.press("escape")
            assert "Worst requests" in running.text

    play(scenario)


def test_an_edge_belongs_to_the_bin_below_and_the_lowest_bins_merge() -> None:
    counts = binned([BIN_EDGES_NS[0], BIN_EDGES_NS[0] + 1, BIN_EDGES_NS[-1] + 1]).tolist()
    assert counts[:2] == [1, 1]
    assert counts[-1] == 1
    bins = (0, 5, 0, 7, 1, 2, *[0] * 10)
    rows = shown_bins(bins, 3)
    assert [num for _, _, num in rows] == [12, 1, 2]
    assert rows[0][:2] == (None, BIN_EDGES_NS[3])
    assert sum(num for _, _, num in shown_bins(bins, 9)) == sum(bins)
