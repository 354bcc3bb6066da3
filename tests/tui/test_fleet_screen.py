"""Fleet screen: a line per engine, and the rule that names the one that stands out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferscope.fold.snapshots import EngineView, Snapshot
from inferscope.text.bodies import fleet_body
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels.fleet import ENOUGH, FACTOR, outlier_sentence, outliers
from inferscope.text.panels.ranks import busy_share, busy_skew
from inferscope.tui.screens import OverviewScreen
from tests.tui.live_screen import play, screen
from tests.tui.recorded import recorded
from tests.tui.scenes import device_times, engine_view, moving_snapshot, quantiles


def engine(name: str, **changes: object) -> EngineView:
    return replace(engine_view(), engine_id=name, **changes)  # type: ignore[arg-type]


def fleet_of(*views: EngineView) -> Snapshot:
    return replace(moving_snapshot(), engines=views)


FLEET = fleet_of(
    engine("e-one", devices=device_times(0.9, 0.8)),
    engine("e-two", ttft=quantiles(400, 60.0, 240.0, 310.0)),
    engine("e-three", tbt=quantiles(90_000, 9.0, 40.0, 99.0), num_waiting=9, decode_tok_s=900.0),
    engine("e-ended", is_alive=False, health=replace(engine_view().health, probe_state="closed")),
)


@pytest.mark.parametrize("snapshot", [FLEET, fleet_of()], ids=["four", "none"])
@pytest.mark.parametrize("size", [(60, 12), (80, 20), (100, 30), (120, 36), (240, 70)])
def test_the_body_fills_exactly_its_size(snapshot: Snapshot, size: tuple[int, int]) -> None:
    width, height = size
    lines = fleet_body(snapshot, width, height, cursor=1)
    assert [width_of(line) for line in lines] == [width] * height
    assert all(text_of(line).isprintable() for line in lines)


def test_figures_beyond_the_factor_stand_out_and_the_largest_comes_first() -> None:
    found = outliers(FLEET.engines)
    assert {each.engine_id for each in found} == {"e-three"}
    assert {each.figure for each in found} == {"TBT p99", "WAIT", "TOK/S"}
    assert [each.ratio for each in found] == sorted((each.ratio for each in found), reverse=True)
    assert all(each.ratio > FACTOR for each in found)
    assert outlier_sentence(FLEET).startswith("e-three stands out: its")


def test_engines_are_compared_with_those_of_their_model_that_run() -> None:
    slow = engine("e-slow", tbt=quantiles(90_000, 9.0, 40.0, 99.0), model="another")
    assert outliers((engine("e-one"), slow)) == []
    gone = replace(slow, model=engine_view().model, health=FLEET.engines[3].health)
    assert outliers((engine("e-one"), gone)) == []
    assert outliers((engine_view(),)) == []


def test_a_percentile_of_few_requests_is_chance() -> None:
    few = engine("e-few", ttft=quantiles(ENOUGH - 1, 900.0, 9000.0, 9900.0))
    assert outliers((engine("e-one"), few)) == []
    enough = replace(few, ttft=quantiles(ENOUGH, 900.0, 9000.0, 9900.0))
    assert [each.figure for each in outliers((engine("e-one"), enough))] == ["TTFT p95"]


@pytest.mark.thorough
def test_busy_shares_are_those_of_the_exported_devices() -> None:
    (device,) = recorded().exported("device")
    busy = sum(device["ns_by"][use] for use in ("prefill", "decode", "padding", "unattributed"))
    (time,) = recorded().view.devices
    assert busy_share(time) == pytest.approx(busy / device["wall_ns"])
    text = "\n".join(
        text_of(line) for line in fleet_body(fleet_of(recorded().view), 120, 36, cursor=0)
    )
    assert f"{100 * busy / device['wall_ns']:.1f}% ◆" in text


def test_skew_is_the_busiest_rank_over_the_mean() -> None:
    assert busy_skew(engine("e-one", devices=device_times(0.9, 0.6))) == pytest.approx(0.2)
    assert busy_skew(engine("e-one", devices=device_times(0.9))) is None


def test_an_engine_that_shut_down_is_not_alive_and_its_ranks_are_not_missing() -> None:
    ended = engine("e-ended", num_ranks=4, num_ranks_seen=0, health=FLEET.engines[3].health)
    assert ended.is_alive  # its recording does not hold the end of the process
    lines = fleet_body(fleet_of(engine("e-one"), ended), 120, 36, cursor=1)
    text = "\n".join(text_of(line) for line in lines)
    assert "1 of 2 engines alive" in text
    assert "─ 4 ranks ─" in text
    assert "seen" not in text


def test_the_selected_engine_is_that_of_the_other_screens() -> None:
    async def scenario() -> None:
        async with screen(FLEET) as running:
            await running.press("0", "down", "down")
            assert "Ranks of e-three" in running.text
            await running.press("enter")
            assert isinstance(running.app.screen, OverviewScreen)
            assert "engine 3/4" in running.lines[0]
            await running.press("0", "k")
            assert "Ranks of e-two" in running.text

    play(scenario)
