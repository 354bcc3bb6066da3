"""Screen of the requests by tenant, adapter, finish or model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from inferscope.fold import EngineView
from inferscope.text import Line, Scene, frame
from inferscope.text.panels import GROUP_KEYS, group_term, grouped, groups
from inferscope.tui.keys import GROUP_SCREEN_KEYS, HELP
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class GroupScreen(SceneScreen):
    """Layout and keys of the groups; Enter filters the list by one of them."""

    KEYS = GROUP_SCREEN_KEYS
    HELP_SECTIONS = HELP
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "open", "requests", show=False),
        Binding("b", "key", "another key", show=False),
    ]

    def __init__(
        self, show_only: Callable[[str], None], tabs: tuple[Tab, ...], *, is_ascii: bool
    ) -> None:
        """Set up the screen; `show_only` filters the list by a term."""
        super().__init__(tabs, is_ascii=is_ascii)
        self._show_only = show_only
        self._key_idx = self._cursor = 0

    def blocks(self) -> Iterable[Widget]:
        """Yield the body."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    @property
    def tab(self) -> str:
        """Return the key of the requests' tab."""
        return "2"

    def action_move(self, step: int) -> None:
        """Select another group."""
        view = self.scene.view
        num = 0 if view is None else len(grouped(view, self._key, self._engines))
        self._cursor = max(0, min(self._cursor + step, num - 1))
        self.show(self.scene)

    def action_key(self) -> None:
        """Group by the next key."""
        self._key_idx, self._cursor = (self._key_idx + 1) % len(GROUP_KEYS), 0
        self.show(self.scene)

    def action_open(self) -> None:
        """Return to the list, filtered by the selected group."""
        view = self.scene.view
        found = [] if view is None else grouped(view, self._key, self._engines)
        self.action_leave()
        if found:
            group = found[min(self._cursor, len(found) - 1)]
            self._show_only(group_term(self._key, group.value))

    @property
    def _key(self) -> str:
        return GROUP_KEYS[self._key_idx]

    @property
    def _engines(self) -> tuple[EngineView, ...]:
        return () if self.scene.snapshot is None else self.scene.snapshot.engines

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return frame("Requests", [(("waiting for an engine", "dim"),)], width, height)
        return groups(
            scene.view, self._key, width, height, cursor=self._cursor, engines=self._engines
        )
