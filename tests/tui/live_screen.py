"""Run the screen without a terminal, and read it as a grid of characters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from inferscope.fold.snapshots import Snapshot
from inferscope.tui.app import InferScopeApp, SnapshotReady
from tests.tui.scenes import moving_snapshot

GOLDEN = Path(__file__).parent / "golden"


class SilentSource:
    """Gives nothing: the test itself posts the snapshots, so nothing depends on a thread."""

    title = "a silent source"

    def __init__(self) -> None:
        self.is_closed = False

    def snapshot(self, window_ns: int) -> Snapshot | None:
        return None

    def close(self) -> None:
        self.is_closed = True


class Screen:
    """A running application and what a test does with it."""

    def __init__(self, app: InferScopeApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def show(self, snapshot: Snapshot) -> None:
        self.app.post_message(SnapshotReady(snapshot))
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    @property
    def lines(self) -> list[str]:
        """The grid on screen. The compositor is private API: this is its only use."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines) + "\n"


@asynccontextmanager
async def screen(
    snapshot: Snapshot | None = None,
    *,
    size: tuple[int, int] = (120, 40),
    is_empty: bool = False,
    ascii: bool = False,
) -> AsyncIterator[Screen]:
    app = InferScopeApp(SilentSource(), ascii=ascii)
    async with app.run_test(size=size) as pilot:
        running = Screen(app, pilot)
        await pilot.pause()
        if not is_empty:
            await running.show(snapshot if snapshot is not None else moving_snapshot())
        yield running


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario to its end."""
    asyncio.run(_awaited(scenario))


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("INFERSCOPE_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; see its diff"
