"""Textual application over a metrics page, polled in a thread once a second."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from inferscope.errors import InferScopeError
from inferscope.foreign import without_secrets
from inferscope.insight.page import page_findings
from inferscope.json_document import json_line
from inferscope.metrics_page import PageSource, PageView
from inferscope.private import write_private
from inferscope.text import WINDOWS_NS
from inferscope.text.page import unknown_reasons
from inferscope.tui.keys import PAGE_HELP, PAGE_METHODS
from inferscope.tui.screens.help import HelpScreen
from inferscope.tui.screens.page import PageScene, PageScreen
from inferscope.tui.themes import DARK, LIGHT, theme_of_terminal

PACE_S = 1.0
_MESSAGE_S = 5.0


class PageApp(App[None]):
    """Live screen over a server's /metrics, with its history of up to an hour."""

    TITLE = "InferScope"
    CSS_PATH = Path(__file__).with_name("inferscope.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit", show=False),
        Binding("w", "window", "window", show=False),
        Binding("t", "theme", "theme", show=False),
        Binding("space", "freeze", "freeze", show=False),
        Binding("left_square_bracket", "step(-1)", "earlier", show=False),
        Binding("right_square_bracket", "step(1)", "later", show=False),
        Binding("end", "live", "live", show=False),
        Binding("e", "export", "export", show=False),
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
        self._frozen_at: int | None = None
        self._view: PageView | None = None
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
        self._show()

    def action_theme(self) -> None:
        """Toggle between dark and light."""
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_freeze(self) -> None:
        """Freeze the newest reading, or show the newest again; polling continues."""
        self._frozen_at = self._source.num_read - 1 if self._frozen_at is None else None
        self._show()

    def action_step(self, step: int) -> None:
        """Step through the readings; the first step freezes."""
        last = self._source.num_read - 1
        shown = last if self._frozen_at is None else self._frozen_at
        self._frozen_at = max(min(shown + step, last), self._source.first)
        self._show()

    def action_live(self) -> None:
        """Show the newest reading again."""
        self._frozen_at = None
        self._show()

    def action_help(self) -> None:
        """Show the keys, the methods of the numbers, and why others are unknown."""
        reasons = () if self._view is None else unknown_reasons(self._view)
        methods = (*PAGE_METHODS, *reasons)
        self.push_screen(HelpScreen(is_ascii=self._is_ascii, sections=PAGE_HELP, methods=methods))

    def action_export(self) -> None:
        """Write this screen as SVG, its view as JSON and all views seen as JSON Lines, here."""
        if self._view is None:
            self._say("nothing to export yet")
            return
        name = f"inferscope-{self._view.real_ns // 1_000_000}"
        files = {
            f"{name}.svg": self.export_screenshot(title="InferScope"),
            f"{name}.json": json_line(self._view),
            f"{name}.jsonl": "".join(map(json_line, self._source.seen(self._number))),
        }
        self.run_worker(lambda: self._write(files), thread=True, group="export")

    @property
    def _number(self) -> int:
        """Return the number of the reading on the screen; -1 for the newest."""
        return -1 if self._frozen_at is None else self._frozen_at

    def _poll(self) -> None:
        polling = (worker for worker in self.workers if worker.group == "poll")
        if not any(worker.is_running for worker in polling):  # one request at a time
            self.run_worker(self._read, thread=True, group="poll")

    def _read(self) -> None:
        try:
            self._source.poll()
        except InferScopeError as error:
            self.call_from_thread(self._page.fail, str(error))
        else:
            self.call_from_thread(self._show)

    def _show(self) -> None:
        """Draw the newest reading, or the frozen one, over the current window."""
        if not self._source.num_read:
            return
        number, window_ns = self._number, self._window_ns
        self._view = self._source.view_at(number, window_ns)
        self._page.show(
            PageScene(
                view=self._view,
                findings=page_findings(self._source.totals(window_ns, number)).findings or (),
                trends=self._source.trends(window_ns, number),
                place=""
                if self._frozen_at is None
                else f"frozen at reading {number + 1} of {self._source.num_read}",
            )
        )

    def _say(self, text: str) -> None:
        self._page.say(text)
        self.set_timer(_MESSAGE_S, lambda: self._page.say(""))

    def _write(self, files: dict[str, str]) -> None:
        try:
            for name, content in files.items():
                write_private(Path(name), content.encode())
        except OSError as error:
            self.call_from_thread(self._say, f"cannot export here: {error}")
        else:
            self.call_from_thread(self._say, f"wrote {', '.join(files)}")
