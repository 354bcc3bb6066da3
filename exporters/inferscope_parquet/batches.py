"""Gathers what is final into batches of bounded size, each with the wall clock and names it needs.

The fold's thread only appends. A batch is handed on when it is large (a row group of a file), or
old (then the files it goes into are ended as well: what a crash can cost). Time is the snapshots':
of a recording, the recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot

_MOST_ROWS = 3 << 15
"""Slices, or as much memory in steps, requests and tokens: some eight megabytes, and while they are
written as much again in columns."""
_STEP_ROWS, _REQUEST_ROWS = 8, 64
"""What a step and a request take besides, in slices."""
_CLOCK_STEP_NS = 1_000_000
"""A wall clock that moved by more was set: rows before it keep the old one."""


class EngineLabels(NamedTuple):
    """What rows say of their engine; None is unknown."""

    model: str | None = None
    is_synthetic: bool | None = None


@dataclass
class RowBatch:
    """What became final in a while."""

    steps: list[FinalStep] = field(default_factory=list)
    requests: list[FinalRequest] = field(default_factory=list)
    num_rows: int = 0
    """As memory is counted."""
    offset_ns: int | None = None
    """Wall clock less monotonic clock."""
    engines: dict[str, EngineLabels] = field(default_factory=dict)
    ends_files: bool = False
    """Whether the files it goes into are complete with it."""


class BatchBuilder:
    """Makes batches of what is final."""

    def __init__(self, deliver: Callable[[RowBatch], None], *, rotate_ns: int) -> None:
        """Take what receives the batches, and how old one may become."""
        self._deliver = deliver
        self._rotate_ns = rotate_ns
        self._batch = RowBatch()
        self._began_ns: int | None = None
        self._engines: dict[str, EngineLabels] = {}

    def step(self, step: FinalStep) -> None:
        """Take a step, without what only the rules of attribution need."""
        self._batch.steps.append(replace(step, components=None, delay=None))
        self._grow(_STEP_ROWS + len(step.request_ids))

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
        self._batch.requests.append(request)
        self._grow(_REQUEST_ROWS + len(request.token_times_ns))

    def look(self, snapshot: Snapshot) -> None:
        """Take the wall clock and what engines are; hand on what is old."""
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
        """Hand on what there is, as the last of its files."""
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
