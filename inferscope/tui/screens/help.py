"""Help screen: every key, and how each number is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from inferscope.text import Line, Scene, frame
from inferscope.tui.canvas import Canvas
from inferscope.tui.keys import HELP, METHODS, Section


def help_lines(
    width: int, height: int, sections: Sequence[Section] = HELP, methods: Sequence[str] = METHODS
) -> list[Line]:
    """Return keys and methods in a frame; a low screen drops blank lines, then the methods."""
    blocks: list[list[Line]] = []
    for title, keys in sections:
        head: Line = ((title, "title"),)
        blocks.append(
            [head, *[((f"  {key:10}", "key"), (meaning, "body")) for key, meaning in keys]]
        )
    made: list[Line] = [((f"  {method}", "body"),) for method in methods]
    blocks.append([(("How each number is made", "title"),), *made])
    num_lines = sum(len(block) for block in blocks)
    if num_lines + len(blocks) - 1 > height - 2:
        blocks = [block[1:] for block in blocks]
        if sum(map(len, blocks)) > height - 2:
            blocks.pop()  # the key m shows the methods as well
        lines = [line for block in blocks for line in block]
    else:
        lines = [line for block in blocks for line in (*block, ())][:-1]
    return frame("Help", lines, width, height, foot="Esc closes")


class HelpScreen(ModalScreen[None]):
    """Modal help over the current screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,m,q,enter,space", "leave", "close", show=False),
    ]

    def __init__(
        self,
        *,
        is_ascii: bool,
        sections: Sequence[Section] = HELP,
        methods: Sequence[str] = METHODS,
    ) -> None:
        super().__init__()
        self._is_ascii = is_ascii
        self._sections, self._methods = sections, methods

    def compose(self) -> ComposeResult:
        """Yield the one panel."""
        yield Canvas(self._draw, is_ascii=self._is_ascii)

    def action_leave(self) -> None:
        """Close the help."""
        self.dismiss()

    def _draw(self, scene: Scene, width: int, height: int) -> list[Line]:
        return help_lines(width, height, self._sections, self._methods)
