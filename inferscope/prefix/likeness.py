"""Comparison of a prompt with the prompts before it: where it diverges, and what is moved.

    earlier  aaaaaaaa bbb cccccccc
    prompt   aaaaaaaa XX cccccccc dddd      diverged_at 8, span (10, 18), shift -1

Anchors vote for the earlier prompts that hold them. Of the best candidates the one with the longest
common prefix is compared token by token. Behind the divergence every anchor that an earlier prompt
holds is extended to a span of equal tokens, and the ends of the two are compared. Only positions
and request indices leave this module.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from inferscope.prefix.anchors import TOKEN_BYTES, AnchorFinder, shingles
from inferscope.prefix.generations import Generations
from inferscope.records import LORA, MULTIMODAL, SALT

MOST_HELD_TOKENS = 4_000_000
"""Tokens of earlier prompts held for comparison: 16 MB."""
MOST_HELD_PROMPTS = 16_384
"""Earlier prompts held, each with 0.3 KB beside its tokens: 5 MB."""
MOST_ANCHORS = 131_072
"""Anchors of earlier prompts: 24 MB."""
MOST_COMPARED = 131_072
"""First tokens of a prompt that are compared and held; the rest is taken to be new."""
LEAST_SPAN = 48
"""Shortest span of equal tokens that counts as seen before: shorter ones are common phrases."""
_MOST_CANDIDATES = 4
_LEAST_SPAN_BYTES = LEAST_SPAN * TOKEN_BYTES
_POSITION_BITS = 20
_POSITION = (1 << _POSITION_BITS) - 1
_FIRST_CHUNK_BYTES = 256

Namespace: TypeAlias = tuple[int, int, int]
"""Hashes of a request's salt, LoRA adapter and multimodal inputs."""
NO_NAMESPACE: Namespace = (0, 0, 0)
_BITS = (SALT, LORA, MULTIMODAL)


class Likeness(msgspec.Struct, frozen=True, gc=False):
    """Fields of a `PromptLikeness` record."""

    earlier: int
    diverged_at: int
    equal_again_at: int | None
    shift: int
    spans: list[tuple[int, int]]
    differs: int


class _Prompt(msgspec.Struct, frozen=True, gc=False):
    index: int
    raw: bytes
    namespace: Namespace
    twin: int = 0
    """Serial number of the most similar prompt before it; 0 for none."""


class PromptHistory:
    """Prompts seen lately, in bounded memory."""

    def __init__(
        self,
        *,
        most_tokens: int = MOST_HELD_TOKENS,
        most_prompts: int = MOST_HELD_PROMPTS,
        most_anchors: int = MOST_ANCHORS,
        finder: AnchorFinder | None = None,
    ) -> None:
        """Create an empty history."""
        self._finder = finder or AnchorFinder()
        self._anchors: Generations[int, int] = Generations(most_anchors)
        """Serial number of the newest prompt with a shingle, and the position in it, in one int."""
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._most_bytes = most_tokens * TOKEN_BYTES
        self._most_prompts = most_prompts
        self._held_bytes = 0
        self._serial = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens held."""
        return self._held_bytes // TOKEN_BYTES

    @property
    def num_prompts(self) -> int:
        """Number of prompts held."""
        return len(self._prompts)

    @property
    def num_anchors(self) -> int:
        """Number of anchors held."""
        return len(self._anchors)

    @staticmethod
    def raw(tokens: Sequence[int]) -> bytes:
        """Return the first MOST_COMPARED tokens as little-endian unsigned 32-bit integers."""
        if len(tokens) > MOST_COMPARED:
            tokens = tokens[:MOST_COMPARED]
        cells = array("I", tokens)
        if sys.byteorder == "big":
            cells.byteswap()
        return cells.tobytes()

    def compare(
        self, index: int, raw: bytes, namespace: Namespace = NO_NAMESPACE
    ) -> Likeness | None:
        """Compare a prompt with the earlier ones, then add it to them.

        Args:
            index: the request.
            raw: the prompt, as `raw` returns it.
            namespace: what keeps its blocks apart from those of other requests.

        Returns:
            how it is like the most similar prompt; None if it begins like none and holds no span of
            one.
        """
        prompt = _Prompt(index, raw, namespace)
        positions = self._finder.positions(raw)
        hashes = shingles(raw, positions)
        found, twin = self._compare(prompt, positions, hashes)
        if hashes:  # else no later prompt could find it
            self._add(_Prompt(index, raw, namespace, twin), positions, hashes)
        return found

    def _compare(
        self, prompt: _Prompt, positions: list[int], hashes: list[int]
    ) -> tuple[Likeness | None, int]:
        """Return how a prompt is like the most similar one, and that one's serial number."""
        known = self._known(hashes)
        if not known:
            return None, 0
        votes = Counter([place >> _POSITION_BITS for place in known.values()])
        serial, num_common = self._most_similar(prompt, votes)
        if serial < 0:
            return None, 0
        diverged_at = num_common // TOKEN_BYTES
        earlier = self._prompts[serial]
        spans, again = self._spans(prompt.raw, positions, known, num_common, serial)
        if not diverged_at and not spans:
            return None, 0
        equal_again_at, shift = again or (None, 0)
        pairs = zip(_BITS, prompt.namespace, earlier.namespace, strict=True)
        differs = sum(bit for bit, mine, other in pairs if mine != other)
        found = Likeness(earlier.index, diverged_at, equal_again_at, shift, spans, differs)
        return found, serial

    def _known(self, hashes: list[int]) -> dict[int, int]:
        """Return the place of every anchor that a held prompt has, by its number here."""
        young, old = self._anchors.young, self._anchors.old
        # Serial numbers rise, and the oldest prompts are dropped first.
        oldest = next(iter(self._prompts), self._serial + 1) << _POSITION_BITS
        known = {}
        for number, shingle in enumerate(hashes):
            place = young.get(shingle) or old.get(shingle)
            if place is not None and place >= oldest:
                known[number] = place
        return known

    def _most_similar(self, prompt: _Prompt, votes: Counter[int]) -> tuple[int, int]:
        """Return the serial number of the most similar prompt and the bytes in common, or -1."""
        best: tuple[int, bool, int] = (0, False, 0)
        chosen = -1
        candidates = [serial for serial, _ in votes.most_common(_MOST_CANDIDATES)]
        # An anchor names the newest prompt that has it: a copy hides the prompt that it is of.
        serial = self._prompts[candidates[0]].twin
        while serial in self._prompts and len(candidates) < 2 * _MOST_CANDIDATES:
            candidates.append(serial)
            serial = self._prompts[serial].twin
        for serial in candidates:
            other = self._prompts[serial]
            num_common = num_equal(prompt.raw, 0, other.raw, 0)
            rank = (num_common, other.namespace == prompt.namespace, votes[serial])
            if rank > best:
                best, chosen = rank, serial
        return chosen, best[0]

    def _spans(
        self,
        raw: bytes,
        positions: list[int],
        known: dict[int, int],
        start: int,
        twin: int,
    ) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
        """Return the spans behind a byte that earlier prompts hold.

        Also return start and shift of the first span that `twin` holds, None if there is none.
        """
        spans: list[tuple[int, int]] = []
        again: tuple[int, int] | None = None
        end = start
        first = bisect_left(positions, start // TOKEN_BYTES)
        for number in range(first, len(positions)):
            place = known.get(number)
            if place is None:
                continue
            at = positions[number] * TOKEN_BYTES
            if at < end:
                continue
            serial = place >> _POSITION_BITS
            other, from_ = self._prompts[serial].raw, (place & _POSITION) * TOKEN_BYTES
            begin = at - num_equal_before(raw, at, end, other, from_)
            here, there = begin + _LEAST_SPAN_BYTES, from_ + begin + _LEAST_SPAN_BYTES - at
            if here > at and raw[at:here] != other[from_:there]:
                continue
            stop = at + num_equal(raw, at, other, from_)
            if stop - begin < _LEAST_SPAN_BYTES:  # the text ends before
                continue
            end = stop
            spans.append((begin // TOKEN_BYTES, end // TOKEN_BYTES))
            if again is None and serial == twin:
                again = begin // TOKEN_BYTES, (at - from_) // TOKEN_BYTES
        # A common end may be too short to hold an anchor, of which one token in 32 is one.
        other = self._prompts[twin].raw
        begin = len(raw) - num_equal_before(raw, len(raw), end, other, len(other))
        if len(raw) - begin >= _LEAST_SPAN_BYTES:
            spans.append((begin // TOKEN_BYTES, len(raw) // TOKEN_BYTES))
            if again is None:
                again = begin // TOKEN_BYTES, (len(raw) - len(other)) // TOKEN_BYTES
        return spans, again

    def _add(self, prompt: _Prompt, positions: list[int], hashes: list[int]) -> None:
        if not positions:  # too short to be found again
            return
        # In this order: an exception of a signal handler leaves no anchor without its prompt.
        self._serial += 1
        self._prompts[self._serial] = prompt
        self._held_bytes += len(prompt.raw)
        base = self._serial << _POSITION_BITS
        put = self._anchors.put
        for position, shingle in zip(positions, hashes, strict=True):
            put(shingle, base | position)
        while len(self._prompts) > 1 and (
            self._held_bytes > self._most_bytes or len(self._prompts) > self._most_prompts
        ):
            _, dropped = self._prompts.popitem(last=False)
            self._held_bytes -= len(dropped.raw)


def num_equal(left: bytes, at: int, right: bytes, from_: int) -> int:
    """Return the number of equal bytes from two positions on, in whole tokens.

    Chunks are compared in C: four times larger while they are equal, then smaller by half.
    """
    most = min(len(left) - at, len(right) - from_)
    done, chunk, is_growing = 0, _FIRST_CHUNK_BYTES, True
    while done < most:
        size = min(chunk, most - done)
        here, there = at + done, from_ + done
        if left[here : here + size] == right[there : there + size]:
            done += size
            chunk = chunk * 4 if is_growing else max(TOKEN_BYTES, chunk // 8 * 4)
        elif size <= TOKEN_BYTES:
            break
        else:
            is_growing, chunk = False, max(TOKEN_BYTES, size // 8 * 4)
    return done // TOKEN_BYTES * TOKEN_BYTES


def num_equal_before(left: bytes, at: int, floor: int, right: bytes, from_: int) -> int:
    """Return the number of equal bytes before two positions, in whole tokens, down to a floor."""
    most = min(at - floor, from_)
    done, chunk, is_growing = 0, _FIRST_CHUNK_BYTES, True
    while done < most:
        size = min(chunk, most - done)
        here, there = at - done, from_ - done
        if left[here - size : here] == right[there - size : there]:
            done += size
            chunk = chunk * 4 if is_growing else max(TOKEN_BYTES, chunk // 8 * 4)
        elif size <= TOKEN_BYTES:
            break
        else:
            is_growing, chunk = False, max(TOKEN_BYTES, size // 8 * 4)
    return done // TOKEN_BYTES * TOKEN_BYTES
