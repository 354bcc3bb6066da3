"""Link of an API server to the core: requests out, outputs in."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from inferscope.engine.disagg import KvHandle, discard
from inferscope.engine.request import Finish, TokenLogprobs
from inferscope.engine.server.wire import (
    LINGER_MS,
    MOST_UNREAD_STEPS,
    AskStats,
    Cancel,
    FromCore,
    Hello,
    Refused,
    Stats,
    Step,
    Submit,
    Welcome,
    core_address,
    decode_from_core,
    encode,
    server_address,
)
from inferscope.engine.stats import EngineStats
from inferscope.errors import InferScopeError

logger = logging.getLogger(__name__)

_STATS_S = 2.0
"""Seconds to wait for counters; the core's main thread sends them during steps."""
_CORE_EXITED = "the engine's process has ended. Start the server again."


class Receiver(Protocol):
    """Receiver of the outputs of one request."""

    def take_tokens(
        self,
        tokens: Sequence[int],
        finish: Finish | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add the tokens of a step, and their log probabilities if the request asks for them."""

    def take_cached_tokens(self, num_tokens: int) -> None:
        """Set the number of prompt tokens in the prefix cache; called before the first tokens."""

    def take_refusal(self, refused: Refused) -> None:
        """Set the engine's rejection, which is the last call."""


class Link:
    """Link of an API server to the core, for use in one event loop.

    Attributes:
        is_lost: whether the core has exited; then every request is rejected.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        own_folder: Path | None = None,
        on_kv: Callable[[str, KvHandle], None] | None = None,
    ) -> None:
        """Set up the link.

        Args:
            folder: directory of the core's socket.
            name: name that no other API server of this engine has or had.
            own_folder: directory of this end's socket; None for the core's.
            on_kv: callback for the KV of a finished prompt, in place of its receiver's last call.
        """
        self.is_lost = False
        self._on_kv = on_kv or (lambda request_id, kv: discard(kv))
        self._name = name
        self._address = server_address(own_folder or folder, name)
        self._core_address = core_address(folder)
        self._context = zmq.asyncio.Context()
        self._out: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._in: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        self._receivers: dict[str, Receiver] = {}
        self._numbers = itertools.count(1)
        self._pending_stats: dict[int, asyncio.Future[EngineStats]] = {}

    @property
    def outage(self) -> str:
        """Reason why every request is rejected; empty while none is."""
        return _CORE_EXITED if self.is_lost else ""

    async def connect(self) -> Welcome:
        """Connect to the core, which may still load its model, and return its welcome."""
        self._in.rcvhwm = MOST_UNREAD_STEPS
        self._in.bind(self._address)
        self._out.linger = LINGER_MS
        # No limit, so that `send` never blocks; the clients' running requests bound it.
        self._out.sndhwm = 0
        self._out.connect(self._core_address)
        await self._out.send(encode(Hello(self._name, self._address)))
        welcome = decode_from_core(await self._in.recv())
        if not isinstance(welcome, Welcome):
            raise InferScopeError(
                f"the engine's process sent {type(welcome).__name__}, not Welcome. "
                "Start the server again."
            )
        return welcome

    async def receive(self) -> None:
        """Dispatch the core's messages until cancelled."""
        await asyncio.gather(self._receive(self._in), self._receive(self._out))

    def name_request(self) -> str:
        """Return a request id that is unique in this engine."""
        return f"{self._name}-{next(self._numbers)}"

    def submit(self, request: Submit, receiver: Receiver) -> None:
        """Submit a request whose outputs go to the receiver."""
        if self.is_lost:
            if request.kv is not None:
                discard(request.kv)
            receiver.take_refusal(Refused(request.request_id, "stopped", _CORE_EXITED))
            return
        self._receivers[request.request_id] = receiver
        self._out.send(encode(request))

    def cancel(self, request_id: str, reason: Finish) -> None:
        """End a request early; its receiver gets no further calls."""
        if self._receivers.pop(request_id, None) is not None:
            self._send(Cancel(request_id, reason))

    async def stats(self) -> EngineStats:
        """Fetch the engine's counters from the core.

        Raises:
            TimeoutError: the core did not respond.
        """
        number = next(self._numbers)
        answer = self._pending_stats[number] = asyncio.get_running_loop().create_future()
        self._send(AskStats(number))
        try:
            return await asyncio.wait_for(answer, _STATS_S)
        except asyncio.TimeoutError:  # not TimeoutError before Python 3.11
            raise TimeoutError from None
        finally:
            del self._pending_stats[number]

    def mark_lost(self) -> None:
        """Reject all requests from now on: the core has exited."""
        self.is_lost = True
        for request_id in list(self._receivers):
            self._take(Refused(request_id, "lost", _CORE_EXITED))

    def close(self) -> None:
        """Send pending messages and close."""
        self._in.close(linger=0)
        self._out.close()
        self._context.term()

    def _send(self, message: Cancel | AskStats) -> None:
        if not self.is_lost:
            self._out.send(encode(message))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(decode_from_core(await socket.recv()))

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Step):
            receivers = self._receivers
            for request_id, num_tokens in message.cached_tokens.items():
                if (receiver := receivers.get(request_id)) is not None:
                    receiver.take_cached_tokens(num_tokens)
            for request_id, kv in message.kv.items():
                receivers.pop(request_id, None)
                self._on_kv(request_id, kv)
            for request_id, tokens in zip(message.request_ids, message.tokens, strict=True):
                finish = message.ends.get(request_id)
                receiver = receivers.get(request_id)
                if receiver is None:
                    continue
                try:
                    receiver.take_tokens(tokens, finish, message.logprobs.get(request_id, ()))
                except Exception as error:  # only this request ends
                    failure = f"{type(error).__name__}: {error}"
                    logger.error(
                        "text of request %s failed; the request ends with an error: %s",
                        request_id,
                        failure,
                    )
                    self.cancel(request_id, "error")
                    receiver.take_refusal(Refused(request_id, "failed", failure))
                if finish is not None:
                    receivers.pop(request_id, None)
        elif isinstance(message, Refused):
            receiver = self._receivers.pop(message.request_id, None)
            if receiver is not None:
                receiver.take_refusal(message)
        elif isinstance(message, Stats):
            answer = self._pending_stats.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.stats)
