"""Textual application over a metrics page, polled in a thread once a second."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from inferscope.errors import InferScopeError
from inferscope.foreign import without_secrets
from inferscope.metrics_page import PageSource
from inferscope.text import WINDOWS_NS
from inferscope.tui.keys import PAGE_HELP, PAGE_METHODS
from inferscope.tui.screens.help import HelpScreen
from inferscope.tui.screens.page import PageScreen
from inferscope.tui.themes import DARK, LIGHT, theme_of_terminal

PACE_S = 1.0


class PageApp(App[None]):
    """Live screen over a server's /metrics."""

    TITLE = "InferScope"
    CSS_PATH = Path(__file__).with_name("inferscope.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit", show=False),
        Binding("w", "window", "window", show=False),
        Binding("t", "theme", "theme", show=False),
        Binding("question_mark,m", "help", "help", show=False),
    ]

    def __init__(
        self, source: PageSource, *, window_ns: int, ascii: bool = False, pace_s: float = PACE_S
    ) -> None:
        """Set up the application for a page and an initial window."""
        super().__init__()
        self._is_ascii = ascii
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_of_terminal()
        self._source = source
        self._window_ns = window_ns
        self._pace_s = pace_s
        self._page = PageScreen(without_secrets(source.url), is_ascii=ascii)

    def get_default_screen(self) -> Screen[None]:
        """Return the only screen."""
        return self._page

    def on_mount(self) -> None:
        """Poll now and once a period."""
        self._poll()
        self.set_interval(self._pace_s, self._poll)

    def action_window(self) -> None:
        """Select the next longer window, the shortest after the longest."""
        longer = [each for each in WINDOWS_NS if each > self._window_ns]
        self._window_ns = longer[0] if longer else WINDOWS_NS[0]

    def action_theme(self) -> None:
        """Toggle between dark and light."""
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_help(self) -> None:
        """Show the keys and the methods of the numbers."""
        self.push_screen(
            HelpScreen(is_ascii=self._is_ascii, sections=PAGE_HELP, methods=PAGE_METHODS)
        )

    def _poll(self) -> None:
        if not any(worker.is_running for worker in self.workers):  # one request at a time
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        try:
            view = self._source.view(self._window_ns)
        except InferScopeError as error:
            self.call_from_thread(self._page.show, None, str(error))
        else:
            self.call_from_thread(self._page.show, view, "")
