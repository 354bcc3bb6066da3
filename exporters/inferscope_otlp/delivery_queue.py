"""A bounded queue and the thread that empties it: who puts something in never waits for a network.

Why not OpenTelemetry's batch processor: it drops single spans, so that traces lose their roots; it
gives a batch up after ten seconds, though there is room to keep it; it counts what it drops nowhere
that can be read; and its shutdown waits up to half a minute for a dead receiver. Here a whole trace
is the unit, every one is accounted for

    taken = sent + waiting + dropped (queue_full, not_delivered, closed) + left to another

and closing takes a bounded time. What does not arrive goes back to where it stood and is tried
again, later and later, until it is sent or so much has come since that it is the oldest.
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
    """A batch did not arrive; the message says why.

    Attributes:
        again_after_s: how long to wait at least before it is tried again; None: never again.
    """

    def __init__(self, why: str, *, again_after_s: float | None) -> None:
        """Take the reason."""
        super().__init__(why)
        self.again_after_s = again_after_s


QUEUE_FULL, NOT_DELIVERED, CLOSED = "queue_full", "not_delivered", "closed"
"""The oldest of too many; refused for good; still there at the end."""
MOST_AT_ONCE = 128
"""Traces in one post: some hundred kilobytes."""
_GATHER_S = 1.0
"""How long the first of a batch waits for others."""
_FLUSH_S, _INTERRUPTED_S = 1.75, 0.5
"""On closing: for what is waiting; for a post that was told to stop."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""After a failure; each time twice as long."""

_open: weakref.WeakSet[DeliveryQueue[Any]] = weakref.WeakSet()


class DeliveryQueue(Generic[T]):
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
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Start the thread; it delivers nothing before `start`.

        Args:
            deliver: brings a batch to its destination, else raises NotDelivered. It runs on the
                courier's thread and may block. What cannot be made into a message, for which it
                raises anything else, is never tried again.
            interrupt: makes a `deliver` that is blocked come to its end, if that is possible.
            max_waiting: the most that waits; beyond it the oldest is dropped.
            name: for the log.
            gather_s: how long a batch is waited for.
            first_pause_s: after a first failure.
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
        self._heir: DeliveryQueue[T] | None = None
        self._changed = threading.Condition()
        # A daemon: a post that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"courier of {name}", daemon=True)
        self._thread.start()
        _open.add(self)

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
            self._waiting.append(thing)
            self._drop_oldest()
            if len(self._waiting) in (1, self._at_once):
                self._changed.notify()

    def leave_to(self, heir: DeliveryQueue[T]) -> None:
        """Give another one all that waits, also what is on the way if it does not arrive."""
        with self._changed:
            self._heir = heir
            left = list(self._waiting)
            self._waiting.clear()
        heir.take_back(left)

    def take_back(self, things: Sequence[T]) -> None:
        """Take what is older than all that waits, in its order; what came last stays."""
        with self._changed:
            self.num_taken += len(things)
            if self._close_by_s is not None:
                self.num_dropped[CLOSED] += len(things)
                return
            self._waiting.extendleft(reversed(things))
            self._drop_oldest()
            self._changed.notify()

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
            # Should a post still end, it finds nothing on the way that it could count. If it does
            # not arrive, an heir gets it.
            if self._heir is not None:
                self._waiting.clear()
                return
            self.num_dropped[CLOSED] += len(self._waiting) + self._num_on_the_way
            self._waiting.clear()
            self._num_on_the_way = 0
        lost = {reason: num for reason, num in self.num_dropped.items() if num}
        if lost:
            _logger.warning("%s: dropped of %d: %s", self._name, self.num_taken, lost)

    def _drop_oldest(self) -> None:
        """Make what is waiting as much as there is room for; of a batch that came back, too."""
        while len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            self.num_dropped[QUEUE_FULL] += 1
            if self.num_dropped[QUEUE_FULL] == 1:
                _logger.warning(
                    "%s: more than %d are waiting; the oldest are dropped and counted from here on",
                    self._name,
                    self._max_waiting,
                )

    def _run(self) -> None:
        while batch := self._next():
            trouble, again_after_s = self._try(batch)
            self._note(batch, trouble, again_after_s)
            if trouble is not None and again_after_s is not None and not self._pause(again_after_s):
                return

    def _try(self, batch: Sequence[T]) -> tuple[str | None, float | None]:
        """Deliver a batch; return what kept it from arriving, and when to try again."""
        try:
            self._deliver(batch)
        except NotDelivered as error:
            return str(error), error.again_after_s
        except Exception as error:  # a thread's top: one batch's trouble must not end it
            if not self._is_failing:
                _logger.exception("%s: a batch could not be made", self._name)
            return repr(error), None
        return None, None

    def _pause(self, at_least_s: float) -> bool:
        """Wait before the next try; tell whether there is to be one."""
        end_s = time.monotonic() + max(at_least_s, self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        with self._changed:
            while self._close_by_s is None and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return self._close_by_s is None

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

    def _note(self, batch: Sequence[T], trouble: str | None, again_after_s: float | None) -> None:
        """Count the batch that was on the way; say once that trouble began or ended."""
        with self._changed:
            num, self._num_on_the_way = self._num_on_the_way, 0
            if trouble is None:
                self.num_sent += num
                self._pause_s = self._first_pause_s
            elif again_after_s is None:
                self.num_dropped[NOT_DELIVERED] += num
            elif self._heir is not None:
                self._heir.take_back(batch)
            elif self._close_by_s is not None:
                self.num_dropped[CLOSED] += num  # 0 where closing has counted it
            else:
                self._waiting.extendleft(reversed(batch))
                self._drop_oldest()
        if not num or (trouble is not None) == self._is_failing:
            return
        self._is_failing = trouble is not None
        if trouble is None:
            num_lost = sum(self.num_dropped.values())
            _logger.warning("%s: delivered again; %d were dropped", self._name, num_lost)
        elif again_after_s is None:
            _logger.warning(
                "%s: not delivered, dropped and counted from here on: %s", self._name, trouble
            )
        else:
            _logger.warning(
                "%s: not delivered, up to %d wait for another try: %s",
                self._name,
                self._max_waiting,
                trouble,
            )

    def _after_fork(self) -> None:
        """Be closed, in a child: the thread is the parent's, and so is what waits."""
        self._changed = threading.Condition()  # the parent's may be held by a thread that is not
        self._waiting = deque()
        self._num_on_the_way = 0
        self._close_by_s = 0.0


def _after_fork() -> None:
    for courier in list(_open):
        courier._after_fork()


os.register_at_fork(after_in_child=_after_fork)
