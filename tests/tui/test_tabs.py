from __future__ import annotations

import pytest

from inferscope.cli.attach import command as attach
from inferscope.text import once
from inferscope.tui.screens import SCREENS, DetailScreen, HelpScreen, OverviewScreen
from inferscope.tui.screens.scene_screen import SceneScreen, tab_at, tab_line
from tests.tui.live_screen import Screen, play, screen
from tests.tui.scenes import moving_snapshot

TABS = tuple(tab for each in SCREENS for tab in each.TABS)


def shown(running: Screen) -> str:
    """Return the marked tab by the second line of the screen."""
    return running.lines[1].partition("▸")[2][:1]


def test_every_screen_has_a_number_in_order() -> None:
    assert [tab.key for tab in TABS] == [*sorted({tab.key for tab in TABS} - {"0"}), "0"]
    assert SCREENS[0] is OverviewScreen


def test_attach_names_and_prints_the_screen_of_every_number() -> None:
    numbers = sorted(int(tab.key) for tab in TABS)
    assert numbers == list(range(len(attach._SCREENS)))
    assert numbers == [0, *once._SCREENS]  # the fleet is printed for all engines together


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_every_number_shows_its_screen_from_its_neighbours(size: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with screen(size=size) as running:
            for tab in (*TABS, *reversed(TABS)):
                await running.press(tab.key)
                assert shown(running) == tab.key
                assert isinstance(running.app.screen, SceneScreen)
                assert running.app.screen.tab == tab.key
                assert len(running.app.screen_stack) <= 2

    play(scenario)


def test_the_requests_tab_is_the_list_alone_with_its_filter() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("slash", *"id:rag*", "enter", "2")
            assert "Service levels" not in running.text
            assert "filter: id:rag*" in running.text
            await running.press("1")
            assert "Service levels" in running.text

    play(scenario)


def test_a_number_leaves_a_detail_and_escape_returns_to_the_overview() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("enter")
            assert isinstance(running.app.screen, DetailScreen)
            assert shown(running) == "2"
            assert running.app._feed._focus is not None
            await running.press("3")
            assert running.app._feed._focus is None
            assert shown(running) == "3"
            await running.press("escape")
            assert isinstance(running.app.screen, OverviewScreen)

    play(scenario)


def test_a_click_on_a_tab_opens_it() -> None:
    async def scenario() -> None:
        async with screen() as running:
            at = running.lines[1].index("3 Timeline")
            await running.pilot.click("#tabs", offset=(at + 2, 0))
            await running.pilot.pause()
            assert shown(running) == "3"

    play(scenario)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_each_cell_of_the_tab_line_belongs_to_the_tab_that_is_drawn_there(width: int) -> None:
    text = "".join(part for part, _ in tab_line(TABS, "1", width))
    for tab in TABS:
        at = text.index(f"{tab.key} ")
        assert tab_at(TABS, width, at) == tab_at(TABS, width, at - 1) == tab.key
    assert tab_at(TABS, width, len(text.rstrip()) + 2) is None


def test_a_screen_shows_the_snapshots_that_came_while_it_was_covered() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("3")
            await running.show(moving_snapshot(4))
            await running.press("1")
            assert running.app.screen.scene.snapshot == moving_snapshot(4)  # type: ignore[attr-defined]
            assert "14:13:21" in running.lines[0]

    play(scenario)


@pytest.mark.thorough
def test_the_help_lists_the_keys_of_the_screen_below_it() -> None:
    async def scenario() -> None:
        async with screen(size=(80, 24)) as running:
            for tab in TABS:
                await running.press(tab.key, "question_mark")
                assert isinstance(running.app.screen, HelpScreen)
                assert "1 to 6" in running.text
                assert "quit; the server is unaffected" in running.text
                await running.press("escape")

    play(scenario)
