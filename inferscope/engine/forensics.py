"""Observation of the prefix cache: which blocks were evicted, and what a prompt found of its own.

The pool names a block by the chain after it, a serial number that a block published anew does not
get again. Here each has a key of its content, so an evicted block is recognised in a later prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from inferscope.engine.kv import ROOT, Chain
from inferscope.engine.request import Request
from inferscope.prefix import block_keys, first_key, next_key, packed
from inferscope.probe import CacheWatch, Probe

_TOKEN_BYTES = 4


class CacheForensics:
    """Observer of an engine's block pool and admissions."""

    def __init__(self, watch: CacheWatch, *, block_tokens: int, is_enabled: bool) -> None:
        """Observe a pool of blocks of this size; `is_enabled` is the option `prefix_cache`."""
        self._watch = watch
        self._block_tokens = block_tokens
        self._is_enabled = is_enabled
        self._key_by_chain = {ROOT: first_key(ROOT)}
        """Key of each published block, by the chain after it."""
        self._prefills: dict[Request, list[int]] = {}
        """Block keys of requests whose prompts are not computed yet, in order of admission."""

    @classmethod
    def of(
        cls, probe: Probe, *, block_tokens: int, num_blocks: int, is_enabled: bool
    ) -> CacheForensics | None:
        """Return the observer of an engine; None if nothing is recorded of its cache."""
        watch = CacheWatch.open(probe, block_tokens=block_tokens, num_blocks=num_blocks)
        return (
            None if watch is None else cls(watch, block_tokens=block_tokens, is_enabled=is_enabled)
        )

    def make_room_for(self, index: int) -> None:
        """Note the request whose allocation begins."""
        self._watch.make_room_for(index)

    def published(self, chain: int, *, parent: Chain, tokens: tuple[int, ...]) -> None:
        """Keep the key of a published block."""
        key = first_key(parent) if isinstance(parent, str) else self._key_by_chain.get(parent)
        if key is not None:  # else published before the observation
            self._key_by_chain[chain] = next_key(key, _raw(tokens))

    def evicted(self, chain: int) -> None:
        """Note that a published block was evicted."""
        key = self._key_by_chain.pop(chain, None)
        if key is not None:
            self._watch.evicted(key)

    def admitted(self, request: Request) -> None:
        """Record what a request found at its first admission."""
        index, num_tokens, hit = request.index, request.num_prompt, request.cached_tokens
        if request.received is not None:
            reason = "its KV came from another engine"
            self._watch.not_asked(index, num_tokens=num_tokens, hit=hit, reason=reason)
            return
        if not self._is_enabled:
            reason = "the prefix cache is disabled"
            self._watch.not_asked(index, num_tokens=num_tokens, reason=reason)
            return
        since_ns = self._watch.now()
        raw = _raw(request.tokens[:num_tokens])
        keys = block_keys(raw, self._block_tokens * _TOKEN_BYTES, first_key(request.root))
        self._prefills = {
            other: other_keys
            for other, other_keys in self._prefills.items()
            if other.sequence_slot >= 0 and other.ever_computed < other.num_prompt
        }
        self._watch.admitted(
            index,
            num_tokens=num_tokens,
            hit=hit,
            keys=keys,
            raw_keys=packed(keys),
            pending=[(other.index, other_keys) for other, other_keys in self._prefills.items()],
            since_ns=since_ns,
        )
        self._prefills[request] = keys


def _raw(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()
