"""Memory limits of request bodies: per body, and in total per API server.

A body counts from the time it exceeds `SMALL_BODY_BYTES` until it is parsed. At the total limit, a
further large body is rejected; a small one never is.
"""

from __future__ import annotations

from starlette.types import Receive

from inferscope.engine.server.errors import ApiError, ClientDisconnected

MOST_BODY_BYTES = 8 << 20
"""Maximum size of one body, in bytes."""
MOST_BODIES_BYTES = 64 << 20
"""Maximum size of all bodies that an API server holds at a time, in bytes."""
SMALL_BODY_BYTES = 64 << 10
"""Bytes per body that are not counted."""
_MOST_DISCARDED_BYTES = 8 * MOST_BODY_BYTES


class Bodies:
    """Memory budget of the bodies in one API server.

    Attributes:
        num_bytes: bytes counted now.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def hold(self) -> Body:
        """Return the budget entry of a body, a context manager."""
        return Body(self)


class Body:
    """Budget entry of one body, released at the end of its context."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_counted = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._count(0)

    async def read(self, receive: Receive) -> bytes:
        """Return the body that the client sends.

        A body over a limit is read and discarded, up to `_MOST_DISCARDED_BYTES`: a client that
        is still sending would lose the response with the connection.

        Raises:
            ApiError: the body is too large, or other bodies use the whole budget.
            ClientDisconnected: the client disconnected.
        """
        parts: list[bytes] = []
        num_bytes, is_held = 0, True
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
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
        """Count the body with this size if the budget allows it; return whether it does."""
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
