"""The page of a loop of one's own, as an endpoint picker and `attach` read it."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from inferscope.gateway import gateway_metrics
from inferscope.metrics_page.fetching import page_url
from inferscope.metrics_page.view import PageSource
from tests.metrics_page.page_server import serving


def samples(page: str) -> dict[str, tuple[dict[str, str], float]]:
    families = list(text_string_to_metric_families(page))
    assert {family.type for family in families} == {"gauge"}
    return {
        sample.name: (dict(sample.labels), sample.value)
        for family in families
        for sample in family.samples
    }


def test_all_that_the_protocol_names_is_on_the_page() -> None:
    page = gateway_metrics(
        waiting=3, running=8, kv_share=0.25, block_tokens=16, num_blocks=4096,
        max_adapters=2, running_adapters=["sql", 'a "b"\\'], waiting_adapters=["legal"],
    )  # fmt: skip
    found = samples(page)
    stamped_s = found.pop("vllm:lora_requests_info")
    assert stamped_s[0] == {
        "max_lora": "2",
        "running_lora_adapters": 'sql,a "b"\\',
        "waiting_lora_adapters": "legal",
    }
    assert abs(stamped_s[1] - time.time()) < 60
    assert found == {
        "vllm:num_requests_waiting": ({}, 3),
        "vllm:num_requests_running": ({}, 8),
        "vllm:kv_cache_usage_perc": ({}, 0.25),
        "vllm:cache_config_info": ({"block_size": "16", "num_gpu_blocks": "4096"}, 1),
    }


def test_what_a_loop_does_not_have_is_not_on_its_page_and_attach_reads_the_rest() -> None:
    page = gateway_metrics(waiting=3, running=8, kv_share=0.25)
    assert set(samples(page)) == {
        "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
    }  # fmt: skip
    with serving(page) as server:
        view = PageSource(page_url(server.url)).view(60_000_000_000)
    assert (view.num_waiting, view.num_running, view.kv_share) == (3, 8, 0.25)
