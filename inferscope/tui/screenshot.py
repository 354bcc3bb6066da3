"""Screenshot without a terminal: the same screen, the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from textual.pilot import Pilot

from inferscope.errors import BadInput
from inferscope.private import write_private
from inferscope.tui.app import InferScopeApp
from inferscope.tui.source import SnapshotSource

_FRAMES = 3
"""Repaints to wait for after each key: panels settle, messages are processed."""


def save_picture(
    source: SnapshotSource,
    path: Path,
    *,
    keys: Sequence[str] = (),
    columns: int = 120,
    rows: int = 40,
    theme: str = "dark",
) -> None:
    """Show a source, press keys, and write the screen as SVG.

    Args:
        source: source to show; closed at the end.
        path: file to write.
        keys: keys to press first, by Textual's names.
        columns: width of the screen.
        rows: height of the screen.
        theme: dark or light.

    Raises:
        BadInput: the file cannot be written.
    """
    app = InferScopeApp(source)

    async def drive(pilot: Pilot[object]) -> None:
        while app.scene.snapshot is None:
            await pilot.pause(0.05)
        app.theme = f"inferscope-{theme}"
        for key in ("", *keys):
            if key:
                await pilot.press(key)
            for _ in range(_FRAMES):
                await pilot.pause(0.05)
        svg = app.export_screenshot(title="inferscope")
        try:
            write_private(path, svg.encode())
        except OSError as error:
            app.exit(return_code=1)
            raise BadInput(f"cannot write {path}: {error.strerror}.") from error
        app.exit()

    app.run(headless=True, size=(columns, rows), auto_pilot=drive)
