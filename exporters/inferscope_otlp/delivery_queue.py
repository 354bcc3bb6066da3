"""A bounded queue with a sending thread: adding an item never waits for the network.

OpenTelemetry's batch processor is unsuitable: it drops single spans, so that traces lose their
roots; it discards a batch after ten seconds although there is space; its drop counts cannot be
read; and its shutdown waits up to half a minute for a dead receiver. Here a whole trace is the
unit, and every one is accounted for:

    taken = sent + waiting + dropped (queue_full, not_delivered, closed) + transferred

Closing takes a bounded time. A batch that is not delivered returns to its place in the queue and is
retried with increasing delays, until it is sent or dropped as the oldest.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotDelivered(Exception):
    """Failed delivery of a batch; the message is the reason.

    Attributes:
        retry_after_s: minimum delay before a retry; None: no retry.
    """

    def __init__(self, reason: str, *, retry_after_s: float | None) -> None:
        """Keep the reason."""
        super().__init__(reason)
        self.retry_after_s = retry_after_s


QUEUE_FULL, NOT_DELIVERED, CLOSED = "queue_full", "not_delivered", "closed"
"""Drop reasons: oldest of too many; refused permanently; left at the end."""
MOST_AT_ONCE = 128
"""Maximum number of traces in one post, about 100 KB."""
_GATHER_S = 1.0
"""Seconds that the first item of a batch waits for others."""
_FLUSH_S, _INTERRUPTED_S = 1.75, 0.5
"""Maximum seconds on closing: for waiting items; for an interrupted post."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Delays after a failure; each is twice the previous one."""

_open: weakref.WeakSet[DeliveryQueue[Any]] = weakref.WeakSet()


class DeliveryQueue(Generic[T]):
    """Queue that delivers items later, in batches and in order.

    Attributes:
        num_taken: items added.
        num_sent: items delivered.
        num_dropped: items dropped, by reason.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[T]], None],
        interrupt: Callable[[], None],
        *,
        max_waiting: int,
        name: str,
        gather_s: float = _GATHER_S,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Start the thread; it delivers nothing before `start`.

        Args:
            deliver: delivers a batch or raises NotDelivered. It runs on the queue's thread and may
                block.
                A batch for which it raises anything else is not retried.
            interrupt: ends a blocked `deliver`, if possible.
            max_waiting: maximum number of items; beyond it the oldest is dropped.
            name: name in the log.
            gather_s: seconds to wait for a batch to fill.
            first_pause_s: delay after a first failure.
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
        self._first_pause_s = self._pause_s = first_pause_s
        self._waiting: deque[T] = deque()
        self._num_on_the_way = 0
        self._is_failing = False
        self._has_started = False
        self._close_by_s: float | None = None
        self._successor: DeliveryQueue[T] | None = None
        self._changed = threading.Condition()
        # A daemon: a hanging post must not keep the process from exiting.
        self._thread = threading.Thread(
            target=self._run, name=f"delivery queue of {name}", daemon=True
        )
        self._thread.start()
        _open.add(self)

    @property
    def num_waiting(self) -> int:
        """Return the number of items neither delivered nor dropped."""
        return len(self._waiting) + self._num_on_the_way

    def start(self) -> None:
        """Start to deliver; safe to call again."""
        if not self._has_started:
            with self._changed:
                self._has_started = True
                self._changed.notify()

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        with self._changed:
            self.num_taken += 1
            if self._close_by_s is not None:
                self.num_dropped[CLOSED] += 1
                return
            self._waiting.append(item)
            self._drop_oldest()
            if len(self._waiting) in (1, self._at_once):
                self._changed.notify()

    def transfer_to(self, successor: DeliveryQueue[T]) -> None:
        """Transfer all waiting items to another queue, and those in delivery if it fails."""
        with self._changed:
            self._successor = successor
            left = list(self._waiting)
            self._waiting.clear()
        successor.requeue(left)

    def requeue(self, items: Sequence[T]) -> None:
        """Add older items in front, in their order; the newest stay last."""
        with self._changed:
            self.num_taken += len(items)
            if self._close_by_s is not None:
                self.num_dropped[CLOSED] += len(items)
                return
            self._waiting.extendleft(reversed(items))
            self._drop_oldest()
            self._changed.notify()

    def close(self) -> None:
        """Deliver what is waiting, within about two seconds."""
        with self._changed:
            if self._close_by_s is not None:
                return
            self._close_by_s = time.monotonic() + _FLUSH_S
            self._changed.notify()
        self._thread.join(_FLUSH_S)
        self._interrupt()
        self._thread.join(_INTERRUPTED_S)
        with self._changed:
            # A post that still ends finds nothing in delivery to count. If it fails, the successor
            # gets its batch.
            if self._successor is not None:
                self._waiting.clear()
                return
            self.num_dropped[CLOSED] += len(self._waiting) + self._num_on_the_way
            self._waiting.clear()
            self._num_on_the_way = 0
        lost = {reason: num for reason, num in self.num_dropped.items() if num}
        if lost:
            _logger.warning("%s: dropped of %d: %s", self._name, self.num_taken, lost)

    def _drop_oldest(self) -> None:
        """Drop the oldest items beyond the maximum, also after a batch returned."""
        while len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            self.num_dropped[QUEUE_FULL] += 1
            if self.num_dropped[QUEUE_FULL] == 1:
                _logger.warning(
                    "%s: more than %d traces are waiting; the oldest are dropped and counted",
                    self._name,
                    self._max_waiting,
                )

    def _run(self) -> None:
        while batch := self._next():
            failure, retry_after_s = self._deliver_batch(batch)
            self._count_result(batch, failure, retry_after_s)
            if failure is not None and retry_after_s is not None and not self._pause(retry_after_s):
                return

    def _deliver_batch(self, batch: Sequence[T]) -> tuple[str | None, float | None]:
        """Deliver a batch; return the failure and the delay before a retry."""
        try:
            self._deliver(batch)
        except NotDelivered as error:
            return str(error), error.retry_after_s
        except Exception as error:  # a thread's top level: one bad batch must not end it
            if not self._is_failing:
                _logger.exception("%s: a batch could not be encoded", self._name)
            return repr(error), None
        return None, None

    def _pause(self, at_least_s: float) -> bool:
        """Wait before a retry; return whether to retry."""
        end_s = time.monotonic() + max(at_least_s, self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        with self._changed:
            while self._close_by_s is None and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return self._close_by_s is None

    def _next(self) -> list[T]:
        """Wait for the next batch; an empty one ends the thread."""
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

    def _count_result(
        self, batch: Sequence[T], failure: str | None, retry_after_s: float | None
    ) -> None:
        """Count a finished delivery; log once when failures begin or end."""
        with self._changed:
            num, self._num_on_the_way = self._num_on_the_way, 0
            if failure is None:
                self.num_sent += num
                self._pause_s = self._first_pause_s
            elif retry_after_s is None:
                self.num_dropped[NOT_DELIVERED] += num
            elif self._successor is not None:
                self._successor.requeue(batch)
            elif self._close_by_s is not None:
                self.num_dropped[CLOSED] += num  # 0 if closing has counted it
            else:
                self._waiting.extendleft(reversed(batch))
                self._drop_oldest()
        if not num or (failure is not None) == self._is_failing:
            return
        self._is_failing = failure is not None
        if failure is None:
            num_lost = sum(self.num_dropped.values())
            _logger.warning("%s: delivery resumed; %d items were dropped", self._name, num_lost)
        elif retry_after_s is None:
            _logger.warning(
                "%s: delivery failed, items are dropped and counted: %s", self._name, failure
            )
        else:
            _logger.warning(
                "%s: delivery failed, up to %d items wait for a retry: %s",
                self._name,
                self._max_waiting,
                failure,
            )

    def _after_fork(self) -> None:
        """Mark a forked child's queue as closed: thread and items belong to the parent."""
        self._changed = threading.Condition()  # the old one may be locked
        self._waiting = deque()
        self._num_on_the_way = 0
        self._close_by_s = 0.0


def _after_fork() -> None:
    for queue in list(_open):
        queue._after_fork()


os.register_at_fork(after_in_child=_after_fork)
