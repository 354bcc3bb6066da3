"""Modal with the method and the source of the numbers on the screen below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from inferscope.text import Line, Scene, frame
from inferscope.text.panels import number_sources
from inferscope.tui.canvas import Canvas


class MethodScreen(ModalScreen[None]):
    """Methods of a screen, and the sources of its engine's numbers now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,m,q,enter,space,question_mark", "leave", "close", show=False),
    ]

    def __init__(self, scene: Scene, methods: Sequence[str], *, is_ascii: bool) -> None:
        super().__init__()
        self._below, self._methods, self._is_ascii = scene, methods, is_ascii

    def compose(self) -> ComposeResult:
        """Yield the one panel."""
        yield Canvas(self._draw, is_ascii=self._is_ascii)

    def action_leave(self) -> None:
        """Close the modal."""
        self.dismiss()

    def _draw(self, _: Scene, width: int, height: int) -> list[Line]:
        view = self._below.view
        lines: list[Line] = [(("How each number is made", "title"),)]
        lines += [((f"  {method}", "body"),) for method in self._methods]
        if view is not None:
            lines += [(), (("Sources of this engine now", "title"),), *number_sources(view)]
        return frame("Method", lines, width, height, foot="Esc closes")
