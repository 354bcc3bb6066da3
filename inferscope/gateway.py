"""Metrics that an inference gateway routes by, as text for a `/metrics` page of your own.

    gateway_metrics(waiting=3, running=8, kv_share=0.4, block_tokens=16, num_blocks=4096)

The endpoint picker of the Gateway API Inference Extension reads them. Names, types and labels are
the defaults of its model server protocol, so that the picker needs no configuration:
https://github.com/kubernetes-sigs/gateway-api-inference-extension (proposal 003)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the page."""
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def gateway_metrics(
    *,
    waiting: int,
    running: int,
    kv_share: float,
    block_tokens: int | None = None,
    num_blocks: int | None = None,
    max_adapters: int | None = None,
    running_adapters: Iterable[str] = (),
    waiting_adapters: Iterable[str] = (),
) -> str:
    """Return the metrics as Prometheus text.

    Args:
        waiting: requests in the queue.
        running: requests being served.
        kv_share: share of the KV cache in use, 0 to 1.
        block_tokens: tokens of a KV block; None leaves the cache's size out.
        num_blocks: KV blocks of the pool; None leaves it out.
        max_adapters: LoRA adapters that a batch can hold; None for a server without adapters.
        running_adapters: adapters that are loaded and ready.
        waiting_adapters: adapters that requests in the queue need.
    """
    lines = [
        *_family("num_requests_waiting", "Requests in the queue.", waiting),
        *_family("num_requests_running", "Requests being served.", running),
        *_family("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", kv_share),
    ]
    sizes = {"block_size": block_tokens, "num_gpu_blocks": num_blocks}
    known = {label: str(size) for label, size in sizes.items() if size is not None}
    if known:
        lines += _family("cache_config_info", "Size of the KV cache; always 1.", 1, known)
    if max_adapters is not None:
        adapters = {
            "max_lora": str(max_adapters),
            "running_lora_adapters": ",".join(running_adapters),
            "waiting_lora_adapters": ",".join(waiting_adapters),
        }
        text = "LoRA adapters; the value is the time of the page."
        lines += _family("lora_requests_info", text, round(time.time(), 3), adapters)
    return "\n".join([*lines, ""])


def _family(
    name: str, text: str, value: float, labels: Mapping[str, str] | None = None
) -> tuple[str, str, str]:
    shown = ",".join(f'{label}="{of.translate(_ESCAPED)}"' for label, of in (labels or {}).items())
    series = f"vllm:{name}{{{shown}}}" if shown else f"vllm:{name}"
    return f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} gauge", f"{series} {value}"
