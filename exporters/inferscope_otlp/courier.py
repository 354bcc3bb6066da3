"""A bounded queue and the thread that empties it: who puts something in never waits for a network.

Why not the SDK's batch processor: it drops single spans, so that traces lose their roots; it counts
what it drops nowhere that can be read; and its shutdown waits up to half a minute for a dead
receiver. Here a whole trace is the unit, every one is accounted for

    taken = sent + waiting + dropped (queue_full, not_delivered, closed)

and closing takes a bounded time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotDelivered(Exception):
    """A batch did not arrive; the message says why."""


QUEUE_FULL, NOT_DELIVERED, CLOSED = "queue_full", "not_delivered", "closed"
MOST_AT_ONCE = 128
"""Traces in one post: some hundred kilobytes."""
_GATHER_S = 1.0
"""How long the first of a batch waits for others."""
_FLUSH_S, _INTERRUPTED_S = 1.75, 0.5
"""On closing: for what is waiting; for a post that was told to stop."""


class Courier(Generic[T]):
    """Takes things at once and delivers them later, in batches, in order.

    Attributes:
        num_taken: things put in.
        num_sent: of them, those delivered.
        num_dropped: of them, those given up, by reason.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[T]], None],
        interrupt: Callable[[], None],
        *,
        max_waiting: int,
        name: str,
        gather_s: float = _GATHER_S,
    ) -> None:
        """Start the thread; it delivers nothing before `start`.

        Args:
            deliver: brings a batch to its destination, else raises NotDelivered. It runs on the
                courier's thread and may block.
            interrupt: makes a `deliver` that is blocked come to its end, if that is possible.
            max_waiting: the most that waits; beyond it the oldest is dropped.
            name: for the log.
            gather_s: how long a batch is waited for.
        """
        self.num_taken = 0
        self.num_sent = 0
        self.num_dropped = dict.fromkeys((QUEUE_FULL, NOT_DELIVERED, CLOSED), 0)
        self._deliver = deliver
        self._interrupt = interrupt
        self._max_waiting = max_waiting
        self._at_once = min(MOST_AT_ONCE, max_waiting)
        self._name = name
        self._gather_s = gather_s
        self._waiting: deque[T] = deque()
        self._num_on_the_way = 0
        self._is_failing = False
        self._has_started = False
        self._close_by_s: float | None = None
        self._changed = threading.Condition()
        # A daemon: a post that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"courier of {name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Return how many are neither delivered nor given up."""
        return len(self._waiting) + self._num_on_the_way

    def start(self) -> None:
        """Begin to deliver; safe to call again."""
        if not self._has_started:
            with self._changed:
                self._has_started = True
                self._changed.notify()

    def put(self, thing: T) -> None:
        """Take one; never waits."""
        with self._changed:
            self.num_taken += 1
            if self._close_by_s is not None:
                self.num_dropped[CLOSED] += 1
                return
            is_full = len(self._waiting) >= self._max_waiting
            if is_full:
                self._waiting.popleft()
                self.num_dropped[QUEUE_FULL] += 1
            self._waiting.append(thing)
            if len(self._waiting) in (1, self._at_once):
                self._changed.notify()
        if is_full and self.num_dropped[QUEUE_FULL] == 1:
            _logger.warning(
                "%s: more than %d are waiting; the oldest are dropped and counted from here on",
                self._name,
                self._max_waiting,
            )

    def close(self) -> None:
        """Deliver what is waiting, as far as that takes no more than about two seconds."""
        with self._changed:
            if self._close_by_s is not None:
                return
            self._close_by_s = time.monotonic() + _FLUSH_S
            self._changed.notify()
        self._thread.join(_FLUSH_S)
        self._interrupt()
        self._thread.join(_INTERRUPTED_S)
        with self._changed:
            # Should a post still end, it finds nothing on the way that it could count.
            self.num_dropped[CLOSED] += len(self._waiting) + self._num_on_the_way
            self._waiting.clear()
            self._num_on_the_way = 0
        lost = {reason: num for reason, num in self.num_dropped.items() if num}
        if lost:
            _logger.warning("%s: dropped of %d: %s", self._name, self.num_taken, lost)

    def _run(self) -> None:
        while batch := self._next():
            self._note(self._try(batch))

    def _try(self, batch: Sequence[T]) -> str | None:
        """Deliver a batch; return what kept it from arriving."""
        try:
            self._deliver(batch)
        except NotDelivered as error:
            return str(error)
        except Exception as error:  # a thread's top: one batch's trouble must not end it
            if not self._is_failing:
                _logger.exception("%s: a batch could not be made", self._name)
            return repr(error)
        return None

    def _next(self) -> list[T]:
        """Wait for the next batch; an empty one is the end."""
        with self._changed:
            while not (self._waiting and self._has_started) and self._close_by_s is None:
                self._changed.wait()
            if self._close_by_s is None and len(self._waiting) < self._at_once:
                self._changed.wait(self._gather_s)
            is_late = self._close_by_s is not None and time.monotonic() >= self._close_by_s
            if is_late or not self._has_started:
                return []
            num = min(self._at_once, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(num)]
            self._num_on_the_way = num
            return batch

    def _note(self, trouble: str | None) -> None:
        """Count the batch that was on the way; say once that trouble began or ended."""
        with self._changed:
            num, self._num_on_the_way = self._num_on_the_way, 0
            if trouble is None:
                self.num_sent += num
            else:
                self.num_dropped[NOT_DELIVERED] += num
        if not num or (trouble is not None) == self._is_failing:
            return
        self._is_failing = trouble is not None
        if trouble is None:
            num_lost = sum(self.num_dropped.values())
            _logger.warning("%s: delivered again; %d were dropped", self._name, num_lost)
        else:
            _logger.warning(
                "%s: not delivered, dropped and counted from here on: %s", self._name, trouble
            )
