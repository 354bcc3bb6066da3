"""Clients that request several long answers at once, some of which stop reading midway.

A client that does not read leaves its answer in the buffers of two kernels and of the server. To be
noticed, it must leave more than they hold: here each answer's stream is over 256 KiB, and the
client's own buffer is made to hold that much and no more.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import termios
import time
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

_ANSWERS = 8
"""Number of answers to one prompt, in one stream."""
_AT_ONCE = 3
_RECEIVE_BUFFER_BYTES = 144 << 10
"""As asked for. The kernel doubles it and here holds 290 kB of an answer's 490; the rest is the
server's to keep."""
_PAUSE = 1.5
_LEAST_S, _MOST_S = 0.3, 0.8
"""Range of a slow client's pause without reads, in multiples of an answer's duration."""


@dataclass(frozen=True)
class Reading:
    """How a client read its answer.

    Attributes:
        took_s: from the request to the last byte.
        num_bytes: of the whole answer.
        unread_bytes: in the client's own kernel when it read on; 0 for who read all along.
        resumed_ns: when that was.
    """

    took_s: float
    num_bytes: int
    unread_bytes: int = 0
    resumed_ns: int | None = None


Readings: TypeAlias = dict[str, Reading]
"""Slow clients by the name of their requests."""


async def read_answers(
    port: int,
    part: str,
    *,
    num: int,
    length: int,
    usual_s: float | None,
    slow_share: float,
    draw: Random,
) -> Readings:
    """Run a few clients one after another, until enough answers have arrived.

    Args:
        port: the server's.
        part: of the run, with which names begin.
        num: of answers; each request has several.
        length: of each answer, in tokens.
        usual_s: what a request takes that is read; needed where some are not.
        slow_share: of the requests, 0..1.
        draw: decides which.
    """
    found: Readings = {}
    names = iter([f"{part}-{number:06d}" for number in range(num // _ANSWERS)])
    pauses = {}
    for number in range(num // _ANSWERS):
        is_slow = draw.random() < slow_share
        more_s = draw.uniform(_LEAST_S, _MOST_S)
        pauses[f"{part}-{number:06d}"] = more_s + _PAUSE * (usual_s or 0.0) if is_slow else None

    async def work() -> None:
        for name in names:
            found[name] = await _ask(port, name, length=length, pause_s=pauses[name])

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return found


async def _ask(port: int, name: str, *, length: int, pause_s: float | None) -> Reading:
    loop = asyncio.get_running_loop()
    body = json.dumps(
        {
            "prompt": f"# {name}\n", "n": _ANSWERS, "max_tokens": length, "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: {name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    began_s = time.monotonic()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        line.setblocking(False)
        await loop.sock_connect(line, ("127.0.0.1", port))
        await loop.sock_sendall(line, head + body)
        num_bytes = len(await loop.sock_recv(line, 4096))
        unread_bytes, resumed_ns = 0, None
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            unread_bytes = _num_unread(line)
            resumed_ns = time.monotonic_ns()
        while piece := await loop.sock_recv(line, 1 << 16):
            num_bytes += len(piece)
    return Reading(time.monotonic() - began_s, num_bytes, unread_bytes, resumed_ns)


def _num_unread(line: socket.socket) -> int:
    answer: int = struct.unpack("i", fcntl.ioctl(line, termios.FIONREAD, b"\0" * 4))[0]
    return answer
