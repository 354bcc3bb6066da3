"""A source with its history: the records since a time, and snapshots along the way.

    rings or recording ─► fold ─┬─► snapshots at chosen times (`earlier`)
                                └─► the present, limited to requests that overlap the window

A fold only moves forward, so snapshots of the past are taken while the fold passes it: at the first
Tick at or after each requested time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from inferscope.fold import (
    EngineView,
    FinalRequest,
    FinalStep,
    RequestRow,
    Sink,
    Snapshot,
    finished_row,
    snapshot,
)
from inferscope.readers.source import Listener, RecordingSource, RingSource, catch_up
from inferscope.records import Record, Tick

NUM_EARLIER = 100
"""Number of past snapshots; with `MOST_ROWS` rows each, about 50 MB."""
MOST_ROWS = 400
MOST_FINISHED = 2000

Open = Callable[[tuple[Sink, ...], Listener], RingSource | RecordingSource]


class HistorySource:
    """Source that is folded up to its present and keeps snapshots and finished requests.

    Attributes:
        title: name of the source.
        earlier: snapshots of the past, oldest first; complete once `catch_up` has returned.
        at_idx: index of the requested snapshot in `earlier`; None if none was requested.
        has_steps: whether that one, and those of the present, include recent steps.
    """

    def __init__(
        self, open_with: Open, *, since_ns: int, until_ns: int, at_ns: int | None, window_ns: int
    ) -> None:
        """Open the source.

        Args:
            open_with: function that opens the source with the given sinks and listener.
            since_ns: wall time at which the kept and displayed history starts.
            until_ns: wall time of the source's present.
            at_ns: wall time of a snapshot that must be among the ones kept.
            window_ns: window of the snapshots.
        """
        self._since_ns, self._window_ns = since_ns, window_ns
        self._at_ns = at_ns
        self._wanted = deque(_looks(since_ns, until_ns, at_ns))
        self._finished: dict[str, deque[tuple[int, RequestRow]]] = {}
        """Delivery times and rows by engine, newest last."""
        self._num_finished = Counter[str]()
        """Number of requests by engine that finished in the history, including those not kept."""
        self._offset_ns = 0
        self.earlier: list[Snapshot] = []
        self.at_idx: int | None = None
        self._source = open_with((self,), self._listen)
        self.title = self._source.title
        self.focus: str | None = None
        self.has_steps = False
        self.collector = self._source.collector

    @property
    def has_ended(self) -> bool:
        """Return whether the source has no more records."""
        return self._source.has_ended

    def catch_up(self, *, patience_s: float | None = None) -> None:
        """Fold all records available now."""
        catch_up(self._source, patience_s=patience_s)
        self._wanted.clear()
        if self._at_ns is not None and self.at_idx is None and self.earlier:
            self.at_idx = len(self.earlier) - 1

    def advance(self) -> int:
        """Fold the records that are due; return their number."""
        return self._source.advance()

    def snapshot(self, window_ns: int) -> Snapshot:
        """Fold the records that are due; return a snapshot without requests before the window."""
        self._source.focus = self.focus
        self._source.has_steps = self.has_steps
        now = self._source.snapshot(window_ns)
        return replace(
            now, engines=tuple(self._limited(view, MOST_FINISHED) for view in now.engines)
        )

    def notes(self) -> tuple[str, ...]:
        """Return warnings about the files."""
        return self._source.notes() if isinstance(self._source, RecordingSource) else ()

    def interrupt(self) -> None:
        """End a running call early if the source is a recording; safe from any thread."""
        if isinstance(self._source, RecordingSource):
            self._source.interrupt()

    def close(self) -> None:
        """Close the source; safe to call twice."""
        self._source.close()

    # --- a sink and a listener ------------------------------------------------------------------

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step: the sums include it already."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request that overlaps the window: more of them than a live screen needs."""
        if request.delivered_ns + self._offset_ns >= self._since_ns:
            kept = self._finished.setdefault(request.engine_id, deque(maxlen=MOST_FINISHED))
            kept.append((request.delivered_ns, finished_row(request)))
            self._num_finished[request.engine_id] += 1

    def _listen(self, ring: int, record: Record) -> None:
        if not isinstance(record, Tick):
            return
        self._offset_ns = record.real_ns - record.t_ns
        if not self._wanted or record.real_ns < self._wanted[0]:
            return
        is_at = False
        while self._wanted and self._wanted[0] <= record.real_ns:
            is_at |= self._wanted.popleft() == self._at_ns
        look = snapshot(
            self.collector,
            window_ns=self._window_ns,
            mode="paused",
            max_requests=MOST_ROWS,
            source=self.title,
            has_steps=is_at and self.has_steps,
        )
        if is_at:
            self.at_idx = len(self.earlier)
        engines = tuple(self._limited(view, MOST_ROWS) for view in look.engines)
        self.earlier.append(replace(look, engines=engines))

    def _limited(self, view: EngineView, most: int) -> EngineView:
        """Return a view with exactly the requests that overlap the window."""
        since_ns = self._since_ns - self._offset_ns
        kept = self._finished.get(view.engine_id, ())
        finished = {(row.request_id, row.arrived_ns) for _, row in kept}
        rows = [
            row
            for row in view.requests
            if row.arrived_ns + row.age_ns >= since_ns
            and (row.request_id, row.arrived_ns) not in finished
        ]
        in_focus = {row.request_id: row for row in view.requests if row.gaps_ns}
        rows += [in_focus.get(row.request_id, row) for _, row in reversed(kept)]
        return replace(
            view,
            requests=tuple(rows[:most]),
            listed_ns=max(view.folded_ns - since_ns, 0),
            num_finished_since=self._num_finished[view.engine_id],
        )


def _looks(since_ns: int, until_ns: int, at_ns: int | None) -> list[int]:
    """Return the wall times of snapshots: evenly over the window, and the requested one."""
    span_ns = max(until_ns - since_ns, 1)
    looks = {since_ns + span_ns * number // NUM_EARLIER for number in range(NUM_EARLIER)}
    return sorted(looks | ({at_ns} if at_ns is not None else set()))
