"""The probe's table of requests in flight: what a keyframe restates for those who join late."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count, islice

from inferscope.records import WAITING, Live, RequestIndex

MAX_LIVE = 65_536
"""Beyond this the oldest entries are forgotten: an engine that never records `finished` must not
grow us without bound."""
_FORGOTTEN_AT_ONCE = 256
"""The first entry of a dict is found by walking over those deleted before it: measured here, up to
0.2 ms, or 1 µs per request forgotten."""
_MOST_NAMED_AT_ONCE = 4096
"""To copy the indices of 65,536 requests takes 0.3 ms."""
MOST_ROW_BYTES = 160
"""Upper bound of a row in `Live`: 21 bytes of columns, an id of at most 128, headers."""


class RequestTable:
    """Requests in flight by index. The probe's lock stands around all calls but `next_index`."""

    def __init__(self) -> None:
        self.next_index = count().__next__
        """Return the next index; atomic, so that it needs no lock."""
        # State, prompt tokens, cached tokens, arrival, id. Two tables, for steps speak of admitted
        # requests: a keyframe lists these first.
        self._waiting: dict[int, list[int | str]] = {}
        self._admitted: dict[int, list[int | str]] = {}
        self._to_list: list[int] = []
        self._has_named_waiting = True
        """No list has begun, or its waiting requests are in `_to_list`."""
        self._room_rows = 0

    @property
    def num_live(self) -> int:
        """Requests that have entered and not left."""
        return len(self._waiting) + len(self._admitted)

    @property
    def indices(self) -> list[RequestIndex]:
        """Return the indices of the requests that have entered and not left."""
        return [RequestIndex(index) for index in (*self._waiting, *self._admitted)]

    @property
    def is_listed(self) -> bool:
        """Return whether everything in flight since `begin_list` has been listed."""
        return self._room_rows <= 0 or (not self._to_list and self._has_named_waiting)

    def enter(self, index: int, request_id: str, arrived_ns: int, prompt_tokens: int) -> None:
        """Add a request under its index."""
        if len(self._waiting) + len(self._admitted) >= MAX_LIVE:
            rows = max(self._waiting, self._admitted, key=len)
            for oldest in list(islice(rows, _FORGOTTEN_AT_ONCE)):
                del rows[oldest]
        self._waiting[index] = [WAITING, prompt_tokens, 0, arrived_ns, request_id]
        if self._to_list and self._has_named_waiting:
            self._to_list.append(index)

    def change(
        self,
        index: RequestIndex,
        state: int | None,
        prompt_tokens: int | None,
        cached_tokens: int | None,
    ) -> None:
        """Note a new state, None for the same, and token counts where they are now known."""
        row = self._admitted.get(index)
        if row is None:
            row = self._waiting.get(index)
            if row is None:
                return
            if state not in (None, WAITING):
                self._admitted[index] = row
                del self._waiting[index]
                if not self._has_named_waiting:
                    self._to_list.append(index)
        if state is not None:
            row[0] = state
        if prompt_tokens is not None:
            row[1] = prompt_tokens
        if cached_tokens is not None:
            row[2] = cached_tokens

    def leave(self, index: RequestIndex) -> None:
        """Forget a request."""
        self._waiting.pop(index, None)
        self._admitted.pop(index, None)

    def begin_list(self, most_bytes: int) -> None:
        """Begin to list what is in flight; requests that enter meanwhile are listed too.

        Args:
            most_bytes: of all records together. Where that is not enough for all, admitted and new
                requests are listed first: engines are most likely to have forgotten old ones.
        """
        self._room_rows = most_bytes // MOST_ROW_BYTES
        self._has_named_waiting = len(self._waiting) <= _MOST_NAMED_AT_ONCE
        if self._has_named_waiting:
            self._to_list = [*self._waiting, *self._admitted]
        else:
            self._to_list = list(self._admitted)

    def next_rows(self, now_ns: int, num_rows: int) -> tuple[Live, int]:
        """Return the next rows of the list as a record, and how far it brings `pass_over`.

        Fewer than asked for where it is time for a pause.
        """
        if not self._to_list and not self._has_named_waiting:
            self._to_list, self._has_named_waiting = list(self._waiting), True
        num_rows = min(num_rows, self._room_rows)
        indices = self._to_list[-num_rows:] if num_rows > 0 else []
        rows, live = [], []
        for index in indices:
            row = self._admitted.get(index) or self._waiting.get(index)
            if row is not None:
                rows.append(row)
                live.append(index)
        return _live(now_ns, live, rows), len(indices)

    def pass_over(self, num_rows: int) -> None:
        """Go on in the list, once the rows before are written."""
        if num_rows:
            del self._to_list[-num_rows:]
            self._room_rows -= num_rows
        if self.is_listed:
            self._to_list, self._has_named_waiting, self._room_rows = [], True, 0


def _live(now_ns: int, indices: Sequence[int], rows: Sequence[Sequence[int | str]]) -> Live:
    states, prompts, cached, arrived, ids = zip(*rows, strict=True) if rows else ((),) * 5
    return Live(
        now_ns,
        array("I", indices).tobytes(),
        bytes(states),
        array("I", prompts).tobytes(),
        array("I", cached).tobytes(),
        array("q", arrived).tobytes(),
        ids,
    )
