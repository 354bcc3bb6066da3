"""Metric names of each server: one table per server, our names on the left.

If a server has renamed a metric, all names are listed, the newest first. A value that is not in a
table is not available, and the screen shows `-`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferscope.errors import NotFound
from inferscope.foreign import printable
from inferscope.metrics_page.fetching import MetricsPage


@dataclass(frozen=True)
class Name:
    """A metric, or those of its series that have these labels.

    Attributes:
        but: labels whose series are left out.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    but: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Dialect:
    """Metric names of one server.

    Attributes:
        server: name of the server software.
        prefix: prefix of all its metrics.
        gauges: running, waiting, kv_share and cached_share (both 0..1).
        counters: finished (rejections left out), prompt_tokens, cached_tokens, generated_tokens,
            preemptions.
        includes_cached: whether prompt tokens include cached ones.
        histograms: ttft, tbt, e2e, queue; in seconds.
        model_label: label with the model's name.
    """

    server: str
    prefix: str
    gauges: dict[str, tuple[Name, ...]]
    counters: dict[str, tuple[Name, ...]]
    histograms: dict[str, tuple[Name, ...]] = field(default_factory=dict)
    includes_cached: bool = True
    model_label: str = "model_name"


def _names(prefix: str, **words: str | tuple[str, ...]) -> dict[str, tuple[Name, ...]]:
    return {
        ours: tuple(
            Name(prefix + name) for name in ((theirs,) if isinstance(theirs, str) else theirs)
        )
        for ours, theirs in words.items()
    }


_VLLM = Dialect(
    "vLLM",
    "vllm:",
    _names(
        "vllm:",
        running="num_requests_running",
        waiting="num_requests_waiting",
        kv_share=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    _names(
        "vllm:",
        finished="request_success_total",
        prompt_tokens="prompt_tokens_total",
        cached_tokens=("prompt_tokens_cached_total", "prefix_cache_hits_total"),
        generated_tokens="generation_tokens_total",
        preemptions="num_preemptions_total",
    ),
    _names(
        "vllm:",
        ttft="time_to_first_token_seconds",
        tbt=("inter_token_latency_seconds", "time_per_output_token_seconds"),
        e2e="e2e_request_latency_seconds",
        queue="request_queue_time_seconds",
    ),
)
_SGLANG = Dialect(
    "SGLang",
    "sglang:",
    _names(
        "sglang:",
        running="num_running_reqs",
        waiting="num_queue_reqs",
        kv_share="token_usage",
    ),
    _names(
        "sglang:",
        finished="num_requests_total",
        prompt_tokens="prompt_tokens_total",
        cached_tokens="cached_tokens_total",
        generated_tokens="generation_tokens_total",
        preemptions="num_retracted_requests_total",
    ),
    _names(
        "sglang:",
        ttft="time_to_first_token_seconds",
        tbt="inter_token_latency_seconds",
        e2e="e2e_request_latency_seconds",
        queue="queue_time_seconds",
    ),
)
_TGI = Dialect(
    "TGI",
    "tgi_",
    _names("tgi_", running="batch_current_size", waiting="queue_size"),
    _names(
        "tgi_",
        # It writes the bare name; Prometheus' library appends the suffix it expects.
        finished=("request_success_total", "request_success"),
        prompt_tokens="request_input_length_sum",
        generated_tokens="request_generated_tokens_sum",
    ),
    _names(
        "tgi_",
        tbt="request_mean_time_per_token_duration",
        e2e="request_duration",
        queue="request_queue_duration",
    ),
)
_LLAMA_SERVER = Dialect(
    "llama-server",
    "llamacpp:",
    _names(
        "llamacpp:",
        running="requests_processing",
        waiting="requests_deferred",
        kv_share="kv_cache_usage_ratio",
    ),
    _names(
        "llamacpp:",
        prompt_tokens="prompt_tokens_total",
        generated_tokens="tokens_predicted_total",
    ),
    includes_cached=False,
)
_SERVE = Dialect(
    "inferscope serve",
    "inferscope_serve_",
    _names(
        "inferscope_serve_",
        running="requests_running",
        waiting="requests_waiting",
        kv_share="kv_cache_usage_ratio",
    ),
    {
        "finished": (
            Name(
                "inferscope_serve_requests_total",
                but=(("reason", "rejected"), ("reason", "shed")),
            ),
        ),
        **_names(
            "inferscope_serve_",
            prompt_tokens="prompt_tokens_total",
            cached_tokens="prompt_tokens_cached_total",
            generated_tokens="generation_tokens_total",
            preemptions="preemptions_total",
        ),
    },
)
_COLLECT = Dialect(
    "inferscope collect",
    "inferscope_",
    _names(
        "inferscope_",
        running="requests_running",
        waiting="requests_waiting",
        kv_share="kv_cache_usage_ratio",
    ),
    {
        "finished": (
            Name(
                "inferscope_requests_total",
                but=(("finish_reason", "rejected"), ("finish_reason", "shed")),
            ),
        ),
        "prompt_tokens": (
            Name("inferscope_tokens_total", (("phase", "prefill"), ("source", "computed"))),
        ),
        "cached_tokens": (
            Name("inferscope_tokens_total", (("phase", "prefill"), ("source", "cached"))),
        ),
        "generated_tokens": (Name("inferscope_tokens_total", (("phase", "decode"),)),),
    },
    _names(
        "inferscope_",
        ttft="time_to_first_token_seconds",
        tbt="time_between_tokens_seconds",
        e2e="request_duration_seconds",
        queue="request_queue_seconds",
    ),
    includes_cached=False,
)

DIALECTS = (_VLLM, _SGLANG, _TGI, _LLAMA_SERVER, _SERVE, _COLLECT)
"""Dialects; the first matching prefix counts: `serve`'s begins with `collect`'s."""


def dialect_of(page: MetricsPage) -> Dialect:
    """Return the dialect of a page.

    Raises:
        NotFound: no known server has these metrics.
    """
    for dialect in DIALECTS:
        if any(sample.name.startswith(dialect.prefix) for sample in page.samples):
            return dialect
    known = ", ".join(dialect.server for dialect in DIALECTS)
    raise NotFound(
        f"{page.url} does not match a known server ({known}); "
        f"its metrics are {_some_names(sample.name for sample in page.samples)}."
    )


def _some_names(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(map(printable, distinct[:3])) + more
