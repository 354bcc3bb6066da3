"""What the engine's process and the API servers say to each other.

    API server ── Hello, Submit, Cancel, AskStats ──> core     DEALER to ROUTER
    API server <─────── Refused, Stats ── core          the same way back, from its main thread
    API server <────────── Welcome, Step ── core        PUSH to PULL, from the step loop's thread

Two ways down, because a ZeroMQ socket belongs to one thread and the step loop must not wait for
another: it sends a step's outputs itself, one message per API server that has any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from inferscope.engine.request import Finish, Sampling
from inferscope.engine.stats import EngineStats
from inferscope.records import EngineInfo

MOST_UNREAD_STEPS = 2000
"""Messages that an API server may leave unread before it is given up, at either end."""
LINGER_MS = 500
"""How long the last messages may take when a process ends."""

Refusal: TypeAlias = Literal["bad_request", "queue_full", "stopped", "lost", "failed"]
"""The last two are the API server's own: the core ended before the request did, or the API server
could not write the request's text."""


class Hello(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """An API server has come up and listens there."""

    name: str
    address: str


class Submit(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """A request, to be queued."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    external_id: str | None
    parent: str


class Cancel(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """End a request; it may have ended already."""

    request_id: str
    reason: Finish


class Welcome(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """What the engine is."""

    info: EngineInfo
    max_model_tokens: int
    vocab: int


class Refused(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A request that was not queued."""

    request_id: str
    kind: Refusal
    message: str


class Step(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """What one step did for the requests of one API server.

    In columns, which cost the step loop half of what rows do.
    """

    request_ids: list[str]
    tokens: list[list[int]]
    ends: dict[str, Finish]
    """The requests that are through."""
    cached_tokens: dict[str, int]
    """With their first tokens, of those that had any: prompt tokens from the prefix cache."""


class AskStats(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """A question for the engine's counters; the answer has its number."""

    number: int


class Stats(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The engine's counters."""

    number: int
    stats: EngineStats


FromServer: TypeAlias = Hello | Submit | Cancel | AskStats
FromCore: TypeAlias = Welcome | Refused | Step | Stats

encode = msgspec.msgpack.encode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode


def core_address(folder: Path) -> str:
    """Return where the core listens."""
    return f"ipc://{folder}/core"


def server_address(folder: Path, name: str) -> str:
    """Return where an API server listens."""
    return f"ipc://{folder}/{name}"
