"""Textual application: receives snapshots, draws scenes, and handles keys that change the view.

    source ─► Feed (thread) ─► SnapshotReady ─► App.scene ─► the active screen

A snapshot that arrives while an older one is queued replaces it, so that a slow terminal drops
frames and never keys. Nothing here acts on the observed server.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.messages import ExitApp
from textual.screen import Screen

from inferscope.errors import InferScopeError
from inferscope.fold import RequestRow, Snapshot, json_of
from inferscope.insight import ProfileDocument
from inferscope.private import write_private
from inferscope.slo import Objective, Objectives, file_of
from inferscope.text import REFRESH_RATES_HZ, WINDOWS_NS, Scene
from inferscope.tui.profiling import PROFILE_S, profile_engine
from inferscope.tui.screens import (
    SCREENS,
    DetailScreen,
    HelpScreen,
    KernelScreen,
    MethodScreen,
    OverviewScreen,
    PairScreen,
    SceneScreen,
    TimelineScreen,
)
from inferscope.tui.snapshot_history import SnapshotHistory
from inferscope.tui.source import Feed, SnapshotSource
from inferscope.tui.themes import DARK, LIGHT, theme_of_terminal

Number = TypeVar("Number", int, float)

_GARBAGE = (50_000, 20, 50)
"""Thresholds of the cyclic garbage collector. Snapshots form no cycles, and a full collection of
those that are kept takes 60 ms at 2,000 requests, in which no key is answered."""
_MESSAGE_S = 5.0
_CONFIRM = "a profile slows the engine down for a few seconds: p again makes one"
_TABS = tuple(tab for screen in SCREENS for tab in screen.TABS)


class SnapshotReady(Message):
    """Newest snapshot; it replaces one that was not shown yet."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def can_replace(self, message: Message) -> bool:
        """Return whether the message is a snapshot: only the newest counts."""
        return isinstance(message, SnapshotReady)


class SourceFailed(Message):
    """Failure of the source to return a snapshot."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class SourceWaits(Message):
    """Status of a source that has no snapshot yet."""

    def __init__(self, status: str) -> None:
        super().__init__()
        self.status = status


class InferScopeApp(App[None]):
    """The live screen over a source of snapshots."""

    TITLE = "InferScope"
    CSS_PATH = Path(__file__).with_name("inferscope.tcss")
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(tab.key, f"tab('{tab.key}')", tab.name, show=False) for tab in _TABS),
        Binding("q", "quit", "quit", show=False),
        Binding("space", "freeze", "freeze", show=False),
        Binding("left_square_bracket", "step(-1)", "step back", show=False),
        Binding("right_square_bracket", "step(1)", "step forward", show=False),
        Binding("end", "live", "live", show=False),
        Binding("w", "window", "window", show=False),
        Binding("u", "unit", "unit", show=False),
        Binding("plus,equals_sign", "rate(1)", "faster", show=False),
        Binding("minus", "rate(-1)", "slower", show=False),
        Binding("t", "theme", "theme", show=False),
        Binding("n", "engine", "next engine", show=False),
        Binding("e", "export", "export", show=False),
        Binding("colon", "command_palette", "palette", show=False),
        Binding("question_mark", "help", "help", show=False),
        Binding("m", "methods", "methods", show=False),
        Binding("p", "profile", "profile", show=False),
    ]

    def __init__(
        self,
        source: SnapshotSource,
        *,
        refresh_hz: float = 4,
        ascii: bool = False,
        window_ns: int = WINDOWS_NS[1],
        earlier: Sequence[Snapshot] = (),
        at_idx: int | None = None,
        first_tab: str = "",
    ) -> None:
        """Set up the application for a source.

        Args:
            source: Source of snapshots; a thread of this application reads and finally closes it.
            refresh_hz: Frames per second.
            ascii: Draw with ASCII characters only.
            window_ns: Window of distributions and rates.
            earlier: Earlier snapshots to step back to.
            at_idx: Index of the one to open frozen; None opens on the present.
            first_tab: Key of the screen to open with; empty for the overview.
        """
        super().__init__()
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = theme_of_terminal()
        self.scene = Scene(
            title=getattr(source, "title", ""),
            status=getattr(source, "status", ""),
            refresh_hz=refresh_hz,
            window_ns=window_ns,
        )
        self._is_ascii = ascii
        self._screens = [screen(_TABS, is_ascii=ascii) for screen in SCREENS]
        self._behind = {tab.key: screen for screen in self._screens for tab in screen.TABS}
        """Screens by the keys of their tabs."""
        self._past = SnapshotHistory(earlier)
        self._at_idx = at_idx
        self._first_tab = first_tab
        self._profiling = ""
        """Engine that is being profiled; empty for none."""
        self._marked: RequestRow | None = None
        """Request to compare with the next one that is marked."""
        self._feed = Feed(
            source,
            window_ns=self.scene.window_ns,
            refresh_hz=refresh_hz,
            on_snapshot=lambda snapshot: self._post(SnapshotReady(snapshot)),
            on_failure=lambda reason: self._post(SourceFailed(reason)),
            on_status=lambda status: self._post(SourceWaits(status)),
        )

    def get_default_screen(self) -> Screen[None]:
        """Return the overview."""
        return self._screens[0]

    def on_mount(self) -> None:
        """Show the empty screen, then start fetching."""
        for screen in self._screens[1:]:
            self.install_screen(screen, screen.TABS[0].name)  # else it is removed when it is left
        if self._at_idx is not None:
            self._freeze_at(self._at_idx)
        if self._first_tab:
            self.action_tab(self._first_tab)
        # Not after a refresh: a screen that a key leaves before its first one never has it.
        self.call_later(self._begin)

    def on_unmount(self) -> None:
        """Stop fetching; the source is then closed."""
        self._feed.stop()

    # --- snapshots ------------------------------------------------------------------------------

    def on_snapshot_ready(self, message: SnapshotReady) -> None:
        """Keep the newest snapshot, and show it unless the screen is frozen."""
        self._past.add(message.snapshot)
        if self.scene.is_frozen:
            self._freeze_at(self._past.shown_idx)
        else:
            self.show(replace(self.scene, snapshot=message.snapshot, failure=""))

    def on_source_failed(self, message: SourceFailed) -> None:
        """Show the failure: the screen grows stale."""
        self.show(replace(self.scene, failure=message.reason))

    def on_source_waits(self, message: SourceWaits) -> None:
        """Show the status of the source."""
        if self.scene.snapshot is None:
            self.show(replace(self.scene, status=message.status))

    def show(self, scene: Scene) -> None:
        """Set the current scene and draw it."""
        self.scene = scene
        if not self.screen_stack:
            return
        screen = self.screen
        if isinstance(screen, SceneScreen):
            screen.show(scene)

    def show_message(self, text: str) -> None:
        """Show a short message in reply to a key; an empty text clears it."""
        if text == self.scene.message:
            return
        self.show(replace(self.scene, message=text))
        if text:
            self.set_timer(_MESSAGE_S, lambda: self._clear_message(text))

    def leave(self) -> None:
        """Exit the application soon; any thread may call this."""
        self.post_message(ExitApp())

    # --- requests of the screens
    # -------------------------------------------------------------------

    def attend(self, screen: SceneScreen) -> None:
        """Request what the screen on top needs, and draw it."""
        if self.screen is screen:
            self._feed.set_needs(focus=screen.focus_id, has_steps=screen.NEEDS_STEPS)
            self.show(self.scene)

    def open_request(self, row: RequestRow) -> None:
        """Open the detail of a request."""
        overview = self._screens[0]
        assert isinstance(overview, OverviewScreen)
        self.push_screen(DetailScreen(row, overview.table, _TABS, is_ascii=self._is_ascii))

    def mark(self, row: RequestRow) -> None:
        """Mark a request; with another one marked before, compare the two."""
        marked, name = self._marked, row.external_id or row.request_id
        if marked is None or marked.request_id == row.request_id:
            self._marked = None if marked is not None else row
            text = f"marked {name}: x on another request compares them"
            self.show_message(text if self._marked is not None else f"{name} is not marked now")
            return
        self._marked = None
        self.show_message("")
        self.push_screen(PairScreen(marked, row, _TABS, is_ascii=self._is_ascii))

    def select_engine(self, index: int) -> None:
        """Show another engine on all screens."""
        self.show(replace(self.scene, engine_idx=index))

    def open_step_before(self, request_id: str, at_ns: int) -> None:
        """Show the last step of a request that had ended by a time; the next scene has it."""
        timeline = next(each for each in self._screens if isinstance(each, TimelineScreen))
        timeline.look_for(request_id, at_ns)
        self.action_live()  # a snapshot from before may hold no steps
        if timeline in self.screen_stack:
            while self.screen is not timeline:
                self.pop_screen()
        else:
            self.push_screen(timeline)

    def copy_request(self, row: RequestRow) -> None:
        """Copy a request as JSON to the clipboard (OSC 52)."""
        self.copy_to_clipboard(msgspec.json.encode(row).decode())
        self.show_message(f"copied {row.external_id or row.request_id} as JSON")

    def try_objectives(self, objectives: Objectives | None) -> None:
        """Count the finished requests under other objectives as well; None ends that."""

        def change(source: SnapshotSource) -> None:
            levels = getattr(source, "levels", None)
            if levels is not None:
                levels.trial = objectives

        self._feed.call(change)

    def set_objectives(self, objectives: Objectives) -> None:
        """Judge requests by other objectives from now on, those that are kept included."""

        def change(source: SnapshotSource) -> None:
            levels = getattr(source, "levels", None)
            if levels is not None:
                levels.change(objectives, origin="set here")

        self._feed.call(change)

    def write_objectives(self, objectives: Sequence[Objective]) -> None:
        """Write objectives to a file in the current directory."""
        path = Path("inferscope-slo.yaml")
        try:
            write_private(path, file_of(objectives).encode())
        except OSError as error:
            self.show_message(f"cannot write {path}: {error.strerror}")
            return
        self.show_message(f"wrote {path}: inferscope collect --slo {path}")

    # --- keys -----------------------------------------------------------------------------------

    def action_tab(self, key: str) -> None:
        """Show the screen behind a tab; whatever is over the overview closes."""
        screen = self._behind[key]
        while len(self.screen_stack) > 1 and self.screen is not screen:
            self.pop_screen()
        if self.screen is not screen:
            self.push_screen(screen)
        screen.open_tab(key)

    def action_freeze(self) -> None:
        """Freeze or resume the display."""
        if self.scene.is_frozen:
            self.action_live()
        elif len(self._past):
            self._freeze_at(len(self._past) - 1)

    def action_step(self, step: int) -> None:
        """Step through the retained snapshots; the first step freezes."""
        if not len(self._past):
            return
        shown = self._past.shown_idx if self.scene.is_frozen else len(self._past) - 1
        self._freeze_at(shown + step)

    def action_live(self) -> None:
        """Show the newest snapshot again."""
        if self.scene.is_frozen:
            snapshot = self._past[-1]
            self.show(replace(self.scene, snapshot=snapshot, is_frozen=False, behind_ns=0))

    def action_window(self) -> None:
        """Select the next window."""
        window_ns = _after(WINDOWS_NS, self.scene.window_ns, 1, wraps=True)
        self._set_pace(replace(self.scene, window_ns=window_ns))

    def action_rate(self, step: int) -> None:
        """Change the repaint rate."""
        refresh_hz = _after(REFRESH_RATES_HZ, self.scene.refresh_hz, step, wraps=False)
        self._set_pace(replace(self.scene, refresh_hz=refresh_hz))

    def action_unit(self) -> None:
        """Select the other unit."""
        self.show(replace(self.scene, unit="ms" if self.scene.unit == "%" else "%"))

    def action_engine(self) -> None:
        """Show the next engine."""
        if self.scene.num_engines > 1:
            self.select_engine((self.scene.engine_idx + 1) % self.scene.num_engines)

    def action_theme(self) -> None:
        """Select the other theme."""
        self.theme = DARK.name if self.theme == LIGHT.name else LIGHT.name

    def action_help(self) -> None:
        """Show the help."""
        screen = self.screen
        if isinstance(screen, SceneScreen):
            self.push_screen(
                HelpScreen(
                    is_ascii=self._is_ascii, sections=screen.HELP_SECTIONS, methods=screen.METHODS
                )
            )

    def action_methods(self) -> None:
        """Show the method and the source of the numbers on this screen."""
        screen = self.screen
        if isinstance(screen, SceneScreen):
            self.push_screen(MethodScreen(self.scene, screen.METHODS, is_ascii=self._is_ascii))

    def action_profile(self) -> None:
        """Profile the engine on screen for a few seconds; the second press confirms it."""
        view = self.scene.view
        if view is None or not view.is_alive or self.scene.snapshot is None:
            self.show_message("only a running engine can be profiled")
        elif self._profiling == view.engine_id:
            self.show_message("a profile is being made")
        elif self.scene.message != _CONFIRM:
            self.show_message(_CONFIRM)
        else:
            self._profiling = view.engine_id
            self.show_message(f"profiling {view.engine_id} for {PROFILE_S:g} s")
            self.run_worker(lambda: self._profile(view.engine_id), thread=True)

    def action_export(self) -> None:
        """Write this screen as SVG and its snapshot as JSON into the current directory."""
        snapshot = self.scene.snapshot
        if snapshot is None:
            self.show_message("nothing to export yet")
            return
        name = f"inferscope-{(snapshot.real_ns or snapshot.mono_ns) // 1_000_000}"
        drawing = self.export_screenshot(title="InferScope")
        self.run_worker(lambda: self._write(name, drawing, snapshot), thread=True)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield every key's command by name, for the palette."""
        for tab in _TABS:
            yield SystemCommand(tab.name, f"Screen {tab.key}", partial(self.action_tab, tab.key))
        yield SystemCommand("Freeze", "Freeze or resume the display", self.action_freeze)
        yield SystemCommand("Live", "Show the newest snapshot", self.action_live)
        yield SystemCommand("Window", "10 s, 60 s, 5 min", self.action_window)
        yield SystemCommand("Unit", "% or ms", self.action_unit)
        yield SystemCommand("Theme", "Dark or light", self.action_theme)
        yield SystemCommand("Export", "Screen as SVG, snapshot as JSON", self.action_export)
        yield SystemCommand("Methods", "How the numbers on screen are made", self.action_methods)
        yield SystemCommand("Profile", "Kernels of the engine by phase", self.action_profile)
        yield SystemCommand("Help", "All keys, and how numbers are made", self.action_help)
        yield SystemCommand("Quit", "Quit; the server is unaffected", self.exit)

    # --- helpers --------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.is_headless:
            gc.set_threshold(*_GARBAGE)
            gc.freeze()  # objects loaded by now live until exit
        self.show(self.scene)
        self._feed.start()

    def _post(self, message: Message) -> None:
        self.post_message(message)

    def _freeze_at(self, index: int) -> None:
        snapshot = self._past.show(index)
        behind_ns = max(self._past[-1].mono_ns - snapshot.mono_ns, 0)
        self.show(replace(self.scene, snapshot=snapshot, is_frozen=True, behind_ns=behind_ns))

    def _set_pace(self, scene: Scene) -> None:
        self._feed.set_pace(window_ns=scene.window_ns, refresh_hz=scene.refresh_hz)
        self.show(scene)

    def _clear_message(self, text: str) -> None:
        if self.scene.message == text:
            self.show_message("")

    def _profile(self, engine_id: str) -> None:
        try:
            profile = profile_engine(engine_id)
        except InferScopeError as error:
            self.call_from_thread(self._show_profile, None, str(error))
        else:
            self.call_from_thread(self._show_profile, profile, "")

    def _show_profile(self, profile: ProfileDocument | None, failure: str) -> None:
        self._profiling = ""
        self.show_message(failure)
        if profile is not None:
            self.push_screen(KernelScreen(profile, _TABS, is_ascii=self._is_ascii))

    def _write(self, name: str, drawing: str, snapshot: Snapshot) -> None:
        try:
            write_private(Path(f"{name}.svg"), drawing.encode())
            write_private(Path(f"{name}.json"), json_of(snapshot).encode())
        except OSError as error:
            self.call_from_thread(self.show_message, f"cannot export here: {error}")
            return
        self.call_from_thread(self.show_message, f"wrote {name}.svg and {name}.json")


def _after(choices: tuple[Number, ...], present: Number, step: int, *, wraps: bool) -> Number:
    nearest = min(range(len(choices)), key=lambda i: abs(choices[i] - present))
    index = nearest + step
    index = index % len(choices) if wraps else max(min(index, len(choices) - 1), 0)
    return choices[index]
