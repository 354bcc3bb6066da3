"""Source of snapshots with the findings of the run so far, and with its objectives.

    source ─► snapshots ─► JudgedSource ─► the same, with findings and levels ─► screen
      └─ steps, requests, records ─► RunSummarizer, LevelsWatch ──┘

Findings are computed every two seconds: they cover a whole run and change slowly.
"""

from __future__ import annotations

from dataclasses import replace

from inferscope.fold import EngineView, RunFinding, ServiceLevels, Snapshot
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.insight.service_levels import LevelsWatch
from inferscope.readers import RecordingSource, RingSource

_EVERY_NS = 2_000_000_000


class JudgedSource:
    """Source of snapshots, with the findings of the run up to each.

    Attributes:
        source: source of the snapshots.
        levels: judge of its requests; None without objectives.
    """

    def __init__(
        self,
        source: RingSource | RecordingSource,
        watch: RunSummarizer,
        levels: LevelsWatch | None = None,
    ) -> None:
        """Keep a source that has not begun, and its sinks, which listen to its records too."""
        self.title = source.title
        self.source = source
        self._watch = watch
        self.levels = levels
        if levels is not None:
            levels.watch(source.collector)
        self._found: dict[str, tuple[RunFinding, ...]] = {}
        self._judged_ns: int | None = None

    @property
    def focus(self) -> str | None:
        """Return the request whose token times the snapshots hold."""
        return self.source.focus

    @focus.setter
    def focus(self, request_id: str | None) -> None:
        self.source.focus = request_id

    @property
    def has_steps(self) -> bool:
        """Return whether the snapshots hold recent steps."""
        return self.source.has_steps

    @has_steps.setter
    def has_steps(self, has_steps: bool) -> None:
        self.source.has_steps = has_steps

    def snapshot(self, window_ns: int) -> Snapshot:
        """Return the current view over a window, with findings."""
        snapshot = self.source.snapshot(window_ns)
        judged_ns = self._judged_ns
        if judged_ns is None or not 0 <= snapshot.mono_ns - judged_ns < _EVERY_NS:
            self._judged_ns = snapshot.mono_ns
            self._found = {
                engine.engine_id: tuple(
                    RunFinding(each.id, each.severity, each.title, each.causes)
                    for each in engine.findings or ()
                )
                for engine in findings(self._watch)
            }
        engines = tuple(
            replace(
                view,
                findings=self._found.get(view.engine_id, ()),
                levels=self._levels_of(view, window_ns),
            )
            for view in snapshot.engines
        )
        return replace(snapshot, engines=engines)

    def _levels_of(self, view: EngineView, window_ns: int) -> ServiceLevels | None:
        if self.levels is None:
            return None
        return self.levels.levels(view.engine_id, window_ns=window_ns, now_ns=view.folded_ns)

    def interrupt(self) -> None:
        """End a running call early if the source is a recording; safe from any thread."""
        if isinstance(self.source, RecordingSource):
            self.source.interrupt()

    def close(self) -> None:
        """Close the source; safe to call twice."""
        self.source.close()
