"""A configuration that is read again: counters go on; one that cannot be used changes nothing."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.daemon.running import Collector, Scrape, collecting, engine_by_hand, eventually

_SLO = "slos: [{metric: ttft, threshold: %s, objective: 99%%, window: 1h}]\n"
_COUNTED = (
    "inferscope_requests_total",
    "inferscope_tokens_total",
    "inferscope_time_to_first_token_seconds_count",
    "inferscope_gpu_phase_seconds_total",
    "inferscope_slo_requests_total",
    "inferscope_cost_dollars_total",
    "inferscope_tenant_tokens_total",
)


def hash_of(scrape: Scrape) -> str:
    ((labels, _),) = scrape.all("inferscope_collector_info")
    return labels["config_hash"]


def scraped(collector: Collector, *, num_requests: int) -> Scrape:
    """Return a scrape once it counts this number of requests."""
    eventually(
        lambda: collector.scrape().total("inferscope_requests_total") == num_requests,
    )
    return collector.scrape()


def is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except (OSError, http.client.HTTPException):  # it is closed, or was in the midst of it
        return False


def no_less(early: Scrape, late: Scrape) -> None:
    """Check that no counter's series went back or away."""
    for name in _COUNTED:
        for labels, before in early.all(name):
            assert late.one(name, **labels) >= before, (name, labels)


@pytest.mark.thorough
def test_counters_go_on_over_reloads_good_and_bad(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(_SLO % "1h", encoding="utf-8")
    first = "slo: slo.yaml\npins: off\n"
    prices = "port: 0, price_per_gpu_hour: 10"
    with (
        engine_by_hand(tmp_path / "rings", "steady") as engine,
        collecting(tmp_path / "rings", tmp_path, first, prices) as collector,
    ):
        eventually(lambda: collector.scrape().all("inferscope_slo_requests_total") != [])
        # What an engine does before its first answer is a warm-up, and neither good nor bad.
        engine.do("begin first", "go first 2", "end first stop")
        engine.do("begin a", "go a 2", "end a stop", "begin over", "go over 2")
        early = scraped(collector, num_requests=2)
        assert early.one("inferscope_slo_requests_total", slo="ttft", result="good") == 1
        assert early.total("inferscope_collector_reloads_total") == 0

        # A file that cannot be used, in each of the ways: one line, and all stays.
        good = collector.file.read_text(encoding="utf-8")
        for bad, message in (
            (good + "pins: [\n", "not YAML"),
            (good.replace("pins: off", "pins: {max_md: 5}"), "Did you mean max_mb?"),
            (good.replace("port: 0", "port: x"), "exporters.prometheus: port is 'x'"),
            (good.replace("port: 0", f"port: 0, token_file: {tmp_path}/no"), "cannot read"),
            (good.replace("slo.yaml", "none.yaml"), "none.yaml"),
            (good + f"rings: {tmp_path}/others\n", f"rings changed to {tmp_path}/others"),
            (good + "shard: 1/2\n", "shard changed to 1/2, but 1/1 is collected"),
            (good.replace("exporters:", "exporters:\n  none: {}"), "no exporter is called 'none'"),
        ):
            output = collector.reload(bad)
            assert len(output.splitlines()) == 1
            assert output.startswith("inferscope: reload failed, the configuration is unchanged: ")
            assert message in output
        eventually(
            lambda: (
                collector.scrape().one("inferscope_collector_reloads_total", result="bad") == 8.0
            )
        )
        refused = collector.scrape()
        assert hash_of(refused) == hash_of(early)
        no_less(early, refused)
        engine.do("begin b", "end b stop")
        late = scraped(collector, num_requests=3)
        assert late.one("inferscope_slo_requests_total", slo="ttft", result="good") == 2

        # Objectives alone: the same file names them. No time to first token is below 1 ms.
        slo.write_text(_SLO % "1ms", encoding="utf-8")
        assert "configuration reloaded" in collector.reload(good)
        engine.do("begin c", "go c 2", "end c stop", "go over 2", "end over stop")
        eventually(lambda: hash_of(collector.scrape()) != hash_of(early))
        judged = scraped(collector, num_requests=5)
        assert judged.one("inferscope_slo_requests_total", slo="ttft", result="good") == 2
        # `over` got its first token under the other threshold, and is judged when it ends.
        assert judged.one("inferscope_slo_requests_total", slo="ttft", result="bad") == 2
        assert judged.one("inferscope_slo_threshold_seconds") == 0.001
        assert judged.one("inferscope_collector_reloads_total", result="good") == 1
        no_less(late, judged)

        # Another price and other tenants: what was paid is paid, on the address that it serves.
        other = good.replace("price_per_gpu_hour: 10", "price_per_gpu_hour: 1, tenants: [acme]")
        other += "counters: off\nheaders: [tenant]\n"
        output = collector.reload(other)
        assert f"serves {collector.url}" in output
        assert "the change of counters takes effect when the collector restarts" in output
        engine.do("begin d", "go d 2", "end d stop")
        cheap = scraped(collector, num_requests=6)
        no_less(judged, cheap)
        assert cheap.all("inferscope_tenant_tokens_total", tenant="acme") != []
        cost = [s.total("inferscope_cost_dollars_total") for s in (early, judged, cheap)]
        spent_s = [s.total("inferscope_gpu_phase_seconds_total") for s in (early, judged, cheap)]
        assert cost[0] == pytest.approx(10 * spent_s[0] / 3600, rel=0.2)
        assert cost[2] - cost[1] < 9 * (spent_s[2] - spent_s[1]) / 3600

        # Another address: the counters move with it.
        before = collector.url
        output = collector.reload(other.replace("port: 0", "host: 127.0.0.2, port: 0"))
        collector.url = output.split("serves ")[1].split()[0]
        assert collector.url != before
        moved = scraped(collector, num_requests=6)
        no_less(cheap, moved)
        eventually(lambda: not is_served(before))

        # Without objectives there are none of their series; with them again it counts anew.
        without = collector.file.read_text(encoding="utf-8").replace("slo: slo.yaml\n", "")
        collector.reload(without)
        eventually(lambda: "inferscope_slo_requests_total" not in collector.scrape().text)
        collector.reload(without + "slo: {file: slo.yaml}\n")
        # To who begins to judge, the first answer that he sees ends the warm-up.
        engine.do("begin e", "end e stop", "begin f", "end f stop")
        again = scraped(collector, num_requests=8)
        assert again.one("inferscope_slo_requests_total", slo="ttft", result="bad") == 1
        assert collector.stop() == 0
    assert "Traceback" not in collector.log()


@pytest.mark.thorough
def test_files_and_pins_of_the_former_configuration_are_completed(tmp_path: Path) -> None:
    rings, pins, one, other = (tmp_path / name for name in ("rings", "pins", "one", "other"))
    text = "exporters:\n  prometheus: {port: 0}\n  parquet: {folder: %s, rotate_s: 3600}\n"
    kept = f"pins: {{folder: {pins}, before_s: 1, after_s: 60, on: [signal]}}\n"
    with engine_by_hand(rings, "steady") as engine, collecting(rings, tmp_path) as collector:
        output = collector.reload(text % one + kept)
        assert f"parquet: writes requests, steps, slices to {one}" in output
        assert "prometheus" not in output
        eventually(lambda: collector.scrape().all("inferscope_requests_total") != [])
        engine.do("begin a", "go a 2", "end a stop")
        scraped(collector, num_requests=1)
        collector.process.send_signal(10)  # SIGUSR1
        eventually(lambda: list(pins.glob("*.isr")) != [])
        collector.reload(text % other + "pins: off\n")
        assert "pinned" in collector.log()
        engine.do("begin b", "go b 2", "end b stop")
        scraped(collector, num_requests=2)
        eventually(lambda: requests_in(one) == ["a"])
        output = collector.reload("exporters:\n  prometheus: {port: 0}\npins: off\n")
        assert "parquet: closed\n" in output
        eventually(lambda: requests_in(other) == ["b"])
        assert collector.stop() == 0


def requests_in(folder: Path) -> list[str]:
    """Return the requests in a folder's files."""
    files = sorted(folder.glob("requests/**/*.parquet"))
    return [each for path in files for each in pq.read_table(path)["request"].to_pylist()]
