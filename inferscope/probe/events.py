"""Request events: what is told of a request, put into the log and into its table alike.

The table is what keyframes restate. It is kept while the probe is switched off too, else the
keyframe of switching on again would not know who is in flight.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from inferscope.probe.columns import attributes as bounded
from inferscope.probe.columns import name, text
from inferscope.probe.ids import hiding
from inferscope.probe.life import Life
from inferscope.probe.log import Log
from inferscope.probe.parts import Parts
from inferscope.probe.parts import bounded as bounded_parts
from inferscope.probe.prefixes import PrefixDigests
from inferscope.records import WAITING, RequestEvent, RequestIndex, Transfer

NO_REQUEST = RequestIndex(0xFFFFFFFF)
"""What `queued` and `received` return when nothing is being recorded; every call accepts it."""


class RequestEvents:
    """Notes what happens to requests. Called by engines, at any time: nothing here raises."""

    def __init__(self, log: Log, life: Life) -> None:
        self._log = log
        self._life = life
        self._now = log.clock.monotonic_ns
        self._prefixes = PrefixDigests()
        self._hide = hiding(os.environ)

    def enter(
        self,
        kind: int,
        request_id: str,
        at_ns: int | None,
        *,
        external_id: str | None = None,
        prompt_tokens: int | None = None,
        parent: str = "",
        trace: str = "",
        attributes: dict[str, str] | None = None,
        prompt_parts: Parts = (),
        prompt: Sequence[int] = (),
        adapter: str = "",
    ) -> RequestIndex:
        """Write the first event of a request's life in this ring, and give it its index."""
        if not self._life.on:
            return NO_REQUEST
        try:
            t_ns, log = self._now(), self._log
            request_id = self._name(request_id)
            if external_id is not None and self._hide is not None:
                external_id = self._hide(external_id)
            arrived_ns = t_ns if at_ns is None else int(at_ns)
            with log.lock:
                index = RequestIndex(log.requests.next_index())
                log.requests.enter(index, request_id, arrived_ns, prompt_tokens or 0)
                log.write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        arrived_ns,
                        request_id,
                        None if external_id is None else text(external_id),
                        prompt_tokens,
                        None,
                        "",
                        self._name(parent) if parent else "",
                        text(trace),
                        bounded(attributes),
                        bounded_parts(prompt_parts) if prompt_parts else (),
                        adapter=name(adapter) if adapter else "",
                        prefix_digests=self._prefixes.of(prompt) if prompt else (),
                    )
                )
            log.cost_ns += self._now() - t_ns
        except Exception as error:
            self._life.fail(error)
            return NO_REQUEST
        return index

    def _name(self, request_id: str) -> str:
        """Return what a request is called in the records."""
        return name(request_id if self._hide is None else self._hide(request_id))

    def transferred(
        self,
        index: RequestIndex,
        num_bytes: int,
        *,
        start_ns: int,
        end_ns: int,
        peer: str,
        peer_request_id: str,
    ) -> None:
        """Write that KV blocks came from another worker."""
        if index == NO_REQUEST or not self._life.on:
            return
        try:
            t_ns, log = self._now(), self._log
            sender = self._name(peer_request_id) if peer_request_id else ""
            times = int(start_ns), int(end_ns)
            record = Transfer(t_ns, index, int(num_bytes), *times, name(peer), sender)
            with log.lock:
                log.write(record)
            log.cost_ns += self._now() - t_ns
        except Exception as error:
            self._life.fail(error)

    def note(
        self,
        index: RequestIndex,
        kind: int,
        at_ns: int | None,
        *,
        state: int = WAITING,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        reason: str = "",
        prompt_parts: Parts = (),
        leaves: bool = False,
        reasoning_tokens: int | None = None,
    ) -> None:
        """Write a later event of a request's life; `state` is what it is in from now on."""
        if index == NO_REQUEST:
            return
        try:
            t_ns, log = self._now(), self._log
            with log.lock:
                # The table is kept while switched off too: the keyframe of switching on needs it.
                if leaves:
                    log.requests.leave(index)
                else:
                    log.requests.change(index, state, prompt_tokens, cached_tokens)
                if not self._life.on:
                    return
                log.write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        t_ns if at_ns is None else int(at_ns),
                        "",
                        None,
                        prompt_tokens,
                        cached_tokens,
                        text(reason),
                        prompt_parts=bounded_parts(prompt_parts) if prompt_parts else (),
                        reasoning_tokens=reasoning_tokens,
                    )
                )
            log.cost_ns += self._now() - t_ns
        except Exception as error:
            self._life.fail(error)
