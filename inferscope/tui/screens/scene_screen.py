"""Base of the screens that draw scenes: header, tabs, blocks of their own, footer.

A screen names the tabs it stands behind in `TABS`, and `SCREENS` lists the screens: number keys,
tab line and palette follow from these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget

from inferscope.text import TRIANGLE, Line, Scene, fit_line, header, status_line
from inferscope.text.plots import plain
from inferscope.tui.canvas import Canvas, Draw
from inferscope.tui.keys import COMMON_HELP, FROZEN_KEYS, METHODS, Key, Section, footer

PANELS_WIDTH, PANELS_HEIGHT = 100, 32
"""Cells of the smallest terminal that shows all panels."""


class Tab(NamedTuple):
    """Tab of a screen: the key that opens it, and its name at either width."""

    key: str
    name: str
    short: str


class SceneScreen(Screen[None]):
    """Screen that draws scenes and stays current while it is on top."""

    TABS: ClassVar[tuple[Tab, ...]] = ()
    KEYS: ClassVar[tuple[Key, ...]] = ()
    """Keys of the footer, most useful first."""
    HELP_SECTIONS: ClassVar[tuple[Section, ...]] = COMMON_HELP
    METHODS: ClassVar[tuple[str, ...]] = METHODS
    """How the numbers of this screen are made."""
    NEEDS_STEPS: ClassVar[bool] = False
    """Whether its scenes need the recent steps."""
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - Textual declares it so
        (0, "-tiny"),
        (60, "-narrow"),
        (PANELS_WIDTH, "-normal"),
        (140, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012 - likewise
        (0, "-flat"),
        (16, "-low"),
        (PANELS_HEIGHT, "-high"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "back", show=False)]

    def __init__(self, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        """Set up the screen.

        Args:
            tabs: tabs of all screens.
            is_ascii: draw with ASCII characters only.
        """
        super().__init__()
        self.is_ascii = is_ascii
        self.scene = Scene()
        self._tabs = tabs
        self._canvases: list[Canvas] = []

    # --- what a screen defines ------------------------------------------------------------------

    def blocks(self) -> Iterable[Widget]:
        """Yield what is between the tabs and the footer."""
        raise NotImplementedError

    @property
    def tab(self) -> str:
        """Return the key of the tab on display."""
        return self.TABS[0].key if self.TABS else ""

    @property
    def focus_id(self) -> str | None:
        """Return the request whose token times its scenes need."""
        return None

    def open_tab(self, key: str) -> None:
        """Prepare to be shown by the key of one of its tabs."""

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the line above the footer while there is nothing else to report."""
        return ()

    def footer_keys(self) -> tuple[Key, ...]:
        """Return the keys of the footer."""
        if not self.scene.is_frozen:
            return self.KEYS
        return FROZEN_KEYS + tuple(key for key in self.KEYS if key[0] != "Space")

    # --- what the application calls -------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Yield header, tabs, blocks and footer."""
        yield self.canvas(_header, "header")
        yield self.added(_TabLine(self._draw_tabs, self._tabs, is_ascii=self.is_ascii))
        yield from self.blocks()
        yield self.canvas(lambda _, width, __: [footer(self.footer_keys(), width)], "footer")

    def show(self, scene: Scene) -> None:
        """Draw a scene; hidden blocks are left out."""
        self.scene = scene
        for canvas in self._canvases:
            if canvas.display:
                canvas.show(scene)

    def on_screen_resume(self) -> None:
        """Draw the current scene: a screen below another one gets none."""
        self.app.attend(self)  # type: ignore[attr-defined]  # InferScopeApp imports us
        self.call_after_refresh(lambda: self.show(self.scene))  # the layout is by its size now

    def action_leave(self) -> None:
        """Return to the screen below."""
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()

    # --- parts ----------------------------------------------------------------------------------

    def canvas(self, draw: Draw, name: str, *, classes: str = "") -> Canvas:
        """Return a canvas that is drawn with every scene."""
        return self.added(Canvas(draw, is_ascii=self.is_ascii, id=name, classes=classes))

    def panel(self, draw: Draw, name: str) -> Canvas:
        """Return a canvas that can have the focus."""
        return self.added(
            Canvas(draw, is_ascii=self.is_ascii, id=name, classes="panel block", can_focus=True)
        )

    def added(self, canvas: Canvas) -> Canvas:
        """Draw a canvas with every scene from now on, and return it."""
        self._canvases.append(canvas)
        return canvas

    def remark_line(self) -> Canvas:
        """Return the line above the footer: a reply to a key, a failure, or a remark."""
        return self.canvas(lambda scene, width, _: [self._remark(scene, width)], "why")

    def _remark(self, scene: Scene, width: int) -> Line:
        if scene.message:
            return fit_line(((f" {plain(scene.message)}", "strong"),), width)
        if scene.failure:
            return fit_line(((f" {TRIANGLE} {plain(scene.failure)}", "alarm"),), width)
        return fit_line(self.remark(scene, width), width)

    def _draw_tabs(self, _: Scene, width: int, __: int) -> list[Line]:
        return [tab_line(self._tabs, self.tab, width)]


class _TabLine(Canvas):
    """Line of tabs; a click opens one."""

    def __init__(self, draw: Draw, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        super().__init__(draw, is_ascii=is_ascii, id="tabs")
        self._tabs = tabs

    def on_click(self, event: events.Click) -> None:
        """Open the tab under the pointer."""
        key = tab_at(self._tabs, self.size.width, event.x)
        if key is not None:
            self.app.action_tab(key)  # type: ignore[attr-defined]  # as above


def tab_line(tabs: tuple[Tab, ...], shown: str, width: int) -> Line:
    """Return the line of tabs, the shown one marked."""
    return fit_line(
        tuple(
            (_tab_text(tab, shown, width), "strong" if tab.key == shown else "dim") for tab in tabs
        ),
        width,
    )


def tab_at(tabs: tuple[Tab, ...], width: int, x: int) -> str | None:
    """Return the key of the tab at a cell of the line; None right of the last."""
    left = 0
    for tab in tabs:
        left += len(_tab_text(tab, "", width))
        if x < left:
            return tab.key
    return None


def _tab_text(tab: Tab, shown: str, width: int) -> str:
    mark = "▸" if tab.key == shown else " "
    return (
        f"{mark}{tab.key} {tab.short} " if width < PANELS_WIDTH else f"{mark}{tab.key} {tab.name}  "
    )


def _header(scene: Scene, width: int, _: int) -> list[Line]:
    return [status_line(scene, width) if width < 60 else header(scene, width)]
