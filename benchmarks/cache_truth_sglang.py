"""SGLang's radix cache and requests under the adapter's hooks, without a model (`cache_truth`).

A prompt goes the way of an extend batch: it is matched, its prefix is locked, slots are allocated,
for which the tree evicts, and the finished request is put into the tree. Rows are written here:
SGLang's `alloc_for_extend` does it with a backend's kernels.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cache_truth import Probes, Served, Tokens
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import events
from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from inferscope.adapters.sglang.cache import CacheHooks
from inferscope.adapters.sglang.state import MARK, Followed
from inferscope.probe import EngineInfo, Probe


class SglangRig(Probes):
    """A radix cache of SGLang's, hooked as in a server."""

    block_tokens = 32
    """Tokens that one key of the adapter stands for."""
    page_tokens = 1
    vocab = 1 << 30

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        core: str,
        most_tokens: int = 2048,
        step_tokens: int = 2048,
    ) -> None:
        import sglang

        super().__init__(folder)
        self.version = f"{sglang.__version__}, {core} core"
        self.is_exact = core == "python"
        self._step_tokens = step_tokens
        self._rows = ReqToTokenPool(
            size=16, max_context_len=most_tokens, device="cpu", enable_memory_saver=False
        )
        num_tokens = num_blocks * self.block_tokens
        self._slots = TokenToKVPoolAllocator(
            num_tokens, torch.float16, "cpu", SimpleNamespace(), need_sort=False
        )
        hooks = CacheHooks(lambda hook, *args, **kwargs: hook(*args, **kwargs))
        self._prepare = _hook(hooks)
        self._tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self._slots,
                page_size=self.page_tokens,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.core = Probe.open(EngineInfo(0, "sglang"))
        recorder = hooks.open(
            SimpleNamespace(
                tree_cache=self._tree,
                page_size=self.page_tokens,
                max_total_num_tokens=num_tokens,
            ),
            self.core,
        )
        assert recorder is not None
        self.recorder = recorder
        self._left: deque[Any] = deque()

    def serve(self, prompts: Sequence[Tokens], **namespace: Any) -> list[Served]:
        """Serve prompts together, to their first token."""
        start_ns = time.monotonic_ns()
        requests, served = [], []
        for prompt in prompts:
            self.compare(prompt, namespace)
            request = self._request(prompt, namespace)
            index = self.core.queued("r", prompt_tokens=len(prompt))
            followed = Followed(index, self._left)
            setattr(request, MARK, followed)
            request.init_next_round_input(self._tree)
            request.extend_end = len(prompt)
            request.lock = self._tree.lock(request.last_node)
            self.recorder.arrived(request, followed, request.prefix_len)
            requests.append(request)
            served.append(index)
        self._prepare(self._allocate, SimpleNamespace(reqs=requests))
        for request in requests:
            self._finish(request)
        end_ns = time.monotonic_ns()
        return [Served(index, start_ns, end_ns) for index in served]

    def _request(self, prompt: Tokens, namespace: dict[str, Any]) -> Req:
        request = Req(
            "r",
            "",
            array("q", prompt),
            SamplingParams(max_new_tokens=1, ignore_eos=True),
            return_logprob="prompt_logprobs" in namespace,
            cache_salt=namespace.get("salt"),
        )
        if request.return_logprob:
            request.logprob_start_len = 0
        return request

    def _allocate(self, batch: SimpleNamespace) -> None:
        """Allocate the slots of a batch, and write each request's row."""
        tree, requests = self._tree, batch.reqs
        rows = alloc_req_slots(self._rows, requests, tree)
        slots = alloc_token_slots(tree, sum(request.extend_len for request in requests))
        for request, row in zip(requests, rows, strict=True):
            start, end = request.prefix_len, request.extend_end
            if start:
                self._rows.req_to_token[row, :start] = tree.prefix_device_indices(request)
            self._rows.req_to_token[row, start:end] = slots[: end - start]
            slots = slots[end - start :]
            request.kv.kv_allocated_len = request.kv.kv_committed_len = end

    def _finish(self, request: Req) -> None:
        """Take the first token and put the request into the tree, as `release_kv_cache` does."""
        tree, num_tokens = self._tree, request.kv.kv_committed_len
        for up_to in range(self._step_tokens, num_tokens, self._step_tokens):
            if up_to > request.prefix_len:  # a chunk of the prompt was computed
                tree.checkpoint(request, up_to=up_to)
        request.output_ids.append(7)
        request.finished_reason = FINISH_LENGTH(length=1)
        request.finished_len = 1
        request.refresh_fill_ids()
        tree.checkpoint(request, up_to=num_tokens)
        tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, num_tokens)])
        tree.unlock(request.lock)
        tree.on_release(request, checkpointed=True)
        self._rows.free(request)
        request.kv.mark_kv_released()

    def held(self, prompt: Tokens) -> int:
        """Return how many tokens of a prompt the cache would give now."""
        # A match in order to use it would make the prompt the most recently used one.
        key = RadixKey(array("q", prompt[:-1]))
        return int(self._tree.tree_core.match_full_device_prefix(key)[0])

    def reset(self) -> None:
        """Reset the prefix cache, as /flush_cache does."""
        self._tree.reset()
        self._rows.clear()
        self._slots.clear()


def _hook(hooks: CacheHooks) -> Callable[..., Any]:
    """Place the hooks of the tree, and return that of the batch."""
    owners = {"tree": UnifiedRadixCache, "events": events.KVCacheEventRecorder}
    placed = hooks.by_target("tree", "batch") | hooks.of_nodes("events")
    for target, hook in placed.items():
        owner, name = target.split(".")
        if owner in owners:
            setattr(owners[owner], name, _around(getattr(owners[owner], name), hook))
    return placed["batch.prepare_for_extend"]


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    def around(*args: Any, **kw: Any) -> Any:
        return hook(original, *args, **kw)

    return around
