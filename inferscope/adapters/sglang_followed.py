"""What is remembered of SGLang's requests and batches from one hook to a later one."""

from __future__ import annotations

from collections import deque
from typing import Any

from inferscope.adapters.sglang_phases import Rows
from inferscope.records import RequestIndex

MARK = "_inferscope"
"""Attribute of SGLang's `Req` that holds our `Followed`: it lives and dies with the request."""


class Followed:
    """What is remembered of a request while SGLang holds it.

    It ends with SGLang's own object. What had not ended by then, ended where no hook is.
    """

    __slots__ = ("_left", "has_ended", "has_run", "index", "is_held", "num_emitted", "seen")

    def __init__(self, index: int, left: deque[RequestIndex]) -> None:
        """Follow a request.

        Args:
            index: of the request.
            left: takes the index if the request goes before its end was seen.
        """
        self._left = left
        self.index = RequestIndex(index)
        self.seen = 0
        """Positions that had ever been computed."""
        self.num_emitted = 0
        self.has_run = False
        self.is_held = False
        self.has_ended = False

    # A collector may run this anywhere, in a call of the probe too: so it calls nothing.
    def __del__(self) -> None:
        if not self.has_ended:
            self._left.append(self.index)


class Team:
    """Requests that decode together: what stays the same from one of their batches to the next."""

    __slots__ = ("contexts", "followed", "requests", "rows")

    def __init__(self, requests: list[Any], followed: list[Followed], rows: Rows) -> None:
        self.requests = requests
        self.followed = followed
        self.rows = rows
        self.contexts = rows.contexts

    def settle(self) -> None:
        """Note at last how far its requests were computed; step by step that would cost more."""
        for followed, context in zip(self.followed, self.contexts, strict=True):
            followed.seen = max(followed.seen, context + 1)


class Forward:
    """A batch on its way into the model: how its span is to be told."""

    __slots__ = ("batch_size", "is_dummy", "is_over", "mode", "step")

    def __init__(self, step: int, mode: str, batch_size: int, is_dummy: bool) -> None:
        self.is_over = False
        self.step = step
        self.mode = mode
        self.batch_size = batch_size
        self.is_dummy = is_dummy
