"""Pictures of the screen as text, for review in a diff.

`INFERSCOPE_UPDATE_GOLDEN=1` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from inferscope.fold import Snapshot
from inferscope.tui.canvas import styles_of
from tests.recorded import recorded
from tests.tui.live_screen import assert_golden, play, screen
from tests.tui.scenes import moving_snapshot, with_requests, with_view
from tests.tui.test_fleet_screen import FLEET
from tests.tui.test_roofline_screen import calibrated

WIDE, NARROW = (120, 40), (80, 24)


@pytest.mark.parametrize(
    ("name", "size", "keys", "options"),
    [
        ("overview_120x40", WIDE, [], {}),
        ("overview_80x24", NARROW, [], {}),
        ("overview_160x50", (160, 50), [], {}),
        ("overview_50x14", (50, 14), [], {}),
        ("overview_ascii_120x40", WIDE, [], {"ascii": True}),
        ("overview_ms_120x40", WIDE, ["u"], {}),
        ("detail_120x40", WIDE, ["S", "enter"], {}),
        ("detail_done_120x40", WIDE, ["slash", *"7f3a", "enter", "enter"], {}),
        ("detail_80x24", NARROW, ["enter"], {}),
        ("groups_120x40", WIDE, ["b", "b", "b"], {}),
        ("methods_120x40", WIDE, ["m"], {}),
        ("pair_120x40", WIDE, ["x", "down", "x"], {}),
        ("pair_80x24", NARROW, ["x", "down", "x"], {}),
        ("help_80x24", NARROW, ["question_mark"], {}),
        ("filter_120x40", WIDE, ["slash", *"p99>", "3", "0"], {}),
        ("empty_120x40", WIDE, [], {"is_empty": True}),
        ("slo_120x40", WIDE, ["5"], {}),
        ("slo_80x24", NARROW, ["5", "down"], {}),
        ("slo_ascii_120x40", WIDE, ["5"], {"ascii": True}),
        ("slo_edit_120x40", WIDE, ["5", "o"], {}),
        ("fleet_120x40", WIDE, ["0", "down"], {"snapshot": FLEET}),
        ("fleet_80x24", NARROW, ["0", "down"], {"snapshot": FLEET}),
        ("fleet_ascii_120x40", WIDE, ["0"], {"snapshot": FLEET, "ascii": True}),
        ("engine_120x40", WIDE, ["6"], {}),
        ("engine_80x24", NARROW, ["6"], {}),
        ("engine_facts_80x24", NARROW, ["6", "d"], {}),
        ("engine_ascii_120x40", WIDE, ["6"], {"ascii": True}),
    ],
)
def test_the_screen_looks_like_its_golden(
    name: str, size: tuple[int, int], keys: Sequence[str], options: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with screen(size=size, **options) as running:
            await running.press(*keys)
            assert all(len(line) == size[0] for line in running.lines)
            if options.get("ascii"):
                assert running.text.isascii()
            assert_golden(name, running.text)

    play(scenario)


def test_no_request_yet_is_reported_in_words() -> None:
    async def scenario() -> None:
        idle = with_requests(moving_snapshot(), ())
        async with screen(idle) as running:
            assert "No request now, nor in this window" in running.text
            await running.show(with_view(idle, num_finished=0))
            assert "No request yet: send one to the engine" in running.text

    play(scenario)


def test_the_rows_on_screen_sum_to_a_hundred_per_cent() -> None:
    async def scenario() -> None:
        async with screen() as running:
            shares = [
                float(line[14:21].strip(" %"))
                for line in running.lines
                if line[4:12].strip() in ("prefill", "decode", "other", "host gap", "no work")
            ]
            assert len(shares) == 5
            assert sum(shares) == pytest.approx(100.0)

    play(scenario)


SCREENS: dict[str, tuple[list[str], Callable[[], Snapshot]]] = {
    "timeline": (["3"], lambda: recorded()[0]),
    "roofline": (["4"], calibrated),
    "slo": (["5"], moving_snapshot),
    "engine": (["6"], moving_snapshot),
    "fleet": (["0"], lambda: FLEET),
    "pair": (["x", "down", "x"], moving_snapshot),
}
"""Keys and snapshot of the screens behind the overview."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCREENS)
def test_a_small_terminal_with_neither_colour_nor_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    keys, snapshot = SCREENS[name]

    async def scenario() -> None:
        async with screen(snapshot(), size=NARROW, ascii=True) as running:
            await running.press(*keys)
            assert [len(line) for line in running.lines] == [80] * 24
            assert running.text.isascii()
            assert "?" not in running.text.replace("? help", "")
            assert_golden(f"{name}_ascii_80x24", running.text)
            assert not coloured(running.app.export_screenshot())

    play(scenario)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCREENS)
def test_the_light_theme_has_the_same_text_in_colours_of_its_own(name: str) -> None:
    keys, snapshot = SCREENS[name]

    async def scenario() -> None:
        async with screen(snapshot(), size=NARROW) as running:
            await running.press(*keys)
            text, dark = running.text, coloured(running.app.export_screenshot())
            await running.press("t")
            light = coloured(running.app.export_screenshot())
            assert running.text == text
            assert dark
            assert light
            assert not dark & light
            assert all(style.color for style in styles_of(running.app).values())

    play(scenario)


def coloured(drawing: str) -> set[str]:
    """Return the hues of a drawing's text: the theme's greys have a tint alone."""
    found = set(re.findall(r"-r\d+ \{ fill: #([0-9a-f]{6})", drawing))
    parts = {each: [int(each[at : at + 2], 16) for at in (0, 2, 4)] for each in found}
    return {each for each, rgb in parts.items() if max(rgb) - min(rgb) > 0x40}


def test_light_and_dark_differ_in_colour_and_not_in_text() -> None:
    async def scenario() -> None:
        async with screen() as running:
            dark, drawing = running.text, running.app.export_screenshot()
            await running.press("t")
            assert running.app.theme == "inferscope-light"
            assert running.text == dark
            light = running.app.export_screenshot()
            for colour in ("#e8a33d", "#58a6e8", "#0f1318"):
                assert colour in drawing
                assert colour not in light
            await running.press("t")
            assert running.app.theme == "inferscope-dark"

    play(scenario)


def test_no_color_leaves_only_greys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario() -> None:
        async with screen() as running:
            drawing = running.app.export_screenshot()
            assert "#e8a33d" not in drawing
            assert "◆ prefill" in running.text

    play(scenario)


def test_a_silent_engine_is_reported_on_screen() -> None:
    snapshot = moving_snapshot()
    gone = replace(snapshot.engines[0], is_alive=False)

    async def scenario() -> None:
        async with screen(replace(snapshot, engines=(gone,))) as running:
            assert "▲ engine lost" in running.lines[0]
            assert "stopped reporting" in running.text

    play(scenario)
