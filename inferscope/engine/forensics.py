"""Observation of the prefix cache: which blocks were evicted, and what a prompt found of its own.

A block has a key of its content and of all before it, so an evicted one is recognised in a later
prompt.
The keys of a prompt are computed by the thread that submits it. For 32k tokens that takes longer
than the lookup and the records together, and the step loop need not wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from inferscope.engine.kv import Chain
from inferscope.engine.request import PromptKeys, Request
from inferscope.prefix import block_keys, first_key, packed
from inferscope.probe import CacheWatch, Probe

_TOKEN_BYTES = 4


class CacheForensics:
    """Observer of an engine's block pool and admissions."""

    def __init__(self, watch: CacheWatch, *, block_tokens: int, is_enabled: bool) -> None:
        """Observe a pool of blocks of this size; `is_enabled` is the option `prefix_cache`."""
        self._watch = watch
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._is_enabled = is_enabled
        self._key_by_block: dict[int, int] = {}
        """Key of what each block held when it was full last."""
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

    def keys_of(self, prompt: Sequence[int], *, root: Chain) -> PromptKeys | None:
        """Return the keys of a prompt's whole blocks; None if they are not needed.

        Args:
            prompt: its token IDs.
            root: chain of its first block.
        """
        if not self._is_enabled:
            return None
        since_ns = self._watch.now()
        # Of bytes, an array takes the memory, not the items.
        cells = array("I", prompt if isinstance(prompt, list) else list(prompt))
        keys = block_keys(cells, self._block_bytes, first_key(root))
        return PromptKeys(keys, packed(keys), self._watch.now() - since_ns)

    def make_room_for(self, index: int) -> None:
        """Note the request whose allocation begins."""
        self._watch.make_room_for(index)

    def published(self, request: Request, *, start: int) -> None:
        """Keep the keys of the blocks that a request has published, from its `start`-th one on."""
        keys, width = self._keys_of(request).keys, self._block_tokens
        end = request.num_published
        if end > len(keys):  # blocks that hold output
            cells = array("I", request.tokens[len(keys) * width : end * width])
            last = keys[-1] if keys else first_key(request.root)
            keys += block_keys(cells, self._block_bytes, last)
        if request.ever_computed >= request.num_prompt:
            self._prefills.pop(request, None)  # else it would hold an ended request's tokens
        # A block whose content another one holds stays private, and its key is never asked for.
        self._key_by_block.update(zip(request.blocks[start:end], keys[start:end], strict=True))

    def evicted(self, blocks: Sequence[int]) -> None:
        """Note that published blocks were evicted."""
        keys = map(self._key_by_block.get, blocks)
        self._watch.evicted_blocks([key for key in keys if key is not None])  # known since observed

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
        keys, raw_keys, spent_ns = self._keys_of(request)
        since_ns = self._watch.now()
        self._prefills = {
            other: other_keys
            for other, other_keys in list(self._prefills.items())  # an overdue flush is a thread's
            if other.sequence_slot >= 0 and other.ever_computed < other.num_prompt
        }
        self._watch.admitted(
            index,
            num_tokens=num_tokens,
            hit=hit,
            keys=keys,
            raw_keys=raw_keys,
            pending=[(other.index, other_keys) for other, other_keys in self._prefills.items()],
            since_ns=since_ns - spent_ns,
        )
        self._prefills[request] = keys

    def _keys_of(self, request: Request) -> PromptKeys:
        """Return the keys of a request; it has none if it was submitted before the observation."""
        if request.block_keys is None:
            prompt = request.tokens[: request.num_prompt]
            request.block_keys = self.keys_of(prompt, root=request.root)
        assert request.block_keys is not None, "a cache that is disabled publishes no block"
        return request.block_keys
