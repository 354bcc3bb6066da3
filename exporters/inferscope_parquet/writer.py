"""Writer thread with a short queue of batches: adding one never waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from inferscope_parquet.batches import RowBatch

if TYPE_CHECKING:
    from inferscope_parquet.folder import Folder

_logger = logging.getLogger(__name__)

_MOST_WAITING = 4
"""Maximum number of waiting batches: about 30 MB."""
_FLUSH_S = 3.0
"""Maximum seconds on closing for waiting batches."""


class BatchWriter:
    """Writer of batches into a folder, in order."""

    def __init__(self, folder: Folder, *, name: str) -> None:
        """Start the thread; `name` is the name in the log."""
        self._folder = folder
        self._name = name
        self._waiting: deque[RowBatch] = deque()
        self._under_way: RowBatch | None = None
        self._num_too_many = 0
        self._num_left = 0
        self._is_failing = False
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon: a hanging disk must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"writer of {name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return the number of dropped rows, by reason."""
        return {
            "queue_full": self._num_too_many,
            "not_written": self._folder.num_lost,
            "closed": self._num_left,
        }

    def put(self, batch: RowBatch) -> None:
        """Add a batch; if too many wait, drop the oldest."""
        is_first = False
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING:
                oldest = self._waiting.popleft()
                self._waiting[0].ends_files |= oldest.ends_files
                is_first = not self._num_too_many
                self._num_too_many += self._folder.num_rows(oldest)
            self._waiting.append(batch)
            self._changed.notify()
        if is_first:
            _logger.warning("%s: the disk is too slow; rows are dropped and counted", self._name)

    def close(self) -> None:
        """Write what is waiting, within three seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_FLUSH_S)
        with self._changed:
            left = [*self._waiting, *filter(None, (self._under_way,))]
            self._num_left = sum(map(self._folder.num_rows, left))
            self._waiting.clear()
        lost = {reason: num for reason, num in self.num_dropped.items() if num}
        if lost:
            _logger.warning("%s: rows dropped: %s", self._name, lost)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            failure = self._write(batch)
            with self._changed:
                self._under_way = None
            if (failure is not None) != self._is_failing:
                self._is_failing = failure is not None
                _logger.warning("%s: %s", self._name, failure or "writing resumed")

    def _write(self, batch: RowBatch) -> str | None:
        """Write a batch; return the failure."""
        try:
            self._folder.write(batch)
        except Exception as error:  # a thread's top level: one bad batch must not end it
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            return f"write failed, rows are dropped and counted: {reason or error}"
        return None

    def _next(self) -> RowBatch | None:
        """Wait for the next batch; None ends the thread."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            self._under_way = self._waiting.popleft() if self._waiting else None
            return self._under_way
