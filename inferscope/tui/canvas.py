"""Textual widget that draws lines and repaints only changed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from inferscope.text import Line, Scene, fit_line
from inferscope.text.plots import to_ascii

Draw = Callable[[Scene, int, int], list[Line]]


_COLOURS = (
    "foreground", "background", "dim", "frame", "bar", "track", "prefill", "decode", "alarm",
    "cursor",
)  # fmt: skip
"""Theme variables that styles are made of."""


@lru_cache(maxsize=8)
def _styles(colours: tuple[tuple[str, str], ...]) -> dict[str, Style]:
    by_name = dict(colours)
    body, paper, dim = by_name["foreground"], by_name["background"], by_name["dim"]
    return {
        "body": Style(color=body, bgcolor=paper),
        "dim": Style(color=dim, bgcolor=paper),
        "strong": Style(color=body, bgcolor=paper, bold=True),
        "title": Style(color=body, bgcolor=paper, bold=True),
        "border": Style(color=by_name["frame"], bgcolor=paper),
        "bar": Style(color=by_name["bar"], bgcolor=paper),
        "gauge": Style(color=by_name["bar"], bgcolor=by_name["track"]),
        "prefill": Style(color=by_name["prefill"], bgcolor=paper),
        "decode": Style(color=by_name["decode"], bgcolor=paper),
        "alarm": Style(color=by_name["alarm"], bgcolor=paper, bold=True),
        "key": Style(color=by_name["decode"], bgcolor=paper, bold=True),
        "cursor": Style(color=body, bgcolor=by_name["cursor"]),
    }


def styles_of(app: App[object], *, has_focus: bool = False) -> dict[str, Style]:
    """Return the style of every role in the current theme; a focused frame stands out."""
    variables: Mapping[str, str] = app.theme_variables
    colours = {name: variables[name] for name in _COLOURS}
    if has_focus:
        colours["frame"] = variables["focus"]
    return _styles(tuple(colours.items()))


class Painter:
    """Cache of a block's strips that detects changed lines."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._strips: list[Strip] = []
        self._key: object = None

    def paint(
        self, lines: list[Line], width: int, styles: dict[str, Style], *, is_ascii: bool
    ) -> list[int]:
        """Update the lines; return the indices of those that look different now."""
        key = (width, id(styles), is_ascii)
        is_same = key == self._key and len(lines) == len(self._lines)
        changed = [i for i, line in enumerate(lines) if not (is_same and line == self._lines[i])]
        if not is_same:
            self._strips = [Strip.blank(width)] * len(lines)
        for i in changed:
            self._strips[i] = _strip(lines[i], width, styles, is_ascii=is_ascii)
        self._lines, self._key = lines, key
        return changed

    def strip(self, y: int, width: int, style: Style) -> Strip:
        """Return the strip of one line; blank beyond the last."""
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(width, style)


def _strip(line: Line, width: int, styles: dict[str, Style], *, is_ascii: bool) -> Strip:
    line = fit_line(line, width)
    is_cursor = line[0] == ("", "cursor")
    under = Style(bgcolor=styles["cursor"].bgcolor) if is_cursor else Style.null()
    segments = []
    for text, role in line:
        style = styles[role] + under
        drawn = text.lstrip(" ")
        if len(drawn) < len(text):  # a picture's renderer may drop leading spaces of a text
            segments.append(Segment(" " * (len(text) - len(drawn)), style))
        if drawn:
            segments.append(Segment(to_ascii(drawn) if is_ascii else drawn, style))
    return Strip(segments, width)


class Canvas(Widget):
    """Widget that shows what a pure function draws from the scene."""

    DEFAULT_CSS = "Canvas { height: 1; width: 1fr; }"

    def __init__(
        self,
        draw: Draw,
        *,
        is_ascii: bool,
        id: str | None = None,
        classes: str | None = None,
        can_focus: bool = False,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.can_focus = can_focus
        self._draw = draw
        self._painter = Painter()
        self._scene = Scene()
        self._is_ascii = is_ascii

    def show(self, scene: Scene) -> None:
        """Draw a scene; only lines that changed are repainted."""
        self._scene = scene
        self._paint()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._paint()

    def on_focus(self) -> None:
        """Brighten the frame."""
        self._paint()

    def on_blur(self) -> None:
        """Dim the frame."""
        self._paint()

    def notify_style_update(self) -> None:
        """Draw with the new theme."""
        super().notify_style_update()
        self._paint()

    def render_line(self, y: int) -> Strip:
        """Return one line of the last drawing."""
        return self._painter.strip(y, self.size.width, styles_of(self.app)["body"])

    def _paint(self) -> None:
        width, height = self.size
        if not (width and height and self.is_mounted):
            return
        lines = self._draw(self._scene, width, height)
        styles = styles_of(self.app, has_focus=self.has_focus)
        changed = self._painter.paint(lines[:height], width, styles, is_ascii=self._is_ascii)
        if changed:
            self.refresh(*[Region(0, y, width, 1) for y in changed])
