"""The thread that writes, and the few batches that may wait for it: who puts one in never waits."""

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
"""Batches, while the disk hangs: some thirty megabytes."""
_FLUSH_S = 3.0
"""On closing, for what is waiting."""


class Writer:
    """Writes batches into a folder, in their order."""

    def __init__(self, folder: Folder, *, name: str) -> None:
        """Start the thread; `name` is how the log calls the files."""
        self._folder = folder
        self._name = name
        self._waiting: deque[RowBatch] = deque()
        self._under_way: RowBatch | None = None
        self._num_too_many = 0
        self._num_left = 0
        self._is_failing = False
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"writer of {name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return how many rows were given up, by reason."""
        return {
            "queue_full": self._num_too_many,
            "not_written": self._folder.num_lost,
            "closed": self._num_left,
        }

    def put(self, batch: RowBatch) -> None:
        """Take a batch; where too many wait, the oldest goes."""
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
            _logger.warning(
                "%s: the disk is too slow; rows are dropped and counted from here on", self._name
            )

    def close(self) -> None:
        """Write what is waiting, as far as that takes no more than three seconds."""
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
            _logger.warning("%s: rows that are not there: %s", self._name, lost)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            trouble = self._try(batch)
            with self._changed:
                self._under_way = None
            if (trouble is not None) != self._is_failing:
                self._is_failing = trouble is not None
                _logger.warning("%s: %s", self._name, trouble or "written again")

    def _try(self, batch: RowBatch) -> str | None:
        """Write a batch; return what kept it from being written."""
        try:
            self._folder.write(batch)
        except Exception as error:  # a thread's top: one batch's trouble must not end it
            why = error.strerror if isinstance(error, OSError) else repr(error)
            return f"not written, dropped and counted from here on: {why or error}"
        return None

    def _next(self) -> RowBatch | None:
        """Wait for the next batch; None is the end."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            self._under_way = self._waiting.popleft() if self._waiting else None
            return self._under_way
