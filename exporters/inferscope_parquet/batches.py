"""Batches of final records, of bounded size, with the wall clock and engine labels of their rows.

The fold's thread only appends. A batch is delivered when it is large (a row group of a file) or old
(then its files are completed as well, which bounds the loss by a crash). Time is the snapshots';
for a recording, the recorded time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from inferscope.fold import FinalRequest, FinalStep, Snapshot

_MOST_ROWS = 3 << 15
"""Maximum batch size in slices or equivalent memory.

It is about 8 MB, and as much again in columns while it is written.
"""
_STEP_ROWS, _REQUEST_ROWS = 8, 64
"""Memory of a step and of a request, in slices."""
_CLOCK_STEP_NS = 1_000_000
"""Minimum change in ns of a wall clock that was set: rows before it keep the old one."""


class EngineLabels(NamedTuple):
    """Engine columns of a row; None is unknown."""

    model: str | None = None
    is_synthetic: bool | None = None


@dataclass
class RowBatch:
    """Records that became final in one interval."""

    steps: list[FinalStep] = field(default_factory=list)
    requests: list[FinalRequest] = field(default_factory=list)
    num_rows: int = 0
    """Size in units of one slice's memory."""
    offset_ns: int | None = None
    """Wall clock minus monotonic clock in ns."""
    engines: dict[str, EngineLabels] = field(default_factory=dict)
    ends_files: bool = False
    """Whether its files are complete with it."""


class BatchBuilder:
    """Builder of batches of final records."""

    def __init__(self, deliver: Callable[[RowBatch], None], *, rotate_ns: int) -> None:
        """Keep the receiver of batches, and their maximum age."""
        self._deliver = deliver
        self._rotate_ns = rotate_ns
        self._batch = RowBatch()
        self._began_ns: int | None = None
        self._engines: dict[str, EngineLabels] = {}

    def on_step(self, step: FinalStep) -> None:
        """Add a step, without the fields that only attribution needs."""
        self._batch.steps.append(replace(step, components=None, delay=None))
        self._grow(_STEP_ROWS + len(step.request_ids))

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        self._batch.requests.append(request)
        self._grow(_REQUEST_ROWS + len(request.token_times_ns))

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the wall clock and engine labels; deliver an old batch."""
        self._engines = {
            view.engine_id: EngineLabels(view.model or None, view.is_synthetic)
            for view in snapshot.engines
        }
        if not snapshot.real_ns:
            return
        offset_ns, before_ns = snapshot.real_ns - snapshot.mono_ns, self._batch.offset_ns
        if before_ns is not None and abs(offset_ns - before_ns) > _CLOCK_STEP_NS:
            self._deliver_batch()
        self._batch.offset_ns = offset_ns
        if self._began_ns is None:
            self._began_ns = snapshot.mono_ns
        elif snapshot.mono_ns - self._began_ns >= self._rotate_ns:
            self._began_ns = snapshot.mono_ns
            self.end_files()

    def end_files(self) -> None:
        """Deliver the current batch as the last of its files."""
        self._batch.ends_files = True
        self._deliver_batch()

    def _grow(self, num_rows: int) -> None:
        self._batch.num_rows += num_rows
        if self._batch.num_rows >= _MOST_ROWS and self._batch.offset_ns is not None:
            self._deliver_batch()

    def _deliver_batch(self) -> None:
        batch, self._batch = self._batch, RowBatch(offset_ns=self._batch.offset_ns)
        batch.engines = self._engines
        self._deliver(batch)
