"""Messages between the core and the API servers.

    API server ── Hello, Submit, Cancel, AskStats ──> core     DEALER to ROUTER
    API server <─────── Refused, Stats ── core          same sockets, from the core's main thread
    API server <────────── Welcome, Step ── core        PUSH to PULL, from the step loop's thread

There are two sockets per API server because a ZeroMQ socket belongs to one thread. The step loop
sends a step's outputs itself, one message per API server with outputs, and waits for no other
thread.

With a prefill and a decode engine, an API server has such sockets to the core of each; see
`router.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from inferscope.engine.disagg import KvHandle
from inferscope.engine.request import Finish, Sampling, TokenLogprobs
from inferscope.engine.stats import EngineStats
from inferscope.records import EngineInfo

MOST_UNREAD_STEPS = 2000
"""Maximum unread messages of an API server, per end, before it counts as lost."""
LINGER_MS = 500
"""Milliseconds to send the last messages when a process exits."""

Refusal: TypeAlias = Literal["bad_request", "queue_full", "stopped", "lost", "failed", "no_kv"]
"""Reason of a rejection. The API server itself sets `lost` (the core exited before the request
ended) and `failed` (the request's text could not be processed). `no_kv`: the KV of its prompt did
not arrive from the prefill engine."""


class Hello(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """Message: an API server has started and listens at `address`."""

    name: str
    address: str


class Submit(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Message: a request to queue."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    external_id: str | None
    parent: str
    trace: str = ""
    """W3C trace context, if the API server does not record it in this engine."""
    kv: KvHandle | None = None
    """KV of the prompt, shared by a prefill engine."""
    cache_salt: str = ""
    """Text that keeps its cached blocks apart from those of requests with another one."""


class Cancel(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Message: end a request, which may have ended already."""

    request_id: str
    reason: Finish


class Welcome(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Message: description and limits of the engine."""

    info: EngineInfo
    max_model_tokens: int
    vocab: int
    pid: int
    seed: int
    """Seed of random weights, which are the model's identity."""


class Refused(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Message: a request was rejected."""

    request_id: str
    kind: Refusal
    message: str


class Step(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Message: outputs of a step for one API server.

    Columns cost the step loop half as much as rows.
    """

    request_ids: list[str]
    tokens: list[list[int]]
    ends: dict[str, Finish]
    """Finish reason by id of each request that ended."""
    cached_tokens: dict[str, int]
    """Prompt tokens from the prefix cache by request id, if any; sent with the first tokens."""
    kv: dict[str, KvHandle] = {}
    """KV of finished prompts by request id, if the engine only prefills."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """Log probabilities of the tokens by request id, of requests that ask for them."""


class AskStats(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """Message: a query for the engine's counters; the response has the same number."""

    number: int


class Stats(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """Message: the engine's counters."""

    number: int
    stats: EngineStats


FromServer: TypeAlias = Hello | Submit | Cancel | AskStats
FromCore: TypeAlias = Welcome | Refused | Step | Stats

encode = msgspec.msgpack.encode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode


def core_address(folder: Path) -> str:
    """Return the address of the core's socket."""
    return f"ipc://{folder}/core"


def server_address(folder: Path, name: str) -> str:
    """Return the address of an API server's socket."""
    return f"ipc://{folder}/{name}"
