"""vLLM's own KV cache manager as a cache of `cache_curve`: lookups, allocations, evictions.

There is no model and no scheduler. A prompt is looked up, gets its blocks, and is freed when its
request ends; each of its whole blocks can be found by the next one.
"""

from __future__ import annotations

from collections import deque

import torch
from cache_curve import Found
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

_MOST_TOKENS = 16_384


class VllmCache:
    """Cache of vLLM's with a number of blocks."""

    def __init__(self, num_blocks: int, *, block_tokens: int) -> None:
        """Create an empty cache; vLLM keeps one block more, which holds nothing."""
        init_none_hash(sha256)
        self._block_tokens = block_tokens
        self._hash = get_request_block_hasher(block_tokens, sha256)
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=_MOST_TOKENS,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
        )
        self._num_blocks = num_blocks
        self._held: deque[Request] = deque()
        self._num = 0

    @property
    def num_used(self) -> int:
        """Number of blocks that requests hold."""
        return self._num_blocks - self._manager.block_pool.get_num_free_blocks()

    @property
    def num_held(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._held)

    def take(self, prompt: list[int]) -> Found | None:
        """Serve a prompt; return what it found, None if there is no room."""
        self._num += 1
        request = Request(
            request_id=str(self._num),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hash,
        )
        manager = self._manager
        found, hit, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, len(prompt) - hit, hit, found) is None:
            return None
        self._held.append(request)
        return Found(hit, b"".join(request.block_hashes))

    def release(self) -> None:
        """End the oldest request."""
        self._manager.free(self._held.popleft())
