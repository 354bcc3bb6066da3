from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input

from inferscope.tui.app import InferScopeApp
from inferscope.tui.screens import DetailScreen, HelpScreen, OverviewScreen
from tests.tui.live_screen import Screen, SilentSource, play, screen
from tests.tui.scenes import moving_snapshot, requests, with_requests


def overview(running: Screen) -> OverviewScreen:
    found = running.app.screen_stack[0]
    assert isinstance(found, OverviewScreen)
    return found


def cursor_id(running: Screen) -> str:
    row = overview(running).table.cursor_row
    assert row is not None
    return row.external_id or row.request_id


def test_q_and_ctrl_q_quit() -> None:
    for key in ("q", "ctrl+q"):

        async def scenario(key: str = key) -> None:
            async with screen() as running:
                await running.press(key)
                assert not running.app.is_running

        play(scenario)


def test_arrows_and_jk_move_the_cursor_and_pages_scroll() -> None:
    async def scenario() -> None:
        async with screen() as running:
            table = overview(running).table
            first = table.ids_in_sight
            await running.press("j", "down", "k")
            assert cursor_id(running) == first[1].removeprefix("req-")
            await running.press("up")
            assert cursor_id(running) == first[0].removeprefix("req-")
            await running.press("pagedown", "pagedown")
            assert table.ids_in_sight[0] != first[0]
            await running.press("G")
            assert "23-37 of 37" in running.text
            assert table.ids_in_sight[-1] == table.cursor_row.request_id  # type: ignore[union-attr]
            await running.press("g")
            assert table.ids_in_sight == first

    play(scenario)


def test_enter_opens_the_detail_and_escape_leaves_it() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("j", "enter")
            detail = running.app.screen
            assert isinstance(detail, DetailScreen)
            assert detail.row.external_id == "rag-018c"
            await running.press("right")
            assert detail.row.external_id == "rag-0188"
            await running.press("h", "left")
            assert detail.row.external_id == "rag-018a"
            await running.press("escape")
            assert isinstance(running.app.screen, OverviewScreen)
            assert cursor_id(running) == "rag-018a"

    play(scenario)


def test_the_detail_goes_on_and_keeps_a_request_that_has_left() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("j", "enter")
            await running.show(moving_snapshot(1))
            assert "output 154" in running.text
            await running.show(with_requests(moving_snapshot(2), ()))
            assert "output 154" in running.text
            assert "left the screen's window" in running.text

    play(scenario)


def test_slash_filters_while_typing_and_escape_shows_all() -> None:
    async def scenario() -> None:
        async with screen() as running:
            table = overview(running).table
            await running.press("slash", *"id:rag*")
            assert set(table.ids_in_sight) == {
                "req-rag-018c", "req-rag-0188", "req-rag-0191", "req-rag-018a", "req-rag-0177",
            }  # fmt: skip
            await running.press("enter")
            assert "filter: id:rag*" in running.text
            assert running.app.focused is table
            await running.press("escape")
            assert len(table.ids_in_sight) == 15

    play(scenario)


def test_a_bad_filter_is_explained_and_filters_nothing() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("slash", *"p99>x")
            assert "'x' in filter term 'p99>x' is not a number" in running.text
            assert len(overview(running).table.ids_in_sight) > 10
            await running.press("enter")
            assert overview(running).query_one("#filter", Input).display, "it is still to be mended"
            await running.press("escape")
            assert not overview(running).query_one("#filter", Input).display

    play(scenario)


def test_a_filter_that_matches_nothing_is_reported() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("slash", *"id:none")
            assert "No request matches id:none" in running.text

    play(scenario)


def test_s_sorts_by_the_next_column_and_shift_s_reverses() -> None:
    async def scenario() -> None:
        async with screen() as running:
            table = overview(running).table
            await running.press("s")
            assert table.sort_name == "prefill"
            assert cursor_id(running) == "rag-018a"
            await running.press("s", "s", "s")
            assert (table.sort_name, table.is_reversed) == ("id", False)
            assert table.ids_in_sight[0] == "req-agent-c1"
            await running.press("S")
            assert table.ids_in_sight[0] == "req-rag-0191"

    play(scenario)


def test_a_click_on_a_heading_sorts_and_on_a_row_chooses() -> None:
    async def scenario() -> None:
        async with screen() as running:
            table = overview(running).table
            await running.pilot.click(table, offset=(60, 1))
            assert table.sort_name == "ttft"
            await running.pilot.click(table, offset=(10, 5))
            assert cursor_id(running) == table.ids_in_sight[3].removeprefix("req-")

    play(scenario)


def test_the_cursor_stays_on_its_request_when_the_order_changes() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("j", "j")
            chosen = cursor_id(running)
            rows = tuple(
                replace(row, tbt_p99_ns=1.0) if row.external_id == "rag-018c" else row
                for row in requests()
            )
            later = with_requests(moving_snapshot(8), rows)
            await running.show(later)
            assert cursor_id(running) == chosen
            assert overview(running).table.ids_in_sight[1] == f"req-{chosen}"

    play(scenario)


@pytest.mark.thorough
def test_space_freezes_brackets_step_and_end_goes_live() -> None:
    async def scenario() -> None:
        async with screen() as running:
            for tick in range(1, 5):
                await running.show(moving_snapshot(tick))
            app = running.app
            await running.press("space")
            await running.show(moving_snapshot(5))
            assert app.scene.snapshot == moving_snapshot(4)
            assert "frozen -250.0 ms" in running.lines[0]
            await running.press("left_square_bracket", "left_square_bracket")
            assert app.scene.snapshot == moving_snapshot(2)
            await running.press("right_square_bracket")
            assert app.scene.snapshot == moving_snapshot(3)
            await running.press(*["left_square_bracket"] * 9)
            assert app.scene.snapshot == moving_snapshot(0)
            await running.press("end")
            assert app.scene.snapshot == moving_snapshot(5)
            assert "● live" in running.lines[0]
            await running.press("space", "space")
            assert not app.scene.is_frozen

    play(scenario)


def test_kept_snapshots_are_bounded_in_number_and_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscope.tui.snapshot_history.KEPT_ROWS", 37 * 3)

    async def scenario() -> None:
        async with screen() as running:
            await running.press("space")
            for tick in range(1, 6):
                await running.show(moving_snapshot(tick))
            assert [kept.mono_ns for kept in running.app._past] == [
                moving_snapshot(tick).mono_ns for tick in (3, 4, 5)
            ]
            assert running.app.scene.snapshot == moving_snapshot(3), "the frozen one fell out"

    play(scenario)


def test_w_cycles_the_window_and_plus_minus_the_rate() -> None:
    async def scenario() -> None:
        async with screen() as running:
            for window in ("5 min", "10 s", "60 s"):
                await running.press("w")
                assert f"win {window}" in running.lines[0]
            for key, rate in (("plus", 10), ("plus", 10), ("minus", 4), ("minus", 2), ("minus", 1)):
                await running.press(key)
                assert f" {rate} Hz" in running.lines[0]
            await running.press("minus")
            assert " 1 Hz" in running.lines[0]

    play(scenario)


def test_u_changes_the_unit_of_panels_and_columns() -> None:
    async def scenario() -> None:
        async with screen() as running:
            assert "prefill ms" in running.text
            await running.press("u")
            assert "prefill %" in running.text
            assert "mean ms of 607" in running.text
            await running.press("u")
            assert "prefill ms" in running.text

    play(scenario)


def test_z_shows_the_focused_panel_alone() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("z")
            assert "Service levels" not in running.text
            assert "batch-0000" in running.text
            await running.press("z")
            assert "Service levels" in running.text
            await running.pilot.click("#tokens")
            await running.press("z")
            assert "Tokens / s" in running.text
            assert "Requests" not in running.text
            await running.press("escape")
            assert "Requests" in running.text

    play(scenario)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(80, 24), (50, 14)])
def test_z_and_tab_show_every_panel_where_the_terminal_has_no_room_for_it(
    size: tuple[int, int],
) -> None:
    async def scenario() -> None:
        async with screen(size=size) as running:
            before = running.text
            await running.press("z")
            assert "Latency" not in running.text
            height = running.app.screen.query_one("#requests").size.height
            assert height >= size[1] - 3, "the table has all of the screen but header and footer"
            for title in ("GPU time", "Service levels", "latency went", "Tokens / s", "Engine"):
                await running.press("tab")
                assert title in running.text
                assert "batch-" not in running.text
                lines = running.text.splitlines()
                assert sum(line.startswith("│") for line in lines) >= size[1] - 5, "all its height"
            await running.press("escape")
            assert running.text == before
            assert running.app.focused is running.app.screen.query_one("#requests")

    play(scenario)


def test_a_panel_that_was_hidden_by_a_zoom_shows_the_scene_of_now() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("z")
            snapshot = moving_snapshot()
            (view, *_) = snapshot.engines
            busy = replace(snapshot, engines=(replace(view, num_running=7777),))
            await running.show(busy)
            await running.press("space", "z")
            assert "7777" in running.text

    play(scenario)


def test_z_in_the_detail_of_a_request_without_gaps_states_why_there_are_none() -> None:
    async def scenario() -> None:
        async with screen(size=(80, 24)) as running:
            await running.press("enter")
            await running.press("z")
            assert "no gap between tokens to draw" in running.text
            assert "To the first token" in running.text

    play(scenario)


def test_question_mark_shows_help() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("question_mark")
            assert isinstance(running.app.screen, HelpScreen)
            assert "every command by name" in running.text
            await running.press("escape")
            assert isinstance(running.app.screen, OverviewScreen)

    play(scenario)


def test_colon_lists_the_commands() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("colon")
            assert not isinstance(running.app.screen, OverviewScreen)
            titles = {
                command.title for command in running.app.get_system_commands(running.app.screen)
            }
            assert {"Freeze", "Window", "Theme", "Export", "Quit"} <= titles

    play(scenario)


def test_n_shows_the_next_engine() -> None:
    one = moving_snapshot()
    other = replace(one.engines[0], model="another-model", engine_id="other")

    async def scenario() -> None:
        async with screen(replace(one, engines=(*one.engines, other))) as running:
            assert "engine 1/2" in running.lines[0]
            await running.press("n")
            assert "another-model" in running.lines[0]
            await running.press("n")
            assert "Qwen3-8B" in running.lines[0]

    play(scenario)


def test_e_writes_the_screen_and_its_snapshot_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        async with screen() as running:
            await running.press("e")
            await running.app.workers.wait_for_complete()
            await running.pilot.pause()
            assert "wrote inferscope-" in running.text

    play(scenario)
    (drawing,) = tmp_path.glob("inferscope-*.svg")
    (dump,) = tmp_path.glob("inferscope-*.json")
    assert drawing.read_text().startswith("<svg")
    assert json.loads(dump.read_bytes())["engines"][0]["model"] == "Qwen3-8B"


def test_e_states_why_it_could_not_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    async def scenario() -> None:
        async with screen() as running:
            await running.press("e")
            await running.app.workers.wait_for_complete()
            await running.pilot.pause()
            assert "cannot export here" in running.text

    play(scenario)


def test_y_copies_the_request_as_json() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("y")
            assert json.loads(running.app.clipboard)["external_id"] == "rag-018a"
            assert "copied rag-018a as JSON" in running.text
            await running.press("j", "enter", "y")
            assert json.loads(running.app.clipboard)["external_id"] == "rag-018c"

    play(scenario)


@pytest.mark.thorough
def test_every_key_is_harmless_before_the_first_snapshot() -> None:
    keys = [
        "enter", "s", "S", "space", "left_square_bracket", "right_square_bracket", "end", "w",
        "u", "plus", "minus", "t", "z", "z", "n", "e", "y", "j", "k", "G", "g", "escape",
    ]  # fmt: skip

    async def scenario() -> None:
        async with screen(is_empty=True) as running:
            await running.press(*keys)
            assert "nothing to export yet" in running.text
            await running.show(moving_snapshot())
            assert "Qwen3-8B" in running.text
            assert "batch-0000" in running.text

    play(scenario)


def test_a_resize_goes_through_all_layouts() -> None:
    async def scenario() -> None:
        async with screen() as running:
            for width, height in ((80, 24), (50, 14), (120, 20), (160, 50), (120, 40)):
                await running.pilot.resize_terminal(width, height)
                await running.pilot.pause()
                assert [len(line) for line in running.lines] == [width] * height
                assert "rag-018c" in running.text
                has_panels = "Tokens / s" in running.text
                assert has_panels == (width >= 100 and height >= 32)

    play(scenario)


def test_z_in_the_detail_draws_the_gaps_and_leaves_them_out_again() -> None:
    gaps_ns = tuple(8_000_000 if i % 40 else 64_800_000 for i in range(411))
    rows = tuple(
        replace(row, gaps_ns=gaps_ns, gaps_per_cell=1) if row.external_id == "chat-7f3a" else row
        for row in requests()
    )

    async def scenario() -> None:
        async with screen(with_requests(moving_snapshot(), rows), size=(80, 24)) as running:
            await running.press("slash", *"7f3a", "enter", "enter")
            assert "To the first token" in running.text
            await running.press("z")
            assert "Time between tokens" in running.text
            assert "longest 64.8" in running.text
            assert "To the first token" not in running.text
            await running.show(with_requests(moving_snapshot(1), requests()))
            assert "Time between tokens" in running.text, "what was seen stays on screen"
            await running.press("z")
            assert "To the first token" in running.text
            await running.pilot.resize_terminal(120, 40)
            await running.press("z")
            assert "To the first token" in running.text
            assert "Time between tokens" in running.text

    play(scenario)


def test_the_source_is_asked_for_the_request_on_screen() -> None:
    async def scenario() -> None:
        async with screen() as running:
            feed = running.app._feed
            await running.press("j", "enter")
            assert feed._focus == "req-rag-018c"
            await running.press("right")
            assert feed._focus == "req-rag-0188"
            await running.press("escape")
            assert feed._focus is None

    play(scenario)


def test_a_past_from_before_the_screen_can_be_stepped_through_and_stays() -> None:
    past = [moving_snapshot(tick) for tick in range(5)]

    async def scenario() -> None:
        app = InferScopeApp(SilentSource(), earlier=past, at_idx=2)
        async with app.run_test(size=(120, 40)) as pilot:
            running = Screen(app, pilot)
            await pilot.pause()
            assert app.scene.snapshot == past[2]
            assert "frozen" in running.lines[0]
            for tick in range(10, 140):
                app._past.add(moving_snapshot(tick))
            await running.press("left_square_bracket")
            assert app.scene.snapshot == past[1]
            await running.press(*["right_square_bracket"] * 4)
            assert app.scene.snapshot == moving_snapshot(20), "the oldest of those that came"
            await running.press("end")
            assert app.scene.snapshot == moving_snapshot(139)
            assert not app.scene.is_frozen

    play(scenario)


def test_an_engine_that_has_ended_adds_nothing_to_step_through() -> None:
    async def scenario() -> None:
        async with screen() as running:
            for _ in range(5):
                await running.show(replace(moving_snapshot(1), mode="ended"))
            await running.press("left_square_bracket")
            assert running.app.scene.snapshot == moving_snapshot(0)

    play(scenario)
