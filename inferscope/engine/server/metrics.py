"""Metrics page `/metrics`: the engine's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from inferscope import __version__
from inferscope.engine.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "inferscope_serve_"
"""Prefix of metric names; `collect` uses `inferscope_engine_` for observed engines."""
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def page(stats: EngineStats, *, model_name: str) -> str:
    """Return the metrics page as text."""
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    info = _labels({"model_name": model_name, "version": __version__})
    cache = {"block_size": str(stats.block_tokens), "num_gpu_blocks": str(stats.blocks_total)}
    families: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        ("info", "gauge", "The model and the version of the server; always 1.", {info: 1}),
        ("requests_running", "gauge", "Requests that hold KV blocks.", {"": stats.running}),
        ("requests_waiting", "gauge", "Requests in the queue.", {"": stats.waiting}),
        ("kv_cache_usage_ratio", "gauge", "Share of the KV blocks that requests hold.",
         {"": usage}),
        ("kv_blocks", "gauge", "KV blocks of the pool.", {"": stats.blocks_total}),
        ("cache_config_info", "gauge", "Size of the KV pool, for gateways; always 1.",
         {_labels(cache): 1}),
        ("kv_blocks_cached", "gauge", "KV blocks that only the prefix cache holds.",
         {"": stats.blocks_cached}),
        ("requests_total", "counter", "Requests that ended, by reason.",
         {_labels({"reason": reason}): num for reason, num in stats.finished.items()}),
        ("prompt_tokens_total", "counter", "Prompt tokens of admitted requests.",
         {"": stats.prompt_tokens}),
        ("prompt_tokens_cached_total", "counter", "Prompt tokens found in the prefix cache.",
         {"": stats.cached_tokens}),
        ("generation_tokens_total", "counter", "Tokens generated.", {"": stats.generated_tokens}),
        ("preemptions_total", "counter", "Requests that lost their KV blocks to others.",
         {"": stats.preemptions}),
        ("steps_total", "counter", "Steps run.", {"": stats.steps}),
        ("steps_failed_total", "counter", "Steps that failed, with all their requests.",
         {"": stats.failed_steps}),
    )  # fmt: skip
    lines: list[str] = []
    for name, kind, text, numbers in families:
        lines += (f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}")
        lines += [f"{_PREFIX}{name}{labels} {number}" for labels, number in numbers.items()]
    return "\n".join([*lines, ""])


def _labels(values: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in values.items())
    return "{" + shown + "}"
