"""What happened to the blocks of a prefix cache, and so to each token of a prompt.

    prompt   | hit | pending, evicted, cleared … | unmatched | rule | rounding |
             0     └ walk through the block keys ┘           └ the engine always computes

Keys stand for a block and all blocks before it: the engine's own hashes, or those of
`keys.py`. They stay in the process.

A block leaves a cache after those behind it in a prompt. So the blocks of a prompt that were lost
follow one another, the last losses first, and where a class ends is found by bisection: a lookup of
thousands of blocks takes a dozen questions. There is an exception: blocks behind a private copy of
a cached one, in the reference engine, may outlive it. They cannot be reached once it has left, and
whether they count as evicted depends on where the bisection asks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import nlargest
from itertools import islice
from time import monotonic_ns
from typing import NamedTuple

import msgspec

from inferscope.prefix.generations import Generations
from inferscope.prefix.tree import PrefixTree, Runs, time_at

MOST_GHOSTS = 131_072
"""Evicted blocks remembered: 22 MB with keys of 32 bytes."""
MOST_SEEN = 65_536
"""Keys of earlier prompts remembered where evictions cannot be seen: 3 MB, or 19 MB if each prompt
has one block."""
_MOST_BATCHES = 16_384
_MOST_EVICTORS = 4096
"""Requests remembered of evictions of unknown blocks: a search of all of them takes 0.6 ms."""
MOST_EVICTORS = 8
"""Requests listed as possible evictors."""


class Loss(NamedTuple):
    """Blocks that left the cache at the same time and for the same reason."""

    at_ns: int
    evictor: int
    """Index of the request that they made room for; -1 if unknown."""
    others: tuple[int, ...] = ()
    """Indices of further requests that they made room for as well."""


class Round(NamedTuple):
    """Evictions of unknown blocks for the same requests, with no others in between."""

    at_ns: int
    """Time of the last one."""
    evictors: tuple[int, ...]
    """Indices of the requests that share the room; -1 for an unknown one."""
    num_tokens: int


class Outcome(msgspec.Struct):
    """Tokens of a prompt by class, and the circumstances: the fields of a `CacheLookup`."""

    hit: int = 0
    off: int = 0
    cleared: int = 0
    evicted: int = 0
    pending: int = 0
    unmatched: int = 0
    rule: int = 0
    rounding: int = 0
    evictor: int = -1
    evicted_ns: int | None = None
    twin: int = -1
    num_evictors: int = 0
    evictors: tuple[int, ...] = ()
    is_inferred: bool = False
    off_reason: str = ""


class BlockHistory:
    """Evictions and resets of one cache, in bounded memory.

    Attributes:
        block_tokens: tokens that a key stands for.
        page_tokens: tokens that the engine caches at a time; fewer than `block_tokens` where the
            keys are ours and the engine caches single tokens.
        last_reset_ns: time of the last reset.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        page_tokens: int | None = None,
        is_inferring: bool = False,
        most_ghosts: int = MOST_GHOSTS,
        most_seen: int = MOST_SEEN,
        now: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Create an empty history; with `is_inferring` it derives evictions that it cannot see."""
        self._now = now
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens or block_tokens
        self.last_reset_ns = -1
        self._ghosts: Generations[Hashable, int] = Generations(most_ghosts)
        """Batch of every block that left the cache; negative for those that a reset removed."""
        self._losses: Generations[int, Loss] = Generations(_MOST_BATCHES)
        self._batch = 0
        """Current batch; 0 before its first eviction."""
        self._num_batches = 0
        self._evictor = -1
        self._others: tuple[int, ...] = ()
        self._resets: tuple[int, ...] = ()
        """Batches of the last resets; what was lost before an earlier one is forgotten."""
        self._seen = PrefixTree(most_seen) if is_inferring else None
        """Prefixes that were in the cache, and when."""
        self._rounds: deque[Round] = deque()
        self._num_round_evictors = 0
        self._rounds_since_ns = -1
        """Time of the last eviction of unknown blocks that is forgotten."""

    @property
    def num_ghosts(self) -> int:
        """Number of evicted blocks remembered."""
        return len(self._ghosts)

    @property
    def num_seen(self) -> int:
        """Number of blocks of earlier prompts remembered."""
        return 0 if self._seen is None else len(self._seen)

    @property
    def num_rounds(self) -> int:
        """Number of evictions of unknown blocks remembered."""
        return len(self._rounds)

    def make_room_for(self, index: int, *others: int) -> None:
        """Note the request for which blocks are evicted from here on; -1 for none.

        Where room is made for several requests at once, the others follow: which of them has an
        evicted block is not known, so lookups list them and are marked as inferred.
        """
        self._evictor = index
        self._others = others
        self._batch = 0

    def evicted_blocks(self, keys: Sequence[Hashable]) -> None:
        """Note that blocks were evicted."""
        if keys:
            self._ghosts.put_all(keys, self._current_batch())

    def evicted_tokens(self, num_tokens: int, evictors: tuple[int, ...] | None = None) -> None:
        """Note that blocks were evicted which cannot be identified.

        Args:
            num_tokens: number of their tokens.
            evictors: the requests that share their room; None for that of `make_room_for`.
        """
        evictors = (self._evictor,) if evictors is None else evictors
        rounds, now_ns = self._rounds, self._now()
        if rounds and rounds[-1].evictors == evictors:
            rounds[-1] = Round(now_ns, evictors, rounds[-1].num_tokens + num_tokens)
            return
        rounds.append(Round(now_ns, evictors, num_tokens))
        self._num_round_evictors += len(evictors)
        while self._num_round_evictors > _MOST_EVICTORS and len(rounds) > 1:
            forgotten = rounds.popleft()
            self._num_round_evictors -= len(forgotten.evictors)
            self._rounds_since_ns = forgotten.at_ns

    def cleared(self, keys: Iterable[Hashable] = ()) -> None:
        """Note that the cache was reset, and these blocks were in it."""
        self.last_reset_ns = self._now()
        batch = self._begin(Loss(self.last_reset_ns, -1), sign=-1)
        # Replaced, not changed: another thread may be reading.
        self._resets = (*self._resets[-1:], -batch)
        self._batch = 0
        ghosts = self._ghosts
        ghosts.turn()
        ghosts.young = dict.fromkeys(islice(keys, ghosts.half - 1), batch)

    def account(
        self,
        num_tokens: int,
        hit: int,
        keys: Sequence[Hashable],
        *,
        pending: Iterable[tuple[int, Sequence[Hashable]]] = (),
        num_reusable: int | None = None,
        num_dropped: int = 0,
    ) -> Outcome:
        """Divide a prompt's tokens by what the cache did with them.

        Args:
            num_tokens: tokens of the prompt.
            hit: tokens taken from the cache.
            keys: key of each whole block, in order.
            pending: requests whose prompts are being computed, with the keys of the blocks that are
                not in the cache yet and of all before them.
            num_reusable: most tokens that the engine takes from its cache; the pages before the
                last token if None.
            num_dropped: tokens behind a hit that were found too, and are computed again.
        """
        page = self.page_tokens
        hit = min(hit, num_tokens)
        if num_reusable is None:
            num_reusable = max(0, num_tokens - 1) // page * page
        top = min(num_tokens, max(num_reusable, hit))
        whole = max(top, num_tokens // page * page)
        outcome = Outcome(hit=hit, rule=whole - top, rounding=num_tokens - whole)
        start = min(top, hit + num_dropped) if hit else 0
        seen = self._seen.runs(keys) if self._seen is not None and start < top else []
        end = self._walk(outcome, start, top, keys, list(pending), seen)
        outcome.unmatched = top - end + start - hit
        if seen and outcome.unmatched:
            self._infer(outcome, end, top, seen)
        return outcome

    def not_asked(self, num_tokens: int, hit: int, reason: str) -> Outcome:
        """Return the outcome for a prompt that was not looked up."""
        hit = min(hit, num_tokens)
        return Outcome(hit=hit, off=num_tokens - hit, off_reason=reason)

    def _walk(
        self,
        outcome: Outcome,
        at: int,
        top: int,
        keys: Sequence[Hashable],
        pending: list[tuple[int, Sequence[Hashable]]],
        seen: Runs,
    ) -> int:
        """Count tokens whose blocks were lost or are being computed; return where they end."""
        width = self.block_tokens
        # The last block ends behind `top` if the engine reuses single tokens and computes one.
        stop = min(-(-top // width), len(keys)) if at < top else 0
        number = at // width
        while number < stop:
            batch = self._batch_of(number, keys, seen)
            if batch:
                number = self._end_of_loss(number, stop, batch, keys, seen)
                end = min(number * width, top)
                self._lose(outcome, batch, end - at)
            else:
                twin, number = _computing(pending, number, stop, keys)
                if twin is None:
                    break
                end = min(number * width, top)
                outcome.pending += end - at
                if outcome.twin < 0:
                    outcome.twin = twin
            at = end
        return at

    def _batch_of(self, number: int, keys: Sequence[Hashable], seen: Runs) -> int:
        """Return the batch in which a block was lost, 0 if it was not."""
        key, ghosts = keys[number], self._ghosts
        batch = ghosts.young.get(key) or ghosts.old.get(key) or 0
        if batch and seen and (time_at(seen, number) or -1) > self._lost_ns(batch):
            return 0  # it was put into the cache again
        return batch

    def _end_of_loss(
        self, number: int, stop: int, batch: int, keys: Sequence[Hashable], seen: Runs
    ) -> int:
        """Return where the blocks end that were lost in this way: by a reset, or since the last."""
        oldest = -batch if batch < 0 else 1 + max((r for r in self._resets if r < batch), default=0)
        return bisect_left(
            range(stop),
            True,
            number + 1,
            key=lambda at: abs(self._batch_of(at, keys, seen)) < oldest,
        )

    def _lost_ns(self, batch: int) -> int:
        """Return when the blocks of a batch were lost; if that is forgotten, the end of time."""
        loss = self._losses.get(batch)
        return sys.maxsize if loss is None else loss.at_ns

    def _lose(self, outcome: Outcome, batch: int, num_tokens: int) -> None:
        """Count tokens of a lost block, with the circumstances of the first one."""
        loss = self._losses.get(batch)
        if batch < 0:
            outcome.cleared += num_tokens
            if outcome.evicted_ns is None and loss is not None:
                outcome.evicted_ns = loss.at_ns
            return
        if loss is not None and not outcome.evicted:  # the eviction rather than a reset
            outcome.evictor, outcome.evicted_ns = loss.evictor, loss.at_ns
            if loss.others:
                outcome.is_inferred = True
                outcome.num_evictors = 1 + len(loss.others)
                outcome.evictors = (loss.evictor, *loss.others)[:MOST_EVICTORS]
        outcome.evicted += num_tokens

    def _infer(self, outcome: Outcome, at: int, top: int, seen: Runs) -> None:
        """Take blocks that an earlier prompt had, and that are not in the cache, for lost ones."""
        since_ns = time_at(seen, at // self.block_tokens)
        if since_ns is None:
            return
        end = min(seen[-1][0] * self.block_tokens, top)
        if since_ns <= self.last_reset_ns:
            outcome.unmatched -= end - at
            outcome.is_inferred = True
            outcome.cleared += end - at
            if outcome.evicted_ns is None:
                outcome.evicted_ns = self.last_reset_ns
            return
        tokens_by_evictor: dict[int, int] = {}
        if since_ns > self._rounds_since_ns:  # else any request may have been the evictor
            rounds = tuple(self._rounds)  # another thread may add one
            num_before = bisect_left(rounds, since_ns, key=lambda each: each.at_ns)
            for _, evictors, num in rounds[num_before:]:
                share = -(-num // len(evictors))
                for evictor in evictors:
                    tokens_by_evictor[evictor] = tokens_by_evictor.get(evictor, 0) + share
            if not tokens_by_evictor:  # nothing has left the cache: not an eviction
                return
            outcome.evicted_ns = rounds[-1].at_ns
        outcome.unmatched -= end - at
        outcome.is_inferred = True
        if not outcome.evicted:
            outcome.num_evictors = len(tokens_by_evictor)
            listed = nlargest(MOST_EVICTORS, tokens_by_evictor, key=tokens_by_evictor.__getitem__)
            outcome.evictors = tuple(listed)
            outcome.evictor = listed[0] if listed else -1
        outcome.evicted += end - at

    def remember(self, keys: Sequence[Hashable], num: int | None = None) -> None:
        """Note that blocks of a prompt are in the cache, where evictions have to be derived.

        Args:
            keys: key of each block of the prompt.
            num: number of its first blocks; None for all.
        """
        if self._seen is not None:
            self._seen.store(keys, len(keys) if num is None else num, self._now())

    def _current_batch(self) -> int:
        """Return the batch of the evictions since `make_room_for`."""
        if not self._batch:
            self._batch = self._begin(Loss(self._now(), self._evictor, self._others))
        return self._batch

    def _begin(self, loss: Loss, *, sign: int = 1) -> int:
        self._num_batches += 1
        batch = sign * self._num_batches
        self._losses.put(batch, loss)
        return batch


def _computing(
    pending: list[tuple[int, Sequence[Hashable]]], number: int, stop: int, keys: Sequence[Hashable]
) -> tuple[int | None, int]:
    """Return the request that is computing a block, and where the blocks end that it has too."""
    for index, others in pending:
        if number < len(others) and others[number] == keys[number]:
            most = range(min(stop, len(others)))
            end = bisect_left(most, True, number + 1, key=lambda at: others[at] != keys[at])
            return index, end
    return None, number
