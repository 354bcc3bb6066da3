"""Request events, which enter both the log and its table of requests.

Keyframes restate the table. It is kept up to date while the probe is off too; otherwise the
keyframe at the next start would lack the requests in flight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from inferscope.host_signals import pass_on
from inferscope.probe.columns import (
    LARGEST_INT64,
    LEAST_INT64,
    count_or_none,
    name,
    request_index,
    text_or_empty,
    time_or,
    whole,
)
from inferscope.probe.columns import attributes as bounded
from inferscope.probe.ids import hiding
from inferscope.probe.lifecycle import Life
from inferscope.probe.log import Log
from inferscope.probe.part_labels import Parts
from inferscope.probe.part_labels import bounded as bounded_parts
from inferscope.records import EVENTS, RequestEvent, RequestIndex, Transfer

Made = TypeVar("Made")

NO_REQUEST = RequestIndex(0xFFFFFFFF)
"""What `queued` and `received` return when nothing is being recorded; every call accepts it."""


class RequestEvents:
    """Notes what happens to requests. Called by engines, at any time: nothing here raises."""

    def __init__(self, log: Log, life: Life) -> None:
        self._log = log
        self._life = life
        self._now = log.clock.monotonic_ns
        # Not for a probe that records nothing: it needs `hashlib`.
        self._hide = None if log.ring is None else hiding(os.environ)

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
        adapter: str = "",
    ) -> RequestIndex:
        """Write the first event of a request's life in this ring, and give it its index."""
        life, log = self._life, self._log
        if not life.on:
            return NO_REQUEST
        try:
            t_ns, odd = self._now(), log.odd
            try:
                if external_id is not None and self._hide is not None:
                    external_id = self._hide(external_id)
                given = (
                    time_or(at_ns, t_ns, odd),
                    self._name(request_id),
                    None if external_id is None else text_or_empty(external_id, odd),
                    count_or_none(prompt_tokens, odd),
                    None,
                    "",
                    "" if _is_empty(parent) else self._name(parent),
                    text_or_empty(trace, odd),
                    self._kept(bounded, attributes),
                    self._parts(prompt_parts),
                    None,
                    "" if _is_empty(adapter) else name(adapter),
                )
            except Exception as error:
                life.refuse(EVENTS[kind], error)
                return NO_REQUEST
            index = log.requests.next_index()
            if index >= NO_REQUEST:  # 4,294,967,295 requests in one ring: there are no more
                log.num_lost_calls += 1
                return NO_REQUEST
            event = RequestEvent(t_ns, index, kind, *given)
            life.perform(t_ns, self._enter, self._enter, event)
        except Exception as error:
            life.caught(error)
            return NO_REQUEST
        return RequestIndex(index)

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
        life, log = self._life, self._log
        if not life.on:
            return
        try:
            t_ns, odd = self._now(), log.odd
            try:
                index = RequestIndex(request_index(index))
                if index == NO_REQUEST:
                    return
                record = Transfer(
                    t_ns,
                    index,
                    whole(num_bytes, 0, LARGEST_INT64, odd),
                    whole(time_or(start_ns, t_ns, odd), LEAST_INT64, LARGEST_INT64, odd),
                    whole(time_or(end_ns, t_ns, odd), LEAST_INT64, LARGEST_INT64, odd),
                    name(peer),
                    "" if _is_empty(peer_request_id) else self._name(peer_request_id),
                )
            except Exception as error:
                life.refuse("transferred", error)
                return
            life.perform(t_ns, log.write, log.write, record)
        except Exception as error:
            life.caught(error)

    def note(
        self,
        index: RequestIndex,
        kind: int,
        at_ns: int | None,
        *,
        state: int | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        reason: str = "",
        prompt_parts: Parts = (),
        leaves: bool = False,
        reasoning_tokens: int | None = None,
    ) -> None:
        """Write a later event of a request's life; `state` is what it is in from now on.

        None leaves it as it is; with `leaves` it is gone.
        """
        life, log = self._life, self._log
        if log.ring is None:
            return
        try:
            t_ns, odd = self._now(), log.odd
            try:
                index = RequestIndex(request_index(index))
                if index == NO_REQUEST:
                    return
                event = RequestEvent(
                    t_ns,
                    index,
                    kind,
                    time_or(at_ns, t_ns, odd),
                    "",
                    None,
                    count_or_none(prompt_tokens, odd),
                    count_or_none(cached_tokens, odd),
                    text_or_empty(reason, odd),
                    prompt_parts=self._parts(prompt_parts),
                    reasoning_tokens=count_or_none(reasoning_tokens, odd),
                )
            except Exception as error:
                life.refuse(EVENTS[kind], error)
                return
            change = (event, state, leaves)
            life.perform(t_ns, self._note, self._note, change)
        except Exception as error:
            life.caught(error)

    def _enter(self, event: RequestEvent) -> None:
        log = self._log
        log.requests.enter(event.index, event.request_id, event.at_ns, event.prompt_tokens or 0)
        log.write(event)

    def _note(self, change: tuple[RequestEvent, int | None, bool]) -> None:
        event, state, leaves = change
        log, index = self._log, RequestIndex(event.index)
        if leaves or state is not None:
            log.repeats.forget()  # the rows of a step may not be those of the last one
        # The table is kept while switched off too: the keyframe of switching on needs it.
        if leaves:
            log.requests.leave(index)
        else:
            log.requests.change(index, state, event.prompt_tokens, event.cached_tokens)
        if self._life.on:
            log.write(event)

    def _name(self, request_id: str) -> str:
        """Return what a request is called in the records."""
        return name(request_id if self._hide is None else self._hide(request_id))

    def _parts(self, parts: Parts) -> Parts:
        if parts is None or (type(parts) is tuple and not parts):
            return ()
        return self._kept(bounded_parts, parts) or ()

    def _kept(self, make: Callable[[Any], Made], value: Any) -> Made | None:
        """Return what is made of a value that a record can do without; None where that fails."""
        try:
            return make(value)
        except Exception as error:
            pass_on(error)
            self._log.odd.num += 1
            return None


def _is_empty(value: object) -> bool:
    """Return whether a text is absent, without asking an object for its truth: it may raise."""
    return value is None or (type(value) is str and not value)
