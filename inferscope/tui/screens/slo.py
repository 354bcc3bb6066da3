"""SLO screen: objectives, distributions, causes of misses, worst requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from inferscope.errors import BadInput
from inferscope.fold import ServiceLevels, WorstRequest
from inferscope.slo import Objective, line_of, objectives_of_line
from inferscope.text import TRIANGLE, Line, Scene, frame
from inferscope.text.bodies import slo_body
from inferscope.text.panels import burn_sentence
from inferscope.tui.keys import SLO_HELP, SLO_KEYS, SLO_METHODS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab

_EDIT_KEYS = (("Enter", "keep them"), ("Esc", "drop them"))


class SloScreen(SceneScreen):
    """Layout and keys of the service levels."""

    AUTO_FOCUS = ""
    TABS = (Tab("5", "SLO", "SLO"),)
    KEYS = SLO_KEYS
    HELP_SECTIONS = SLO_HELP
    METHODS = SLO_METHODS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("g,home", "move(-1000)", "first", show=False),
        Binding("G", "move(1000)", "last", show=False),
        Binding("enter", "open", "ledger", show=False),
        Binding("o", "edit", "change objectives", show=False),
        Binding("W", "write", "write objectives", show=False),
        Binding("y", "copy", "copy request", show=False),
    ]

    _cursor = 0
    """Index of the selected one of the worst requests."""

    def blocks(self) -> Iterable[Widget]:
        """Yield the body, and the input of other objectives."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()
        box = Input(id="objectives", classes="entry", placeholder="ttft 500ms 99%, tbt 200ms 99%")
        box.cursor_blink = False
        yield box

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the objective whose budget burns fastest, with its main cause."""
        text = burn_sentence(self._levels(scene))
        return ((f" {TRIANGLE} ", "alarm"), (text, "body")) if text else ()

    def footer_keys(self) -> tuple[tuple[str, str], ...]:
        """Return the keys of the footer, those of the input while it is open."""
        return _EDIT_KEYS if self._box.display else super().footer_keys()

    # --- the worst requests ---------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        """Select another of the worst requests."""
        self._cursor = max(0, min(self._cursor + step, len(self._worst()) - 1))
        self.show(self.scene)

    def action_open(self) -> None:
        """Open the selected request."""
        if self._worst():
            self.app.open_request(self._selected().row)  # type: ignore[attr-defined]  # as below

    def action_copy(self) -> None:
        """Copy the selected request as JSON."""
        if self._worst():
            self.app.copy_request(self._selected().row)  # type: ignore[attr-defined]  # as below

    # --- objectives -----------------------------------------------------------------------------

    def action_edit(self) -> None:
        """Open the input with the objectives in force."""
        levels = self._levels(self.scene)
        if levels is None or self.scene.is_frozen:
            reason = (
                "no objectives are judged here" if levels is None else "End leads to the present"
            )
            self.app.show_message(f"objectives cannot change: {reason}")  # type: ignore[attr-defined]
            return
        self._box.value = line_of(one.objective for one in levels.objectives)
        self._box.display = True
        self._box.focus()
        self.show(self.scene)

    def action_write(self) -> None:
        """Write the objectives in force to a file."""
        levels = self._levels(self.scene)
        if levels is not None:
            objectives = [one.objective for one in levels.objectives]
            self.app.write_objectives(objectives)  # type: ignore[attr-defined]  # InferScopeApp imports us

    def on_input_changed(self, event: Input.Changed) -> None:
        """Try the objectives while typing; show the error of invalid ones."""
        if not event.input.display:
            return
        try:
            wanted = objectives_of_line(event.value, self._present())
        except BadInput as error:
            self.app.show_message(str(error))  # type: ignore[attr-defined]
            return
        self.app.show_message("")  # type: ignore[attr-defined]
        self.app.try_objectives(wanted)  # type: ignore[attr-defined]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the objectives from now on; invalid ones stay open."""
        try:
            wanted = objectives_of_line(event.value, self._present())
        except BadInput as error:
            self.app.show_message(str(error))  # type: ignore[attr-defined]
            return
        self.app.set_objectives(wanted)  # type: ignore[attr-defined]
        self._close()

    def action_leave(self) -> None:
        """Close the input, or the screen."""
        if self._box.display:
            self._close()
        else:
            super().action_leave()

    def _close(self) -> None:
        self._box.display = False
        self.set_focus(None)
        self.app.try_objectives(None)  # type: ignore[attr-defined]
        self.app.show_message("")  # type: ignore[attr-defined]
        self.show(self.scene)

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _box(self) -> Input:
        return self.query_one("#objectives", Input)

    def _levels(self, scene: Scene) -> ServiceLevels | None:
        return None if scene.view is None else scene.view.levels

    def _present(self) -> list[Objective]:
        levels = self._levels(self.scene)
        return [] if levels is None else [one.objective for one in levels.objectives]

    def _worst(self) -> tuple[WorstRequest, ...]:
        levels = self._levels(self.scene)
        return () if levels is None else levels.worst

    def _selected(self) -> WorstRequest:
        worst = self._worst()
        return worst[min(self._cursor, len(worst) - 1)]

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return frame("Objectives", [(("waiting for an engine", "dim"),)], width, height)
        return slo_body(scene.view, width, height, cursor=self._cursor)
