"""Tests that bodies use bounded memory in total, and small ones are always accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from inferscope.engine.server.bodies import (
    MOST_BODIES_BYTES,
    MOST_BODY_BYTES,
    SMALL_BODY_BYTES,
    Bodies,
)
from inferscope.engine.server.errors import ApiError, ClientDisconnected

MIB = bytes(1 << 20)


def read(bodies: Bodies, pieces: list[bytes]) -> int:
    """Return the length of a body received in pieces; b"" is a disconnect."""

    def messages() -> Iterator[Message]:
        for number, piece in enumerate(pieces, 1):
            if not piece:
                yield {"type": "http.disconnect"}
            yield {"type": "http.request", "body": piece, "more_body": number < len(pieces)}

    coming = messages()

    async def receive() -> Message:
        return next(coming)

    with bodies.hold() as held:
        return len(asyncio.run(held.read(receive)))


def test_large_bodies_share_bounded_memory_and_small_ones_are_always_read() -> None:
    bodies = Bodies()
    taken = MOST_BODIES_BYTES - (3 << 20)
    bodies.num_bytes = taken
    assert read(bodies, [MIB] * 3) == 3 << 20
    with pytest.raises(ApiError) as caught:
        read(bodies, [MIB] * 4)
    assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "1"})
    bodies.num_bytes = MOST_BODIES_BYTES
    assert read(bodies, [bytes(SMALL_BODY_BYTES)]) == SMALL_BODY_BYTES
    assert bodies.num_bytes == MOST_BODIES_BYTES


@given(
    pieces=st.lists(st.sampled_from([b"", b"x", MIB, bytes(MOST_BODY_BYTES)]), min_size=1),
    taken=st.integers(0, MOST_BODIES_BYTES),
)
def test_body_memory_is_released_however_it_ends(pieces: list[bytes], taken: int) -> None:
    bodies = Bodies()
    bodies.num_bytes = taken
    num_bytes = sum(map(len, pieces))
    refusals = {413 if num_bytes > MOST_BODY_BYTES else 503}
    assert outcome(bodies, pieces) in {"left" if b"" in pieces else num_bytes, *refusals}
    assert bodies.num_bytes == taken


def outcome(bodies: Bodies, pieces: list[bytes]) -> int | str:
    """Return a body's length, the status of its error, or that the client disconnected."""
    try:
        return read(bodies, pieces)
    except ClientDisconnected:
        return "left"
    except ApiError as error:
        return error.status
