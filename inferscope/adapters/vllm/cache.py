"""Recorder of vLLM's prefix cache: evictions, resets, and what each prompt found.

    schedule ── BlockPool._maybe_evict_cached_block ─► evicted     a hash and the block it was in
    flush    ── planned: the block's new owner is the evictor; arrived: the prompt's outcome

On a step's path an evicted block costs one append. Which request it made room for is read from the
scheduler's output after the dispatch: the output names each request's new blocks. Blocks are cached
when they are scheduled, so a prompt waits for another's prefill only if that is cut into chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Any

from inferscope.adapters.patching import Around, Direct, Patches
from inferscope.host_signals import pass_on
from inferscope.probe import CacheWatch, Probe

FEATURE = "cache forensics"
_NEEDED = ("enable_caching", "block_pool", "num_kv_cache_groups")
_MOST_EVICTED = 200_000
"""Evictions kept between two flushes: more than a step can make."""
_HASH = slice(-4)
"""All of the pool's key but the group of layers, which it appends to a block's hash. With more than
one group nothing is looked up."""


class CacheRecorder:
    """Recorder of one scheduler's prefix cache.

    Attributes:
        evicted: hashes that were evicted since the last flush, each with the block's number.
    """

    def __init__(
        self,
        watch: CacheWatch,
        *,
        block_tokens: int,
        off: str,
        num_dropped: int = 0,
    ) -> None:
        """Record by a watch.

        Args:
            watch: writes the records.
            block_tokens: tokens of a block.
            off: reason why no prompt is looked up; empty if prompts are.
            num_dropped: last tokens of each hit that are computed again for the drafts' model.
        """
        self.evicted: deque[tuple[Any, int]] = deque(maxlen=_MOST_EVICTED)
        self._watch = watch
        self._block_tokens = block_tokens
        self._off = off
        self._num_dropped = num_dropped
        self._prefills: dict[str, tuple[int, list[bytes]]] = {}
        """Index and block keys of requests whose prompts are not computed yet, by id."""

    def cleared(self, keys: Any) -> None:
        """Note a reset of the cache that held these blocks."""
        self._watch.cleared(key[_HASH] for key in keys)

    def fail(self, error: Exception) -> None:
        """End the forensics: a hook has failed."""
        self._watch.fail(error)

    def planned(self, output: Any, index_of: Callable[[str], int | None]) -> None:
        """Note the evictions of a planned step, each with the request that has the block now."""
        evicted = self.evicted
        if not evicted:
            return
        watch = self._watch
        try:
            owner_of = _owners(output).get
            # Not an iteration: on an overdue flush the engine's thread may add more meanwhile.
            noted = [evicted.popleft() for _ in range(len(evicted))]
            for owner, blocks in groupby(noted, key=lambda each: owner_of(each[1])):
                index = None if owner is None else index_of(owner)
                watch.make_room_for(-1 if index is None else index)
                watch.evicted_blocks([key[_HASH] for key, _ in blocks])
            watch.make_room_for(-1)
        except Exception as error:
            self.evicted.clear()
            watch.fail(error)

    def arrived(self, request: Any, index: Any, hit: int, requests: Any) -> None:
        """Record what an admitted request found.

        Args:
            request: vLLM's request.
            index: its index in the records.
            hit: its tokens that were computed before.
            requests: all requests of the scheduler, by id.
        """
        try:
            self._arrived(request, index, hit, requests)
        except Exception as error:
            self._watch.fail(error)

    def _arrived(self, request: Any, index: Any, hit: int, requests: Any) -> None:
        since_ns = self._watch.now()
        num_tokens = int(request.num_prompt_tokens)
        off = self._off
        if not off and getattr(request, "skip_reading_prefix_cache", False):
            off = "the request skips the cache, as for prompt log probabilities"
        if off:
            self._watch.not_asked(index, num_tokens=num_tokens, hit=hit, reason=off)
            return
        width = self._block_tokens
        keys = request.block_hashes[: num_tokens // width]
        for request_id in [name for name in self._prefills if _is_computed(requests.get(name))]:
            del self._prefills[request_id]
        self._watch.admitted(
            index,
            num_tokens=num_tokens,
            hit=hit,
            keys=keys,
            raw_keys=b"".join(keys),
            pending=self._prefills.values(),
            num_reusable=max(0, (num_tokens - 1) // width * width - self._num_dropped),
            num_dropped=self._num_dropped,
            since_ns=since_ns,
        )
        if not _is_computed(request):
            self._prefills[request.request_id] = (index, keys)


class CacheHooks:
    """Hooks of the block pool of the scheduler that is observed."""

    def __init__(self) -> None:
        self._recorder: CacheRecorder | None = None
        self._pool_id = 0

    def forget(self) -> None:
        """Record nothing any more."""
        self._recorder = None

    def install(self, patches: Patches, scheduler: Any, probe: Probe) -> CacheRecorder | None:
        """Hook the pool of a scheduler; return its recorder, None if nothing can be recorded."""
        self._recorder = None
        try:
            return self._installed(patches, scheduler, probe)
        except Exception as error:
            pass_on(error)
            patches.unsupported(f"{FEATURE}: {type(error).__name__}: {error}")
            return None

    def _installed(self, patches: Patches, scheduler: Any, probe: Probe) -> CacheRecorder | None:
        manager = scheduler.kv_cache_manager
        missing = [name for name in _NEEDED if not hasattr(manager, name)]
        if missing:
            patches.unsupported(f"{FEATURE}: its KV cache manager has no {', '.join(missing)}")
            return None
        pool = manager.block_pool
        if not patches.unit(
            FEATURE,
            type(pool),
            {
                "_maybe_evict_cached_block": Direct(self._evict),
                "reset_prefix_cache": Around(self.resetting, self.reset),
            },
        ):
            return None
        block_tokens = int(pool.hash_block_size)
        watch = CacheWatch.open(
            probe, block_tokens=block_tokens, num_blocks=int(pool.num_gpu_blocks) - 1
        )
        if watch is None:
            return None
        self._pool_id = id(pool)
        self._recorder = CacheRecorder(
            watch,
            block_tokens=block_tokens,
            off=_reason_off(scheduler),
            num_dropped=block_tokens if _drops_blocks(scheduler) else 0,
        )
        return self._recorder

    def _evict(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        def _maybe_evict_cached_block(pool: Any, block: Any, *args: Any, **kw: Any) -> Any:
            recorder = self._recorder
            if recorder is None or self._pool_id != id(pool):
                return original(pool, block, *args, **kw)
            try:
                noted = block.block_hash, block.block_id
            except Exception as error:
                self._recorder = None
                recorder.fail(error)
                return original(pool, block, *args, **kw)
            is_evicted = call(pool, block, *args, **kw)
            if is_evicted:
                recorder.evicted.append(noted)
            return is_evicted

        return _maybe_evict_cached_block

    def resetting(self, pool: Any) -> Any:
        """Return the blocks that a reset is about to remove."""
        if self._recorder is None or self._pool_id != id(pool):
            return None
        blocks = pool.cached_block_hash_to_block
        return getattr(blocks, "_cache", blocks)

    def reset(self, blocks: Any, is_reset: Any, pool: Any) -> None:
        """Note a reset, unless it failed: the pool then keeps its blocks."""
        if blocks is not None and is_reset and self._recorder is not None:
            self._recorder.cleared(blocks)


def _reason_off(scheduler: Any) -> str:
    """Return why the scheduler's prompts are not looked up in a way that is recorded."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return "the prefix cache is disabled"
    if manager.num_kv_cache_groups != 1:
        return f"the model has {manager.num_kv_cache_groups} groups of KV caches"
    if getattr(scheduler, "connector", None) is not None:
        return "a KV connector holds blocks too"
    groups = scheduler.kv_cache_config.kv_cache_groups
    if groups[0].kv_cache_spec.block_size != manager.block_pool.hash_block_size:
        return "blocks are hashed in smaller parts"
    return ""


def _drops_blocks(scheduler: Any) -> bool:
    """Return whether the last block of a hit is computed again: EAGLE needs its hidden states."""
    drops = getattr(scheduler, "use_eagle_block_drop", None)
    return bool(getattr(scheduler, "use_eagle", False) if drops is None else drops)


def _owners(output: Any) -> dict[int, str]:
    """Return the request that each new block of a step belongs to."""
    owner_by_block = {}
    for new in output.scheduled_new_reqs:
        for group in new.block_ids:
            owner_by_block.update(dict.fromkeys(group, new.req_id))
    cached = output.scheduled_cached_reqs
    for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
        for group in groups or ():
            owner_by_block.update(dict.fromkeys(group, request_id))
    return owner_by_block


def _is_computed(request: Any) -> bool:
    """Return whether a request's prompt is computed, or no longer being computed."""
    return (
        request is None
        or not request.num_computed_tokens
        or request.num_computed_tokens >= request.num_prompt_tokens
    )
