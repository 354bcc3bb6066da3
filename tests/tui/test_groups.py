"""Requests by tenant, adapter, finish and model; pinned ones; methods; profiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from inferscope.errors import InferScopeError
from inferscope.fold.snapshots import EngineView
from inferscope.insight import KERNEL, KernelTime, ProfileDocument
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels import GROUP_KEYS, grouped, groups, kernels, number_sources
from inferscope.tui.profiling import profile_engine
from inferscope.tui.screens import MethodScreen, OverviewScreen
from tests.tui.live_screen import play, screen
from tests.tui.recorded import recorded
from tests.tui.scenes import engine_view, moving_snapshot, requests, with_requests, with_view

TENANTS = tuple(
    replace(row, tenant=("acme", "beta", "")[at % 3], adapter="sql" if at % 2 else "")
    for at, row in enumerate(requests())
)


@pytest.mark.parametrize("key", GROUP_KEYS)
@pytest.mark.parametrize("size", [(80, 20), (120, 36), (200, 50)])
def test_groups_fill_their_size_and_hold_every_request_once(
    key: str, size: tuple[int, int]
) -> None:
    view = replace(engine_view(), requests=TENANTS)
    lines = groups(view, key, *size, cursor=1)
    assert [width_of(line) for line in lines] == [size[0]] * size[1]
    found = grouped(view, key)
    assert sorted(row.request_id for group in found for row in group.rows) == sorted(
        row.request_id for row in TENANTS
    )


@pytest.mark.thorough
def test_groups_by_finish_have_the_sums_of_the_exported_requests() -> None:
    num, tokens, compute = Counter[str](), Counter[str](), Counter[str]()
    for row in recorded().exported("request"):
        num[row["finish"]] += 1
        tokens[row["finish"]] += row["output_tokens"]
        compute[row["finish"]] += sum(row["compute_ns"].values())
    found = {group.value: group for group in grouped(recorded().view, "finish")}
    assert {name: len(group.rows) for name, group in found.items()} == num
    assert {name: group.output_tokens for name, group in found.items()} == tokens
    assert {name: sum(group.compute_ns) for name, group in found.items()} == compute
    longest = max(
        row["first_token_ns"] - row["arrived_ns"]
        for row in recorded().exported("request")
        if row["finish"] == "length"
    )
    assert found["length"].ttft_ns(1.0) == longest


def test_the_mean_gap_of_a_group_is_that_of_all_its_gaps() -> None:
    rows = [row for row in requests() if row.tbt_mean_ns is not None][:2]
    (group,) = grouped(replace(engine_view(), requests=tuple(rows)), "tenant")
    spans = [row.tbt_mean_ns * (row.output_tokens - 1) for row in rows]
    assert group.tbt_mean_ns == pytest.approx(
        sum(spans) / sum(row.output_tokens - 1 for row in rows)
    )


def test_models_are_grouped_over_all_engines() -> None:
    def engine(model: str) -> EngineView:
        return replace(engine_view(), model=model)

    views = (engine("a"), engine("b"), engine("a"))
    found = {group.value: len(group.rows) for group in grouped(views[0], "model", views)}
    num = len(engine_view().requests)
    assert found == {"a": 2 * num, "b": num}


def test_enter_on_a_group_shows_its_requests_alone() -> None:
    async def scenario() -> None:
        async with screen(with_requests(moving_snapshot(), TENANTS)) as running:
            await running.press("b")
            assert "Requests by tenant" in running.text
            first = grouped(running.app.scene.view, "tenant")[0]  # type: ignore[arg-type]
            await running.press("enter")
            overview = running.app.screen
            assert isinstance(overview, OverviewScreen)
            assert overview.table.filter.text == f"tenant:{first.value or '-'}"
            names = {row.request_id for row in first.rows}
            assert set(overview.table.ids_in_sight) <= names
            await running.press("escape", "b", "b")
            assert "Requests by adapter" in running.text

    play(scenario)


@pytest.mark.thorough
def test_a_pinned_request_stays_on_top_even_after_it_left_the_list() -> None:
    async def scenario() -> None:
        async with screen() as running:
            overview = running.app.screen
            assert isinstance(overview, OverviewScreen)
            await running.press("down", "down", "f")
            pinned = overview.table.ids_in_sight[0]
            assert overview.table.cursor_row.request_id == pinned  # type: ignore[union-attr]
            await running.press("s", "slash", *"id:nothing", "enter")
            assert overview.table.ids_in_sight == [pinned]
            await running.press("escape")
            gone = tuple(row for row in requests(1) if row.request_id != pinned)
            await running.show(with_requests(moving_snapshot(1), gone))
            assert overview.table.ids_in_sight[0] == pinned
            await running.press("g", "f")
            assert pinned not in overview.table.ids_in_sight

    play(scenario)


@pytest.mark.thorough
def test_m_shows_methods_and_the_sources_of_this_engine() -> None:
    view = replace(engine_view(), cost_models=recorded().view.cost_models)
    text = "\n".join(text_of(line) for line in number_sources(view))
    (model,) = recorded().view.cost_models
    assert f"{model.mode}: {model.source}" in text
    assert f"{model.num_steps} steps" in text
    assert "spec 9.89e+14/s" in text

    async def scenario() -> None:
        async with screen() as running:
            for key, method in (("1", "apportioned"), ("5", "burn"), ("6", "drafts")):
                await running.press(key, "m")
                assert isinstance(running.app.screen, MethodScreen)
                assert method in running.text
                assert "Sources of this engine now" in running.text
                await running.press("m")

    play(scenario)


PROFILE = ProfileDocument(
    pid=41233,
    trace="/tmp/trace.json",
    slowdown=0.04,
    stall_ns=None,
    rows=(
        KernelTime("prefill", "flash_fwd", KERNEL, 30_000_000, 36),
        KernelTime("decode", "gemv_bf16", KERNEL, 60_000_000, 1200),
        KernelTime("decode", "paged_attention", KERNEL, 20_000_000, 1200),
        KernelTime("decode", "aten::mm", "cpu_op", 90_000_000, 1200),
    ),
)


@pytest.mark.parametrize("size", [(80, 20), (120, 36)])
def test_kernels_of_a_phase_are_shares_of_its_kernels(size: tuple[int, int]) -> None:
    lines = kernels(PROFILE, *size)
    assert [width_of(line) for line in lines] == [size[0]] * size[1]
    text = "\n".join(map(text_of, lines))
    assert "decode: 80.0 ms in kernels" in text
    assert "75.0%    60.0 ms   1200 x" in text
    assert "aten::mm" not in text  # an operation of the host, where kernels are known
    assert "cost +4% of a decode step" in text


def test_a_profile_is_made_by_the_second_press_and_of_a_running_engine() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("p")
            assert "p again makes one" in running.text
            await running.show(with_view(moving_snapshot(), is_alive=False))
            await running.press("p")
            assert "only a running engine can be profiled" in running.text

    play(scenario)


def test_a_profile_that_cannot_be_made_has_the_reason_of_the_command() -> None:
    with pytest.raises(InferScopeError, match="no-such-engine"):
        profile_engine("no-such-engine")
