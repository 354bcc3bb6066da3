"""Records of the prefix cache: conversion of their arguments, and their writing.

They hold counts, positions and keyed digests only: no argument is a text of a client's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from inferscope.host_signals import pass_on
from inferscope.probe.columns import (
    LARGEST_U32,
    OddValues,
    column,
    count_or_none,
    request_index,
    text_or_empty,
    time_or,
    whole,
    whole_or,
)
from inferscope.probe.events import NO_REQUEST
from inferscope.probe.host_log import warn
from inferscope.probe.lifecycle import Life
from inferscope.probe.log import Log
from inferscope.records import (
    LOOKUP_CLASSES,
    LORA,
    MULTIMODAL,
    SALT,
    CacheLookup,
    CacheSample,
    PromptLikeness,
    Record,
    RequestIndex,
    encode,
)

if TYPE_CHECKING:
    from inferscope.prefix import Mode, Namespace, PromptHistory

MOST_SPANS = 8
MOST_EVICTORS = 8
MOST_LIKENESS_BYTES = 96
"""Maximum size of a `PromptLikeness`; positions above 65,535 leave room for fewer spans."""
MOST_DIGESTS = 54
"""Maximum number of digests in a `CacheSample`: the three records' frames then take 700 bytes."""


_COUNTS = frozenset(LOOKUP_CLASSES)
_MOST_PAIRS = 64
_Make: TypeAlias = "Callable[[int, int, OddValues], Record]"
"""Make a record from the time, the request's index, and the counter of odd values."""


class CacheRecords:
    """Writer of the prefix cache's records. Called by engines, at any time: nothing here raises."""

    def __init__(self, log: Log, life: Life) -> None:
        self._log = log
        self._life = life
        self._now = log.clock.monotonic_ns
        self._history: PromptHistory | None = None
        """Prompts of this process; None where they are not compared."""
        if log.ring is not None and asked_mode() == "tokens":
            from inferscope.prefix import PromptHistory

            self._history = PromptHistory()

    def lookup(
        self,
        index: RequestIndex,
        tokens: Mapping[str, int],
        *,
        evictor: RequestIndex | None,
        evicted_ns: int | None,
        twin: RequestIndex | None,
        num_evictors: int,
        evictors: Sequence[RequestIndex],
        is_inferred: bool,
        off_reason: str,
        since_ns: int | None,
    ) -> None:
        """Write the outcome of a lookup."""

        def make(t_ns: int, index: int, odd: OddValues) -> CacheLookup:
            counts = {name: whole(tokens.get(name, 0), 0, LARGEST_U32, odd) for name in _COUNTS}
            return CacheLookup(
                t_ns,
                index,
                **counts,
                evictor=_other(evictor),
                evicted_ns=None if evicted_ns is None else time_or(evicted_ns, t_ns, odd),
                twin=_other(twin),
                num_evictors=whole_or(num_evictors, 0, 0, LARGEST_U32, odd),
                is_inferred=is_inferred is True,
                off_reason=text_or_empty(off_reason, odd),
                evictors=tuple(map(_other, evictors[:MOST_EVICTORS])),
            )

        self._write("cache_lookup", index, since_ns, make)

    def likeness(
        self,
        index: RequestIndex,
        earlier: RequestIndex,
        *,
        diverged_at: int,
        equal_again_at: int | None,
        shift: int,
        spans: Sequence[tuple[int, int]],
        differs: int,
        since_ns: int | None,
    ) -> None:
        """Write where a prompt differs from an earlier one."""

        def make(t_ns: int, index: int, odd: OddValues) -> PromptLikeness:
            pairs = [
                (whole(start, 0, LARGEST_U32, odd), whole(end, 0, LARGEST_U32, odd))
                for start, end in spans[:_MOST_PAIRS]
            ]
            record = PromptLikeness(
                t_ns,
                index,
                request_index(earlier),
                whole(diverged_at, 0, LARGEST_U32, odd),
                count_or_none(equal_again_at, odd),
                whole(shift, -LARGEST_U32, LARGEST_U32, odd),
                (),
                whole(differs, 0, SALT | LORA | MULTIMODAL, odd),
            )
            return _with_longest(record, pairs)

        self._write("prompt_likeness", index, since_ns, make)

    def compare(
        self,
        index: RequestIndex,
        prompt: Sequence[int],
        *,
        salt: object,
        adapter: object,
        multimodal: object,
    ) -> None:
        """Compare a prompt with earlier ones, and write how it is like them."""
        life = self._life
        if not life.on or self._history is None or not life.writes_plans:
            return
        try:
            t_ns = self._now()
            try:
                number = request_index(index)
                if number == NO_REQUEST:
                    return
                raw = self._history.raw(prompt)
                namespace = (_hash(salt), _hash(adapter), _hash(multimodal))
            except Exception as error:
                life.refuse("compare_prompt", error)
                return
            life.perform(t_ns, self._compare, self._compare, (number, raw, namespace))
        except Exception as error:
            life.caught(error)

    def _compare(self, prompt: tuple[int, bytes, Namespace]) -> None:
        try:
            found = None if self._history is None else self._history.compare(*prompt)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # it ends the comparison of prompts, and nothing else
            pass_on(error)
            self._history = None
            what = f"comparison of prompts: {type(error).__name__}"
            self._life.note_unsupported((self._now(), what, False))
            return
        if found is None:
            return
        record = PromptLikeness(
            self._now(),
            prompt[0],
            found.earlier,
            found.diverged_at,
            found.equal_again_at,
            found.shift,
            (),
            found.differs,
        )
        self._log.write(_with_longest(record, found.spans))

    def sample(
        self,
        index: RequestIndex,
        *,
        block_tokens: int,
        num_blocks: int,
        rate: float,
        digests: Sequence[int] | bytes,
        since_ns: int | None,
    ) -> None:
        """Write the digests of a sample of a prompt's blocks."""

        def make(t_ns: int, index: int, odd: OddValues) -> CacheSample:
            share = float(rate)
            if not 0 < share <= 1:
                raise ValueError(f"{share} is no share of the blocks")
            cells = column("Q", digests, odd)
            if len(cells) > 8 * MOST_DIGESTS:
                raise ValueError(f"{len(cells) // 8} digests are more than {MOST_DIGESTS}")
            return CacheSample(
                t_ns,
                index,
                whole(block_tokens, 1, LARGEST_U32, odd),
                whole(num_blocks, 0, LARGEST_U32, odd),
                share,
                cells,
            )

        self._write("cache_sample", index, since_ns, make)

    def _write(self, call: str, index: RequestIndex, since_ns: int | None, make: _Make) -> None:
        life, log = self._life, self._log
        if not life.on:
            return
        try:
            t_ns = self._now()
            try:
                number = request_index(index)
                if number == NO_REQUEST:
                    return
                record = make(t_ns, number, log.odd)
                begun_ns = min(t_ns, time_or(since_ns, t_ns, log.odd))
            except Exception as error:
                life.refuse(call, error)
                return
            life.perform(begun_ns, log.write, log.write, record)
        except Exception as error:
            life.caught(error)


def _other(index: RequestIndex | None) -> int:
    """Return another request's index, -1 if there is none."""
    number = -1 if index is None else request_index(index)
    return -1 if number == NO_REQUEST else number


def _hash(value: object) -> int:
    """Return a hash of a salt, an adapter or the like; 0 if there is none."""
    return 0 if value is None else hash(value)


def asked_mode() -> Mode:
    """Return the mode that INFERSCOPE_PREFIX_CACHE asks for."""
    # Not at import: with `hashlib` it takes 6 ms, which a disabled probe need not spend.
    from inferscope.prefix import VARIABLE, cache_mode

    mode = cache_mode(os.environ)
    if mode is None:  # nothing recorded is the safe reading of a mistake
        value = os.environ.get(VARIABLE)
        warn("%s is %r. Give tokens, blocks or off; it is taken for off.", VARIABLE, value)
        return "off"
    return mode


def _with_longest(record: PromptLikeness, spans: list[tuple[int, int]]) -> PromptLikeness:
    """Return the record with its longest spans, as many as fit, in order."""
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:MOST_SPANS]
    while longest:
        full = replace(record, spans=tuple(sorted(longest)))
        if len(encode(full)) <= MOST_LIKENESS_BYTES:
            return full
        longest.pop()
    return record
