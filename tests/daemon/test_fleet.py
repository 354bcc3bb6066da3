"""Three hosts, one Prometheus: the fleet's numbers are the sums of the hosts', and the truth's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from inferscope_prometheus.metric_table import BOUNDS_A

from tests.daemon.prometheus import Prometheus, prometheus
from tests.daemon.running import Scrape, collecting, engine_by_hand, eventually
from tests.daemon.test_scrape import exported

pytestmark = pytest.mark.thorough

HOSTS = 3
_TTFT = "inferscope_time_to_first_token_seconds"
_PHASES = "inferscope_gpu_phase_seconds_total"


@dataclass(frozen=True)
class Fleet:
    """What each host exported at the end, what Prometheus made of it, and what was recorded."""

    scrapes: list[Scrape]
    prometheus: Prometheus
    rows: list[dict[str, Any]]

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "request"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run an engine and a collector per host, of another load each, until the engines have left."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        collectors, engines, rings = [], [], []
        for host in range(HOSTS):
            home = folder / f"host-{host}"
            home.mkdir()
            rings.append(home / "rings")
            collectors.append(stack.enter_context(collecting(rings[-1], home)))
            engines.append(stack.enter_context(engine_by_hand(rings[-1], f"engine-{host}")))
        asked = stack.enter_context(prometheus(folder, [each.url for each in collectors]))
        for host, engine in enumerate(engines):
            for number in range(4 + 3 * host):
                name = f"r{number}"
                engine.do(f"begin {name}", f"go {name} {1 + host + number}", f"end {name} stop")
            engine.do("quit")
            engine.process.wait(60)
        num = sum(4 + 3 * host for host in range(HOSTS))
        finished = "sum(inferscope_requests_total)"
        gone = 'sum(inferscope_source_up{source="probe"})'
        eventually(lambda: asked.one(finished) == num and asked.one(gone) == 0)
        # From here on their counters stand still; what Prometheus has may be a second older.
        scrapes = [collector.scrape() for collector in collectors]
        whole = sum(scrape.total(_PHASES) for scrape in scrapes)
        eventually(lambda: asked.one(f"sum({_PHASES})") == pytest.approx(whole, rel=1e-12))
        rows = [
            row
            for host, path in enumerate(rings)
            for row in exported(path, folder / f"host-{host}.jsonl")
        ]
        yield Fleet(scrapes, asked, rows)


def test_time_to_first_token_of_the_fleet_is_that_of_all_its_requests(fleet: Fleet) -> None:
    waits_ns = [row["first_token_ns"] - row["arrived_ns"] for row in fleet.requests]
    assert len(waits_ns) == sum(4 + 3 * host for host in range(HOSTS))
    by_bound = fleet.prometheus.by("le", f"sum by (le) ({_TTFT}_bucket)")
    assert len(by_bound) == len(BOUNDS_A) + 1
    for bound, num in by_bound.items():
        of_hosts = [
            value
            for scrape in fleet.scrapes
            for labels, value in scrape.all(f"{_TTFT}_bucket")
            if float(labels["le"]) == float(bound)
        ]
        assert len(of_hosts) == HOSTS
        assert num == sum(of_hosts)
        assert num == sum(wait_ns <= float(bound) * 1e9 for wait_ns in waits_ns)
    total = fleet.prometheus.one(f"sum({_TTFT}_sum)")
    assert total == pytest.approx(sum(waits_ns) / 1e9, rel=1e-9)


def test_quantiles_of_the_fleet_lie_where_its_requests_lie(fleet: Fleet) -> None:
    waits_s = sorted((row["first_token_ns"] - row["arrived_ns"]) / 1e9 for row in fleet.requests)
    for share in (0.5, 0.9):
        found = fleet.prometheus.one(f"histogram_quantile({share}, sum by (le) ({_TTFT}_bucket))")
        assert found is not None
        true_s = waits_s[math.ceil(share * len(waits_s)) - 1]
        above = next(bound for bound in BOUNDS_A if true_s <= bound)
        below = max((bound for bound in BOUNDS_A if bound < above), default=0.0)
        assert below <= found <= above


def test_device_time_of_the_fleet_is_the_sum_of_its_hosts(fleet: Fleet) -> None:
    by_phase = fleet.prometheus.by("phase", f"sum by (phase) ({_PHASES})")
    of_hosts = Counter[str]()
    for scrape in fleet.scrapes:
        for labels, seconds in scrape.all(_PHASES):
            of_hosts[labels["phase"]] += seconds
    assert by_phase == pytest.approx(dict(of_hosts), rel=1e-12)
    busy_ns = Counter[str]()
    for row in fleet.rows:
        if row["kind"] == "device":
            busy_ns.update(row["ns_by"])
    for phase in ("prefill", "decode", "padding", "unattributed"):
        assert by_phase[phase] == pytest.approx(busy_ns[phase] / 1e9, rel=1e-9)
    assert by_phase["prefill"] > 0


def test_each_cause_of_the_fleet_is_the_sum_over_all_its_requests(fleet: Fleet) -> None:
    cause_ns = Counter[str]()
    for row in fleet.requests:
        cause_ns.update(row["ledger_ns"])
    by_cause = fleet.prometheus.by("cause", "sum by (cause) (inferscope_latency_seconds_total)")
    for cause, seconds in by_cause.items():
        assert seconds == pytest.approx(cause_ns[cause] / 1e9, rel=1e-9, abs=1e-12)


def test_no_two_hosts_export_the_same_series(fleet: Fleet) -> None:
    engines = {labels["engine_id"] for scrape in fleet.scrapes for labels, _ in scrape.all(_PHASES)}
    assert engines == {f"engine-{host}" for host in range(HOSTS)}
    num = fleet.prometheus.one('count(inferscope_requests_total{finish_reason="stop"})')
    assert num == HOSTS
