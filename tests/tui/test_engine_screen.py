"""Numbers of the engine screen, against the export and the records of the same recording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inferscope.fold.final_records import DeviceHealth, DeviceTime
from inferscope.fold.miss_ratio import Curve, CurvePoint
from inferscope.fold.snapshots import (
    CacheView,
    CountersView,
    DeviceCounters,
    EngineView,
    ExpertsView,
)
from inferscope.readers import catch_up, open_source
from inferscope.records import EngineInfo, StepPlan
from inferscope.text.bodies import engine_body
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels.machine import devices
from inferscope.text.panels.queue import mean_waiting, queue_and_batch
from inferscope.text.panels.request import request_detail
from inferscope.text.panels.reuse import reuse
from inferscope.text.plots import EMPTY, stacked
from tests.cli.running import ROOT
from tests.tui.recorded import recorded
from tests.tui.scenes import engine_view
from tests.tui.test_panels import empty_view


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(text_of(line) for line in engine_body(recorded().view, 160, 50))


@pytest.mark.parametrize("view", [engine_view(), empty_view()], ids=["busy", "empty"])
@pytest.mark.parametrize("size", [(80, 20), (100, 30), (120, 36), (160, 46), (240, 70)])
@pytest.mark.parametrize("shows_facts", [True, False])
def test_the_body_fills_exactly_its_size(
    view: EngineView, size: tuple[int, int], shows_facts: bool
) -> None:
    width, height = size
    lines = engine_body(view, width, height, shows_facts=shows_facts)
    assert [width_of(line) for line in lines] == [width] * height
    assert all(text_of(line).isprintable() for line in lines)


@pytest.mark.thorough
def test_preemptions_and_prefix_hits_are_those_of_the_exported_requests(text: str) -> None:
    rows = list(recorded().exported("request"))
    preempted = sum(row["preemptions"] for row in rows)
    assert preempted > 0
    assert f"{preempted} in this window, {preempted} in all" in text
    admitted = [row for row in rows if row["cached_tokens"] is not None]
    cached = sum(row["cached_tokens"] for row in admitted)
    found = re.search(r"([\d.]+)% of (\d+) prompt tokens", text)
    assert found is not None
    prompt = sum(row["prompt_tokens"] for row in admitted)
    assert int(found[2]) == prompt
    assert float(found[1]) == pytest.approx(100 * cached / prompt, abs=0.05)


def test_the_pool_and_the_queue_are_those_of_the_recorded_plans(text: str) -> None:
    plans = [record for record in recorded().records if isinstance(record, StepPlan)]
    last = plans[-1]
    assert f"used {last.blocks_used} (" in text
    assert f"cached {last.blocks_cached} (" in text
    assert f"free {last.blocks_total - last.blocks_used - last.blocks_cached} (" in text
    view = recorded().view
    for binding, label in (("blocks", "blocks"), ("budget", "budget"), ("slots", "slots")):
        mean = mean_waiting(view.series.waiting_by[binding])
        assert f"{label} {mean:.2f}" in text


SAMPLES = ("demo", "h100", "vllm", "sglang")


@pytest.mark.parametrize("sample", SAMPLES)
def test_no_label_of_a_sample_is_cut_at_120_columns(sample: str) -> None:
    source = open_source(ROOT / "samples" / f"{sample}.isr")
    catch_up(source, patience_s=60)
    (view,) = source.snapshot(60 * 10**9).engines
    source.close()
    text = "\n".join(text_of(line) for line in engine_body(view, 120, 36))
    assert "…" not in text
    assert not ("seen 0" in text and view.has_ended)
    for row in sorted(view.requests, key=lambda each: -each.age_ns)[:20]:
        text = "\n".join(text_of(line) for line in request_detail(row, view, 120, 36))
        assert not re.findall(r"…(?! *[A-Za-z0-9])", text)  # in the middle of an id alone


def test_a_rare_wait_keeps_a_scale_and_a_mean_above_zero() -> None:
    view = engine_view()
    seconds = len(view.series.running)
    waiting = dict.fromkeys(view.series.waiting_by, (0.0,) * seconds)
    waiting["budget"] = (*(0.0,) * (seconds - 1), 0.044)
    series = replace(view.series, waiting_by=waiting)
    lines = queue_and_batch(replace(view, series=series), 74, 14)
    text = "\n".join(text_of(line) for line in lines)
    assert "budget <0.01" in text
    assert "0.044" in text


def test_the_state_of_a_device_is_unknown_after_its_sampler_has_ended() -> None:
    """What it summed until then stays; nothing of it is of now."""
    health = DeviceHealth(throttle_ns={"power_cap": 5}, told_ns=9)
    view = replace(
        engine_view(),
        devices=(DeviceTime("e", "GPU-1", 9, {}, health),),
        counters=CountersView(
            reason="the samples of this device have ended",
            devices={"GPU-1": DeviceCounters(totals={"energy_uj": {"decode": 3}})},
        ),
    )
    text = "\n".join(text_of(line) for line in devices(view, 46, 12))
    assert re.search(r"throttle +- ", text)
    assert "the samples of this device have ended" in " ".join(text.replace("│", " ").split())


def test_the_configuration_is_that_of_the_recorded_engine(text: str) -> None:
    info = next(record for record in recorded().records if isinstance(record, EngineInfo))
    assert f"{info.max_running} sequences" in text
    assert f"{info.token_budget} tokens a step" in text
    assert info.options_hash in text
    num_learned = sum(not row["cold"] for row in recorded().exported("step"))
    assert f"eager {num_learned}" in text


def test_drafts_are_summed_over_the_window_and_ranked_by_request() -> None:
    rows = tuple(
        replace(row, proposed_tokens=100, accepted_tokens=accepted)
        for row, accepted in zip(engine_view().requests, (20, 50, 90), strict=False)
    )
    text = "\n".join(text_of(line) for line in reuse(replace(engine_view(), requests=rows), 120, 9))
    series = engine_view().series
    accepted, proposed = sum(series.accepted_tokens), sum(series.proposed_tokens)
    assert f"{100 * accepted / proposed:.1f}% of {proposed} proposed accepted" in text
    assert "of 3 listed requests: 20.0% worst, 50.0% median, 90.0% best" in text


def test_misses_of_the_cache_show_the_largest_classes_and_what_more_memory_gives() -> None:
    points = (CurvePoint(1.0, 100, 0.25), CurvePoint(2.0, 200, 0.5), CurvePoint(4.0, 400, None))
    tokens = {"hit": 25, "evicted": 45, "rounding": 1, "changed": 9, "new": 20}
    view = CacheView(tokens, dict.fromkeys(tokens, 0), Curve(points, 100, 50, 1.0, 90))
    text = "\n".join(text_of(line) for line in reuse(replace(engine_view(), cache=view), 120, 9))
    assert "misses     evicted 45.0%, new 20.0%, changed 9.0%; KV 2× hits 50.0%" in text
    assert "4×" not in text, "a withheld size is not shown"
    without = "\n".join(text_of(line) for line in reuse(engine_view(), 120, 9))
    assert "misses" not in without


def test_the_load_of_experts_is_shown_for_a_mixture_alone() -> None:
    experts = ExpertsView(8, 100.0, 250, 180.0, layer=3, expert=5, expert_share=0.4)

    def text(view: EngineView) -> str:
        return "\n".join(text_of(line) for line in reuse(view, 120, 10))

    assert "experts" not in text(engine_view())
    assert "busiest 2.5x mean" in text(replace(engine_view(), experts=experts))
    assert "layer 3: expert 5 40.0%" in text(replace(engine_view(), experts=experts))


def test_a_pool_without_a_whole_second_shows_its_present_blocks() -> None:
    view = engine_view()
    young = replace(view, series=replace(view.series, blocks_total=()))
    assert "KV block pool" in "\n".join(text_of(line) for line in engine_body(young, 120, 36))


def test_what_is_not_recorded_is_unknown_and_not_zero() -> None:
    lines = [text_of(line) for line in engine_body(empty_view(), 120, 36)]
    text = "\n".join(lines)
    assert "the engine reports no KV blocks" in text
    assert "- no step verified a draft" in text
    assert "none recorded" in text
    assert re.search(r"slots +- sequences", text)


def cells(rows: list[list[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    for row in rows:
        for text, kind in row:
            yield from ((character, kind) for character in text)


@pytest.mark.parametrize("width", [1, 7, 40])
def test_a_stack_fills_the_height_of_its_sum(width: int) -> None:
    series = [(3.0,) * width, (None,) * width, (2.0,) * width]
    rows = stacked(series, width, 10, top=10.0, fills="abc")
    assert [sum(len(text) for text, _ in row) for row in rows] == [width] * 10
    drawn = list(cells(rows))
    assert sum(kind == 0 for _, kind in drawn) == 3 * width
    assert sum(kind == 2 for _, kind in drawn) == 2 * width
    assert sum(kind == EMPTY for _, kind in drawn) == 5 * width
