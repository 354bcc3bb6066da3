"""Pages of real servers, and pages that obey the format, read as those who wrote them meant."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferscope.errors import BadInput, NotFound
from inferscope.metrics_page.dialects import DIALECTS, dialect_of
from inferscope.metrics_page.fetching import fetch, page_url
from inferscope.metrics_page.reading import PageHistogram, between, quantiles, read
from inferscope.metrics_page.view import PageSource, PageView
from inferscope.text.page.lines import LABEL, page_text
from tests.metrics_page.page_server import serving

PAGES = Path(__file__).parent / "pages"
MINUTE_NS = 60_000_000_000


def first_look(name: str) -> PageView:
    with serving((PAGES / name).read_text(encoding="utf-8")) as server:
        return PageSource(page_url(server.url)).view(MINUTE_NS)


def test_a_page_of_vllm_states_what_its_six_requests_were() -> None:
    """Six requests for 24 tokens each, 84 tokens of prompts, one after another in one batch."""
    view = first_look("vllm-0.32.txt")
    assert (view.server, view.models) == ("vLLM", ("tiny",))
    assert (view.num_running, view.num_waiting, view.kv_share) == (0, 0, 0)
    assert view.cached_share == 0
    assert view.ttft is not None
    assert view.tbt is not None
    assert view.e2e is not None
    assert view.queue is not None
    assert (view.ttft.num, view.e2e.num, view.queue.num) == (6, 6, 6)
    assert view.tbt.num == 6 * 23
    assert 1e6 < view.tbt.p50_ns <= view.tbt.p90_ns <= view.tbt.p99_ns < 1e8
    assert view.latency_window_ns is None


def test_a_page_of_sglang_states_what_its_requests_were() -> None:
    """Six requests for 24 tokens each, not streamed, and one of the server's own to warm up."""
    view = first_look("sglang-0.5.23.txt")
    assert (view.server, view.models) == ("SGLang", ("tiny",))
    assert (view.num_running, view.num_waiting, view.kv_share) == (0, 0, 0)
    assert view.ttft is not None
    assert view.e2e is not None
    assert (view.ttft.num, view.e2e.num) == (7, 7)
    assert view.tbt is None, "nothing was streamed"
    assert view.cached_share is None, "its counter is not there before the first hit"


def page(
    *, generated: float = 0, running: float = 1, ttft: tuple[int, int, int] = (0, 0, 0)
) -> str:
    buckets = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="{bound}"}} {count}\n'
        for engine in (0, 1)
        for bound, count in zip(("0.1", "0.5", "+Inf"), ttft, strict=True)
    )
    return (
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="a"}} {running}\n'
        f'vllm:num_requests_running{{engine="1",model_name="a"}} {running}\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        "# TYPE vllm:generation_tokens counter\n"
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
        "# TYPE vllm:time_to_first_token_seconds histogram\n" + buckets +
        f"vllm:time_to_first_token_seconds_sum 1.5\n"
        f"vllm:time_to_first_token_seconds_count {2 * ttft[2]}\n"
    )  # fmt: skip


def test_rates_and_quantiles_are_those_of_the_time_between_two_looks() -> None:
    with serving(page(generated=1000, ttft=(10, 10, 10))) as server:
        source = PageSource(page_url(server.url))
        first = source.view(MINUTE_NS)
        server.content = page(generated=1600, ttft=(10, 20, 20))
        second = source.view(MINUTE_NS)
    assert first.generated_tok_s is None
    assert first.ttft is not None
    assert (first.ttft.p99_ns, first.ttft.below) == (100_000_000, ("p50", "p90", "p99"))
    assert second.generated_tok_s is not None
    assert second.generated_tok_s * second.window_ns == pytest.approx(600e9)
    assert second.ttft is not None
    assert second.ttft.num == 20
    assert second.ttft.p50_ns == pytest.approx(3e8)


def test_replicas_add_up_and_their_shares_do_not() -> None:
    with serving(page(running=3)) as server:
        view = PageSource(page_url(server.url)).view(MINUTE_NS)
    assert (view.num_running, view.kv_share) == (6, 0.5)


def test_a_server_that_began_anew_has_no_rates_from_before() -> None:
    with serving(page(generated=1000)) as server:
        source = PageSource(page_url(server.url))
        source.view(MINUTE_NS)
        server.content = page(generated=7)
        view = source.view(MINUTE_NS)
    assert (view.generated_tok_s, view.window_ns) == (None, 0)


def test_the_default_path_is_metrics_and_another_is_kept() -> None:
    with serving(page()) as server:
        fetch(page_url(server.url))
        fetch(page_url(server.url + "/"))
        fetch(page_url(server.url + "/prom/vllm"))
        assert server.asked == ["/metrics", "/metrics", "/prom/vllm"]


@pytest.mark.parametrize("target", ["http://", "ftp://gpu7:1", "http://gpu7:no", "http://:80"])
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(BadInput, match="not a server address"):
        page_url(target)


@pytest.mark.parametrize(
    "content", ["<html><body>hello</body></html>", '{"status": "ok"}', "", "# just a comment\n"]
)
def test_what_is_no_page_of_metrics_is_refused(content: str) -> None:
    with serving(content) as server, pytest.raises(NotFound, match="not a metrics page"):
        fetch(page_url(server.url))


def test_a_server_that_refuses_or_is_not_there_is_reported() -> None:
    with serving("nothing") as server:
        server.status = 404
        with pytest.raises(NotFound, match="answers 404"):
            fetch(page_url(server.url))
    with pytest.raises(NotFound, match="cannot be reached"):
        fetch(page_url(server.url), timeout_s=2)


def test_an_unknown_servers_page_names_what_is_on_it() -> None:
    with serving("go_threads 3\nnode_load1 0.5\n") as server, pytest.raises(NotFound) as caught:
        PageSource(page_url(server.url)).view(MINUTE_NS)
    assert "go_threads, node_load1" in str(caught.value)
    assert all(dialect.server in str(caught.value) for dialect in DIALECTS)


def test_every_dialect_reads_a_page_written_in_its_own_names() -> None:
    for dialect in DIALECTS:
        lines = []
        for number, names in enumerate((*dialect.gauges.values(), *dialect.counters.values()), 1):
            labels = ",".join(f'{key}="{value}"' for key, value in names[-1].labels)
            lines.append(f"{names[-1].name}{{{labels}}} {number}")
        for names in dialect.histograms.values():
            lines += [f'{names[-1].name}_bucket{{le="{le}"}} 4' for le in ("1", "+Inf")]
        with serving("\n".join(dict.fromkeys(lines)) + "\n") as server:
            found = fetch(page_url(server.url))
        assert dialect_of(found) is dialect
        reading = read(found, dialect)
        assert set(reading.gauges) == set(dialect.gauges)
        assert set(reading.counters) == set(dialect.counters)
        assert set(reading.histograms) == set(dialect.histograms)
        if dialect.server != "TGI":  # whose token counts are the sums of its histograms
            numbers = [*reading.gauges.values(), *reading.counters.values()]
            assert numbers == list(range(1, len(numbers) + 1))


@given(st.lists(st.floats(0.0001, 50), min_size=1, max_size=200))
@example([1.0, 0.0078125])
def test_quantiles_lie_in_the_bucket_of_the_observation_they_stand_for(
    observed_s: list[float],
) -> None:
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0, math.inf)
    counts = tuple(float(sum(each <= bound for each in observed_s)) for bound in bounds)
    found = quantiles(PageHistogram(bounds, counts, sum(observed_s)))
    assert found is not None
    ordered = sorted(observed_s)
    for name, q, value_ns in (("p50", 0.5, found.p50_ns), ("p99", 0.99, found.p99_ns)):
        exact_s = ordered[math.ceil(q * len(ordered)) - 1]
        upper = next(bound for bound in bounds if exact_s <= bound)
        lower = max((bound for bound in bounds if bound < upper), default=0.0)
        assert 1e9 * lower <= value_ns <= 1e9 * upper
        assert (name in found.beyond) == math.isinf(upper)
        assert (name in found.below) == (upper == bounds[0])
        if name in found.below:
            assert value_ns == 1e9 * bounds[0]
    assert found.mean_ns == round(1e9 * (sum(observed_s) / len(observed_s)))


def test_a_quantile_in_the_first_bucket_is_printed_as_below_its_bound() -> None:
    """Nine queue times with a mean of 66 µs: none of them may be printed as 150 ms."""
    page = (
        "vllm:num_requests_running 0\n"
        'vllm:request_queue_time_seconds_bucket{le="0.3"} 9\n'
        'vllm:request_queue_time_seconds_bucket{le="+Inf"} 10\n'
        "vllm:request_queue_time_seconds_sum 0.00066\n"
    )
    with serving(page) as server:
        view = PageSource(page_url(server.url)).view(MINUTE_NS)
    assert view.queue is not None
    assert (view.queue.below, view.queue.beyond) == (("p50", "p90"), ("p99",))
    row = next(line for line in page_text(view).splitlines() if line.startswith("  queue"))
    assert "<300.0 ms" in row
    assert ">300.0 ms" in row
    assert "150" not in row
    assert "66 µs" in row


def test_a_counter_without_its_suffix_is_found_all_the_same() -> None:
    with serving("# TYPE tgi_request_success counter\ntgi_request_success 4\n") as server:
        found = fetch(page_url(server.url))
    assert read(found, dialect_of(found)).counters["finished"] == 4


def test_a_histogram_of_nothing_has_no_quantiles() -> None:
    histogram = PageHistogram((1.0, math.inf), (3.0, 5.0), 4.0)
    assert quantiles(between(histogram, histogram)) is None


@given(
    counts=st.lists(st.floats(0, 1e15), min_size=2, max_size=2),
    observed_s=st.floats(0, 1e15),
)
@example(counts=[0.0, 5e-324], observed_s=1e15)
def test_any_histogram_of_usable_numbers_has_quantiles_or_none(
    counts: list[float], observed_s: float
) -> None:
    histogram = PageHistogram((1.0, math.inf), tuple(sorted(counts)), observed_s)
    found = quantiles(histogram)
    assert (found is None) == (round(max(counts)) < 1)


def test_the_text_states_where_it_is_from_and_has_no_ledger() -> None:
    view = first_look("vllm-0.32.txt")
    text = page_text(view, width=80)
    assert LABEL in text
    assert "no ledger" in text
    assert "vLLM" in text
    assert max(map(len, text.splitlines())) <= 80
    assert page_text(view, ascii=True).isascii()
