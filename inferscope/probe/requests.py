"""The probe's table of requests in flight: what a keyframe restates for those who join late."""

from __future__ import annotations

from array import array

from inferscope.records import WAITING, Live, RequestIndex

MAX_LIVE = 65_536
"""Beyond this the oldest entries are forgotten: an engine that never says `finished` must not grow
us without bound."""
_ROW_BYTES = 4 + 1 + 4 + 4 + 8 + 3
"""Of the columns, and of an id's header."""


class RequestTable:
    """Requests in flight by index. The probe's lock stands around it."""

    def __init__(self) -> None:
        self._next = 0
        self._oldest = 0
        self._rows: dict[int, list[int]] = {}
        """State, prompt and cached tokens, arrival."""
        self._ids: dict[int, str] = {}

    @property
    def num_live(self) -> int:
        """Requests that have entered and not left."""
        return len(self._rows)

    def enter(self, request_id: str, arrived_ns: int, prompt_tokens: int) -> RequestIndex:
        """Add a request and give it the next index."""
        index = RequestIndex(self._next)
        self._next += 1
        while len(self._rows) >= MAX_LIVE:
            # Not `next(iter(rows))`: that walks over every hole at a dict's front, again and again.
            self.leave(RequestIndex(self._oldest))
            self._oldest += 1
        self._rows[index] = [WAITING, prompt_tokens, 0, arrived_ns]
        self._ids[index] = request_id
        return index

    def change(
        self, index: RequestIndex, state: int, prompt_tokens: int | None, cached_tokens: int | None
    ) -> None:
        """Note a new state, and token counts where they are now known."""
        row = self._rows.get(index)
        if row is None:
            return
        row[0] = state
        if prompt_tokens is not None:
            row[1] = prompt_tokens
        if cached_tokens is not None:
            row[2] = cached_tokens

    def leave(self, index: RequestIndex) -> None:
        """Forget a request."""
        self._rows.pop(index, None)
        self._ids.pop(index, None)

    def live(self, now_ns: int, *, record_bytes: int, total_bytes: int) -> list[Live]:
        """Return what is in flight as records; at least one, empty where nothing is.

        Args:
            now_ns: their time.
            record_bytes: the most that one may take.
            total_bytes: the most that all may take. Where that is not enough the newest are taken:
                the oldest are most likely to have been forgotten by their engine.
        """
        chosen: list[list[int]] = [[]]
        room = record_bytes - _ROW_BYTES
        for index in reversed(list(self._rows)):
            num_bytes = _ROW_BYTES + len(self._ids[index].encode())
            total_bytes -= num_bytes
            if total_bytes < 0:
                break
            if num_bytes > room:
                chosen.append([])
                room = record_bytes - _ROW_BYTES
            room -= num_bytes
            chosen[-1].append(index)
        return [self._live(now_ns, part[::-1]) for part in reversed(chosen)]

    def _live(self, now_ns: int, indices: list[int]) -> Live:
        rows = [self._rows[index] for index in indices]
        states, prompts, cached, arrived = ([row[i] for row in rows] for i in range(4))
        return Live(
            now_ns,
            array("I", indices).tobytes(),
            bytes(states),
            array("I", prompts).tobytes(),
            array("I", cached).tobytes(),
            array("q", arrived).tobytes(),
            tuple(self._ids[index] for index in indices),
        )
