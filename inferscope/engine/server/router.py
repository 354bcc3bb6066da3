"""Routing of each request through a prefill engine and then a decode engine.

    submit ─> prefill engine ── KvHandle ─> decode engine ── tokens ─> receiver

The client's request is one request of the decode engine, whose records run from its receipt to its
last byte; the wait for the prefill engine is its wait for KV. The prefill engine's part is a
request of that engine, named by the transfer record. Both carry the client's trace context.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from inferscope.engine.disagg import KvHandle, discard
from inferscope.engine.request import Finish, Sampling, TokenLogprobs
from inferscope.engine.server.link import Link, Receiver
from inferscope.engine.server.wire import Refused, Submit, Welcome
from inferscope.engine.stats import EngineStats
from inferscope.errors import BadInput

_PREFILL_ONLY = Sampling(max_tokens=1)
_PREFILL_EXITED = "the prefill engine has exited; its successor may be loading. Try again."


class _Leg:
    """Receiver of a request's outputs: of the prefill engine's, then of the decode engine's."""

    def __init__(self, router: Router, request: Submit, receiver: Receiver) -> None:
        self._router = router
        self.request = request
        self._receiver = receiver
        self._is_decoding = False
        self._asked_ns = time.monotonic_ns()

    def decode(self, kv: KvHandle | None) -> None:
        """Submit the request to the decode engine."""
        self._is_decoding = True
        if kv is not None:
            kv = replace(kv, asked_ns=self._asked_ns)
        self._router.decode.submit(replace(self.request, trace="", kv=kv), self)

    def take_tokens(
        self,
        tokens: Sequence[int],
        finish: Finish | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Pass on the decode engine's tokens; the prefill engine's one is computed again there."""
        if self._is_decoding:
            self._receiver.take_tokens(tokens, finish, logprobs)
        elif finish is not None:  # without its KV
            self._router.forget(self)
            self._receiver.take_tokens([], finish)

    def take_cached_tokens(self, num_tokens: int) -> None:
        """Pass on the prefill engine's hits; on the decode engine, received tokens count too."""
        if not self._is_decoding:
            self._receiver.take_cached_tokens(num_tokens)

    def take_refusal(self, refused: Refused) -> None:
        """Pass on an engine's rejection."""
        self._router.forget(self)
        outage = self._router.outage
        if outage and refused.kind in ("lost", "stopped") and not self._is_decoding:
            # The decode engine does not know the request: its end is recorded here.
            refused = Refused(refused.request_id, "stopped", outage)
        self._receiver.take_refusal(refused)


class Router:
    """Link of an API server to a prefill and a decode engine, with the methods of `Link`.

    Attributes:
        decode: link to the decode engine.
    """

    def __init__(self, folder: Path, prefill_folder: Path, name: str) -> None:
        """Set up on the directories of the decode and the prefill engine's sockets."""
        self.decode = Link(folder, name)
        self._folder, self._prefill_folder, self._name = folder, prefill_folder, name
        self._prefill = self._new_prefill_link()
        self._welcome: Welcome | None = None
        self._prefill_pid = 0
        self._legs: dict[str, _Leg] = {}
        """Leg by request id in the prefill engine, until its KV arrives."""

    @property
    def is_lost(self) -> bool:
        """Return whether the decode engine has exited."""
        return self.decode.is_lost

    @property
    def outage(self) -> str:
        """Reason why requests are rejected; empty while none is."""
        return self.decode.outage or (_PREFILL_EXITED if self._prefill.is_lost else "")

    async def connect(self) -> Welcome:
        """Connect to both engines and return the welcome of the decode engine.

        Raises:
            BadInput: the engines serve different models.
        """
        own = self._welcome = await self.decode.connect()
        other = await self._connect_prefill()
        most = min(own.max_model_tokens, other.max_model_tokens)
        return replace(own, max_model_tokens=most)

    async def receive(self) -> None:
        """Dispatch both engines' messages until cancelled."""
        await asyncio.gather(self.decode.receive(), self._receive_prefill())

    def name_request(self) -> str:
        """Return a request id that is unique in the decode engine."""
        return self.decode.name_request()

    def submit(self, request: Submit, receiver: Receiver) -> None:
        """Submit a request whose outputs go to the receiver."""
        leg = _Leg(self, request, receiver)
        if len(request.prompt) == 1:  # the decode engine computes the last token of a prompt
            leg.decode(None)
            return
        name = _prefill_name(request.request_id)
        self._legs[name] = leg
        prefill = replace(
            request, request_id=name, sampling=_PREFILL_ONLY, external_id=None, parent=""
        )
        self._prefill.submit(prefill, leg)

    def cancel(self, request_id: str, reason: Finish) -> None:
        """End a request early in both engines; its receiver gets no further calls."""
        name = _prefill_name(request_id)
        self._legs.pop(name, None)
        self._prefill.cancel(name, reason)
        self.decode.cancel(request_id, reason)

    async def stats(self) -> EngineStats:
        """Fetch the decode engine's counters.

        Raises:
            TimeoutError: the core did not respond.
        """
        return await self.decode.stats()

    def mark_lost(self) -> None:
        """Reject all requests from now on: the decode engine has exited."""
        self.decode.mark_lost()
        self._prefill.mark_lost()

    def close(self) -> None:
        """Send pending messages and close."""
        self._prefill.close()
        self.decode.close()

    def forget(self, leg: _Leg) -> None:
        """Drop a request that has ended in the prefill engine."""
        self._legs.pop(_prefill_name(leg.request.request_id), None)

    def _take_kv(self, name: str, kv: KvHandle) -> None:
        leg = self._legs.pop(name, None)
        if leg is None:  # cancelled meanwhile
            discard(kv)
            return
        leg.decode(kv)

    async def _receive_prefill(self) -> None:
        """Dispatch the messages of the prefill engine, and after its exit those of the next one."""
        while True:
            exited = asyncio.create_task(_exit_of(self._prefill_pid))
            receiving = asyncio.create_task(self._prefill.receive())
            try:
                await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                exited.cancel()
                receiving.cancel()
            if receiving.done():
                receiving.result()
            self._prefill.mark_lost()
            self._prefill.close()  # it removes its socket's file, which the next link creates
            self._prefill = self._new_prefill_link()
            self._prefill.is_lost = True  # until it is connected
            await self._connect_prefill()
            self._prefill.is_lost = False

    def _new_prefill_link(self) -> Link:
        name = f"{self._name}-prefill"
        return Link(self._prefill_folder, name, own_folder=self._folder, on_kv=self._take_kv)

    async def _connect_prefill(self) -> Welcome:
        """Connect to the prefill engine, which may still load its model.

        Raises:
            BadInput: it serves another model than the decode engine.
        """
        other = await self._prefill.connect()
        assert self._welcome is not None
        _check_same_model(self._welcome, other)
        self._prefill_pid = other.pid
        return other


EngineLink: TypeAlias = Link | Router


def _prefill_name(request_id: str) -> str:
    # Several decode servers may share a prefill engine.
    return f"prefill-{os.getpid()}-{request_id}"


def _check_same_model(own: Welcome, other: Welcome) -> None:
    for name, here, there in (
        ("model", own.info.model, other.info.model),
        ("shape and dtype", own.info.shape, other.info.shape),
        ("seed", own.seed, other.seed),
    ):
        if here != there:
            raise BadInput(
                f"the prefill engine has {name} {there}, and the decode engine {here}. Start both "
                "with the same."
            )


async def _exit_of(pid: int) -> None:
    """Wait until a process exits."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
