"""Bodies of requests while they come and are read: each is bounded, and all together are.

What a body holds in memory counts from its first large piece until it is read. Where all of them
together have taken what they may, a further large body is refused; a small one never is.
"""

from __future__ import annotations

from starlette.types import Receive

from inferscope.engine.server.errors import ApiError, Left

MOST_BODY_BYTES = 8 << 20
MOST_BODIES_BYTES = 64 << 20
"""Maximum of all bodies that an API server holds at a time."""
SMALL_BODY_BYTES = 64 << 10
"""Bytes of each body that are not counted."""
_MOST_DISCARDED_BYTES = 8 * MOST_BODY_BYTES


class Bodies:
    """The memory that bodies take in one API server.

    Attributes:
        num_bytes: taken now.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def hold(self) -> Body:
        """Return a place for a body; to be used as a context."""
        return Body(self)


class Body:
    """One body, held until its context ends."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_counted = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._count(0)

    async def read(self, receive: Receive) -> bytes:
        """Return what the client sends.

        A body that cannot be held is read to its end and thrown away: a client that is still
        sending would lose our answer with the connection. To a point.

        Raises:
            ApiError: it is too large, or others have taken the memory.
            Left: the client has gone.
        """
        parts: list[bytes] = []
        num_bytes, is_held = 0, True
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Left
            part = message.get("body", b"")
            num_bytes += len(part)
            is_held = is_held and num_bytes <= MOST_BODY_BYTES and self._count(num_bytes)
            if is_held:
                parts.append(part)
            else:
                parts.clear()
                self._count(0)
            is_whole = not message.get("more_body", False)
            if not is_held and (is_whole or num_bytes > _MOST_DISCARDED_BYTES):
                raise _too_large(num_bytes) if num_bytes > MOST_BODY_BYTES else _no_memory()
            if is_whole:
                return b"".join(parts)

    def _count(self, num_bytes: int) -> bool:
        """Count the body with this size, if there is room for it; return whether there is."""
        num = max(0, num_bytes - SMALL_BODY_BYTES)
        total = self._bodies.num_bytes + num - self._num_counted
        if num > self._num_counted and total > MOST_BODIES_BYTES:
            return False
        self._bodies.num_bytes, self._num_counted = total, num
        return True


def _too_large(num_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more. Send at most {MOST_BODY_BYTES}.",
        code="body_too_large",
        headers={"connection": "close"},
    )


def _no_memory() -> ApiError:
    return ApiError(
        503,
        f"bodies of other requests take {MOST_BODIES_BYTES >> 20} MiB. Try again.",
        code="too_many_bodies",
        headers={"retry-after": "1"},
    )
