"""Source of snapshots with the findings of the run so far.

    source ─► snapshots ─► JudgedSource ─► the same, with findings ─► screen
      └─ steps, requests, records ─► RunSummarizer ──┘

Findings are computed every two seconds: they cover a whole run and change slowly.
"""

from __future__ import annotations

from dataclasses import replace

from inferscope.fold import RunFinding, Snapshot
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.readers import RecordingSource, RingSource

_EVERY_NS = 2_000_000_000


class JudgedSource:
    """Source of snapshots, with the findings of the run up to each.

    Attributes:
        source: source of the snapshots.
    """

    def __init__(self, source: RingSource | RecordingSource, watch: RunSummarizer) -> None:
        """Keep a source, and the summarizer that is its sink and record listener."""
        self.title = source.title
        self.source = source
        self._watch = watch
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
            replace(view, findings=self._found.get(view.engine_id, ())) for view in snapshot.engines
        )
        return replace(snapshot, engines=engines)

    def close(self) -> None:
        """Close the source; safe to call twice."""
        self.source.close()
