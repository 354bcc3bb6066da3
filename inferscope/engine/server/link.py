"""An API server's way to the engine's process: requests out, what steps did for them in."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from inferscope.engine.request import Finish, Sampling
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
"""The core answers between two messages, whatever its steps take."""
_GONE = "the engine's process has ended."


class Receiver(Protocol):
    """Who waits for the outputs of one request."""

    def take_tokens(self, tokens: Sequence[int], finish: Finish | None) -> None:
        """Take what a step brought."""

    def take_cached_tokens(self, num_tokens: int) -> None:
        """Take how much of the prompt was in the prefix cache; before the first tokens."""

    def take_refusal(self, refused: Refused) -> None:
        """Take the engine's no; nothing comes after it."""


class Link:
    """Carries requests of one API server to the core. Belongs to one event loop.

    Attributes:
        is_lost: the core is gone; every request is refused.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Name the API server; no other one of this engine ever has the same name."""
        self.is_lost = False
        self._name = name
        self._address = server_address(folder, name)
        self._core_address = core_address(folder)
        self._context = zmq.asyncio.Context()
        self._out: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._in: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        self._receivers: dict[str, Receiver] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}

    async def connect(self) -> Welcome:
        """Meet the core, which may still be loading its model."""
        self._in.rcvhwm = MOST_UNREAD_STEPS
        self._in.bind(self._address)
        self._out.linger = LINGER_MS
        # No limit, so that `send` never waits; what clients may have under way bounds it.
        self._out.sndhwm = 0
        self._out.connect(self._core_address)
        await self._out.send(encode(Hello(self._name, self._address)))
        welcome = decode_from_core(await self._in.recv())
        if not isinstance(welcome, Welcome):
            raise InferScopeError(f"the engine's process greets with {type(welcome).__name__}")
        return welcome

    async def receive(self) -> None:
        """Hand on what the core says, until cancelled."""
        await asyncio.gather(self._receive(self._in), self._receive(self._out))

    def name_request(self) -> str:
        """Return an id that no other request of this engine has."""
        return f"{self._name}-{next(self._numbers)}"

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        receiver: Receiver,
        *,
        external_id: str | None,
        parent: str,
    ) -> None:
        """Hand a request in; what becomes of it comes to the receiver."""
        if self.is_lost:
            receiver.take_refusal(Refused(request_id, "stopped", _GONE))
            return
        message = encode(Submit(request_id, list(prompt), sampling, external_id, parent))
        self._receivers[request_id] = receiver
        self._out.send(message)

    def cancel(self, request_id: str, reason: Finish) -> None:
        """End a request early; its receiver hears no more."""
        if self._receivers.pop(request_id, None) is not None:
            self._say(Cancel(request_id, reason))

    async def stats(self) -> EngineStats:
        """Ask the core for the engine's counters.

        Raises:
            TimeoutError: no answer came.
        """
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._say(AskStats(number))
        try:
            return await asyncio.wait_for(answer, _STATS_S)
        except asyncio.TimeoutError:  # another type than TimeoutError before Python 3.11
            raise TimeoutError from None
        finally:
            del self._asked[number]

    def lose(self) -> None:
        """Refuse everything from now on: the core is gone."""
        self.is_lost = True
        for request_id in list(self._receivers):
            self._take(Refused(request_id, "lost", _GONE))

    def close(self) -> None:
        """Send what is still to be sent, and close."""
        self._in.close(linger=0)
        self._out.close()
        self._context.term()

    def _say(self, message: Cancel | AskStats) -> None:
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
            for request_id, tokens in zip(message.request_ids, message.tokens, strict=True):
                finish = message.ends.get(request_id)
                receiver = receivers.get(request_id)
                if receiver is None:
                    continue
                try:
                    receiver.take_tokens(tokens, finish)
                except Exception as error:  # it costs this request, not all of the API server's
                    failure = f"{type(error).__name__}: {error}"
                    logger.error("request %s ends with an error: %s", request_id, failure)
                    self.cancel(request_id, "error")
                    receiver.take_refusal(Refused(request_id, "failed", failure))
                if finish is not None:
                    receivers.pop(request_id, None)
        elif isinstance(message, Refused):
            receiver = self._receivers.pop(message.request_id, None)
            if receiver is not None:
                receiver.take_refusal(message)
        elif isinstance(message, Stats):
            answer = self._asked.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.stats)
