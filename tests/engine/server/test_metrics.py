"""Tests of the server's metrics page and of the options that it shows."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inferscope.engine.server.metrics import page
from inferscope.engine.stats import EngineStats
from inferscope.metrics_page.fetching import page_url
from inferscope.metrics_page.view import PageSource
from tests import debian
from tests.engine.server.running import Server, Stream, serving

MINUTE_NS = 60_000_000_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a prefix cache, with small blocks and short sequences."""
    with serving(
        tmp_path_factory.mktemp("plain"), "builtin", "--no-prefix-cache", "--block-tokens", "8",
        "--max-model-len", "60", "--max-running", "2",
    ) as running:  # fmt: skip
        yield running.wait()
        assert running.stop() == 0, running.said()


def numbers(server: Server) -> dict[str, float]:
    """Return the page's values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        content = answer.read().decode()
    samples = [
        sample for family in text_string_to_metric_families(content) for sample in family.samples
    ]
    return {
        ",".join([one.name.removeprefix("inferscope_serve_"), *one.labels.values()]): one.value
        for one in samples
    }


@pytest.mark.thorough
def test_page_counts_served_requests(server: Server) -> None:
    before = numbers(server)
    prompt = list(range(300, 340))
    for _ in range(2):
        body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
    after = numbers(server)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    for name in ("kv_blocks_cached", "steps_total"):
        assert grown.pop(name) > 0
    assert grown == {
        "requests_total,length": 2,
        "prompt_tokens_total": 80,
        "prompt_tokens_cached_total": 32,
        "generation_tokens_total": 10,
    }
    assert (after["requests_running"], after["kv_cache_usage_ratio"]) == (0, 0)


def test_page_shows_running_and_waiting_requests(server: Server) -> None:
    endless = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    streams = [Stream(server.port, "/v1/completions", endless) for _ in range(6)]
    try:
        for stream in streams[:4]:
            next(stream.events())
        shown = numbers(server)
        while shown["requests_waiting"] < 2:
            shown = numbers(server)
        assert (shown["requests_running"], shown["requests_waiting"]) == (4, 2)
        assert 0 < shown["kv_cache_usage_ratio"] < 1
        view = PageSource(page_url(f"http://127.0.0.1:{server.port}")).view(MINUTE_NS)
    finally:
        for stream in streams:
            stream.close()
    assert (view.server, view.models) == ("inferscope serve", ("tiny",))
    assert (view.num_running, view.num_waiting) == (4, 2)
    assert view.kv_share is not None
    assert view.cached_share is not None
    server.wait_until_idle()


@pytest.mark.thorough
def test_block_size_length_and_prefix_cache_are_those_of_the_options(plain: Server) -> None:
    assert "KV pool: 16 blocks of 8 tokens" in plain.said()
    assert "prompt and output may have 60 of the model's 4096 tokens" in plain.said()
    assert plain.ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 60
    for _ in range(2):
        body = {"prompt": [7] * 40, "max_tokens": 2, "ignore_eos": True}
        usage = plain.post("/v1/completions", body)[1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    shown = numbers(plain)
    assert shown["kv_blocks"] == 16
    assert shown["cache_config_info,8,16"] == 1
    assert shown["prompt_tokens_total"] == 80
    assert shown["prompt_tokens_cached_total"] == shown["kv_blocks_cached"] == 0


def test_promtool_reports_no_problem() -> None:
    text = page(EngineStats(blocks_total=4, blocks_used=1), model_name='a "b"\\c\nd')
    assert 'model_name="a \\"b\\"\\\\c\\nd"' in text
    done = subprocess.run(
        [debian.program("promtool"), "check", "metrics"],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
