"""vLLM's scheduler and KV cache manager under the adapter's hooks, without a model (`cache_truth`).

The scheduler is made from a checkpoint's configuration. Each planned step is answered with one made
up token for every request whose prompt is complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cache_truth import Probes, Served, Tokens
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.core import CoreHooks

PREFILL_TOKENS = 64
"""Tokens of a prefill in a step: it is cut, so a duplicate waits for it."""


class VllmRig(Probes):
    """A scheduler of vLLM's, hooked as in a server."""

    block_tokens = page_tokens = 16

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        model: str,
        most_tokens: int = 2048,
        step_tokens: int = 256,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        import vllm

        super().__init__(folder)
        self.version = vllm.__version__
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(self.block_tokens, sha256)
        patches = Patches("vLLM")
        self._hooks = CoreHooks(patches, lambda: True)
        self._hooks.install(Scheduler)
        config = VllmConfig(
            model_config=ModelConfig(
                model=model, dtype="float16", seed=0, max_model_len=most_tokens
            ),
            cache_config=CacheConfig(
                block_size=self.block_tokens,
                gpu_memory_utilization=0.9,
                enable_prefix_caching=True,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=step_tokens,
                max_num_seqs=8,
                max_model_len=most_tokens,
                enable_chunked_prefill=True,
                long_prefill_token_threshold=prefill_tokens,
                is_encoder_decoder=False,
            ),
        )
        config.cache_config.num_gpu_blocks = num_blocks + 1
        spec = FullAttentionSpec(
            block_size=self.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block_tokens,
            hash_block_size=self.block_tokens,
            log_stats=False,
        )
        assert not patches.is_off, "a hook failed"
        assert self._hooks.kept is not None
        self.core = self._hooks.kept.core.probe
        self.recorder = self._hooks.kept.core.cache
        self.pool = self._scheduler.kv_cache_manager.block_pool
        self._num = 0

    def serve(self, prompts: Sequence[Tokens], **namespace: Any) -> list[Served]:
        """Serve prompts together, to their first token."""
        first, start_ns = self._num, time.monotonic_ns()
        self._num += len(prompts)
        adapter = namespace.get("adapter")
        for at, prompt in enumerate(prompts):
            self.compare(prompt, namespace)
            params = SamplingParams(
                max_tokens=1,
                ignore_eos=True,
                prompt_logprobs=namespace.get("prompt_logprobs"),
            )
            params.update_from_generation_config({}, 499)
            lora = None
            if adapter is not None:
                from vllm.lora.request import LoRARequest

                lora = LoRARequest(lora_name=adapter, lora_int_id=1, lora_path="/none")
            self._scheduler.add_request(
                Request(
                    request_id=str(first + at),
                    prompt_token_ids=prompt,
                    sampling_params=params,
                    pooling_params=None,
                    lora_request=lora,
                    cache_salt=namespace.get("salt"),
                    block_hasher=self._hash,
                )
            )
        while self._scheduler.has_unfinished_requests():
            self._step()
        end_ns = time.monotonic_ns()
        return [Served(first + at, start_ns, end_ns) for at in range(len(prompts))]

    def _step(self) -> None:
        scheduler = self._scheduler
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            is_complete = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if is_complete else [])
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: at for at, name in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )

    def held(self, prompt: Tokens) -> int:
        """Return how many tokens of a prompt the cache would give now."""
        asked = Request(
            request_id="asked",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hash,
        )
        num = 0
        for one in asked.block_hashes[: (len(prompt) - 1) // self.block_tokens]:
            if not self.pool.get_cached_block(one, [0]):
                break
            num += 1
        return num * self.block_tokens

    def reset(self) -> None:
        """Reset the prefix cache, as before new weights."""
        assert self._scheduler.reset_prefix_cache()
