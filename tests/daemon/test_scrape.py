"""A scrape of a real collector over a real engine, held against the export of the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from inferscope_prometheus.metric_table import BOUNDS_A, BOUNDS_B, LABELS

from inferscope.exporting import load_exporter
from inferscope.private import private_file
from inferscope.readers.source import catch_up, open_source
from inferscope.records import CAUSES, FINISHES
from inferscope.slo.judge import MOST_WARM_UP
from tests import debian
from tests.cli.running import inferscope
from tests.daemon.running import Scrape, collecting, engine_by_hand, eventually

pytestmark = pytest.mark.thorough

_PINS = """
pins: {folder: %s, before_s: 10, after_s: 0.5, on: [breach, engine_lost]}
slo: {file: slo.yaml, ttft_ms: 0.001}
"""
_SLO = """
slos:
  - {metric: ttft, threshold: 60ms, objective: 99%, window: 30d}
  - {metric: availability, objective: 99.9%, window: 30d}
  - {metric: goodput, objective: 95%, window: 7d}
"""


@dataclass(frozen=True)
class Seen:
    """One run, as the collector, the export and a pin have it."""

    whole: Scrape
    rows: list[dict[str, Any]]
    pins: list[Path]
    exit_code: int
    log: str

    @property
    def scrape(self) -> Scrape:
        """The engine that lived."""
        return self.whole.of_engine("under-test")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        rows = [row for row in self.rows if row.get("engine") == "under-test"]
        return [row for row in rows if row["kind"] == kind]


def exported(path: Path, out: Path) -> list[dict[str, Any]]:
    """Return a recording or a folder of rings as JSON Lines."""
    with private_file(out) as file:
        exporter = load_exporter("jsonl")(file)
        source = open_source(path, sinks=(exporter,), listen=exporter.on_record)
        catch_up(source)
        source.close()
        exporter.close(source.collector.devices(), source.collector.totals())
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def num_lost(scraped: Scrape) -> float:
    """Return the requests whose engine went away."""
    return scraped.total("inferscope_requests_total", finish_reason="engine_lost")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Collect from the reference engine under two seconds of load, and from one that is killed."""
    folder = tmp_path_factory.mktemp("seen")
    rings, pins = folder / "rings", folder / "pins"
    settings = {
        "model": "builtin",
        "seed": 3,
        "duration_s": 2.0,
        "load": 0.5,
        "rate_s": 10.0,  # eighteen requests: all may be of a warm-up, where the first takes long
        "client_times": None,
        "options": {"token_budget": 40, "max_running": 16, "num_blocks": 144},
    }
    (folder / "slo.yaml").write_text(_SLO, encoding="utf-8")
    with collecting(rings, folder, _PINS % pins) as collector:
        with engine_by_hand(rings, "victim") as victim:
            victim.do("begin v", "go v 3")
        engine = subprocess.run(
            [
                sys.executable,
                "-m",
                "inferscope.cli.demo.start",
                json.dumps({"type": "Settings", **settings}),
            ],
            stdin=(pipe := os.pipe())[0],
            env={**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": "under-test"},
            capture_output=True,
            check=False,
            timeout=200,
        )
        for end in pipe:
            os.close(end)
        assert engine.returncode == 0, engine.stderr
        # An earlier read of the rings cannot see yet that the victim has exited.
        eventually(lambda: num_lost(collector.scrape()) == 1)
        rows = exported(rings, folder / "run.jsonl")
        num_requests = sum(row["kind"] == "request" for row in rows)
        assert num_requests > 8

        def is_all_there() -> bool:
            now = collector.scrape()
            is_up = now.total("inferscope_source_up", source="probe")
            return now.total("inferscope_requests_total") == num_requests and not is_up

        eventually(is_all_there)
        scrape = collector.scrape()
        exit_code = collector.stop()
        yield Seen(scrape, rows, sorted(pins.glob("*.isr")), exit_code, collector.log())


def seconds(ns: float) -> Any:
    return pytest.approx(ns / 1e9, rel=1e-12, abs=1e-12)


def test_each_cause_sums_to_the_exports(seen: Seen) -> None:
    cause_ns = Counter[str]()
    for row in seen.of_kind("request"):
        cause_ns.update(row["ledger_ns"])
    assert cause_ns["decode_own"] > 0
    for cause in CAUSES:
        assert seen.scrape.one("inferscope_latency_seconds_total", cause=cause) == seconds(
            cause_ns[cause]
        )
    assert seen.scrape.total("inferscope_latency_seconds_total") == pytest.approx(
        seen.scrape.one("inferscope_request_duration_seconds_sum"), rel=1e-9
    )


def test_requests_and_tokens_are_those_of_the_export(seen: Seen) -> None:
    requests = seen.of_kind("request")
    finishes = Counter(row["finish"] for row in requests)
    for finish in FINISHES:
        value = seen.scrape.one("inferscope_requests_total", finish_reason=finish)
        assert value == finishes[finish]
    tokens = Counter[tuple[str, str]]()
    for step in seen.of_kind("step"):
        for share in step["shares"]:
            tokens[share["phase"], "computed"] += share["tokens"]
    tokens["prefill", "cached"] = sum(row["cached_tokens"] for row in requests)
    for (phase, source), num in tokens.items():
        value = seen.scrape.one("inferscope_tokens_total", phase=phase, source=source)
        assert value == num
    flops = Counter[str]()
    for row in requests:
        flops.update({phase: use["flops"] for phase, use in row["by_phase"].items()})
    for phase, num in flops.items():
        assert seen.scrape.one("inferscope_flops_total", phase=phase) == num > 0


def test_each_histogram_is_that_of_the_export(seen: Seen) -> None:
    requests = seen.of_kind("request")
    gaps = [gap for row in requests for gap in row["tbt_ns"]]
    durations = {
        "time_between_tokens": gaps,
        "time_to_first_token": [r["first_token_ns"] - r["arrived_ns"] for r in requests],
        "request_duration": [r["delivered_ns"] - r["arrived_ns"] for r in requests],
        "request_queue": [
            r["ledger_ns"].get("queue", 0) + r["ledger_ns"].get("queue_idle", 0) for r in requests
        ],
        "request_decode": [r["last_token_ns"] - r["first_token_ns"] for r in requests],
    }
    assert len(gaps) > 100
    for name, durations_ns in durations.items():
        full = f"inferscope_{name}_seconds"
        assert seen.scrape.one(f"{full}_count") == len(durations_ns)
        assert seen.scrape.one(f"{full}_sum") == seconds(sum(durations_ns))
        for labels, num in seen.scrape.all(f"{full}_bucket"):
            bound_ns = float(labels["le"]) * 1e9
            assert num == sum(ns <= bound_ns for ns in durations_ns)
    for phase in ("prefill", "decode"):
        compute_ns = sum(row["compute_ns"][phase] for row in requests)
        value = seen.scrape.one("inferscope_request_gpu_seconds_sum", phase=phase)
        assert value == seconds(compute_ns)
    kinds = Counter[str]()
    for step in seen.of_kind("step"):
        phases = {share["phase"] for share in step["shares"]}
        kinds["mixed" if len(phases) > 1 else phases.pop()] += 1
    for phase, num in kinds.items():
        value = seen.scrape.one("inferscope_step_duration_seconds_count", phase=phase)
        assert value == num


def test_busy_device_time_is_that_of_the_export(seen: Seen) -> None:
    (device,) = seen.of_kind("device")
    for phase in ("prefill", "decode", "padding", "unattributed"):
        value = seen.scrape.one("inferscope_gpu_phase_seconds_total", phase=phase)
        assert value == seconds(device["ns_by"][phase])


def test_good_and_bad_are_what_the_export_makes_them(seen: Seen) -> None:
    requests = seen.of_kind("request")
    answered_ns = min(r["delivered_ns"] for r in requests if r["finish"] in ("stop", "length"))
    warm_up = [r for r in requests if r["arrived_ns"] < answered_ns]
    judged = [r for r in requests if r["arrived_ns"] >= answered_ns]
    assert 0 < len(warm_up) <= MOST_WARM_UP
    is_good = [r["first_token_ns"] - r["arrived_ns"] <= 60_000_000 for r in judged]
    expected = {
        "ttft": (sum(is_good), len(is_good) - sum(is_good)),
        "availability": (len(requests), 0),
        "goodput": (sum(is_good), len(is_good) - sum(is_good)),
    }
    for slo, results in expected.items():
        counts = [
            seen.scrape.one("inferscope_slo_requests_total", slo=slo, result=result)
            for result in ("good", "bad")
        ]
        assert tuple(counts) == results
        assert seen.scrape.total("inferscope_slo_breaches_total", slo=slo) == results[1]
    apart = seen.scrape.one("inferscope_slo_warmup_requests_total", slo="ttft")
    assert apart == len(warm_up)
    lost = seen.whole.of_engine("victim")
    for slo in ("availability", "goodput"):
        assert lost.one("inferscope_slo_requests_total", slo=slo, result="bad") == 1
        assert lost.one("inferscope_slo_breaches_total", slo=slo, cause="engine_lost") == 1


def test_bounds_are_the_contracts_and_buckets_grow(seen: Seen) -> None:
    assert len(BOUNDS_A) == 25
    assert len(BOUNDS_B) == 23
    for name, bounds in [
        ("request_stall", BOUNDS_A),
        ("time_per_output_token", BOUNDS_B),
    ]:
        buckets = seen.scrape.all(f"inferscope_{name}_seconds_bucket")
        assert [float(labels["le"]) for labels, _ in buckets] == [*bounds, float("inf")]
        assert all(early <= late for (_, early), (_, late) in pairwise(buckets))


def test_every_family_has_the_same_labels_and_nobodys_name(seen: Seen) -> None:
    ids = {row["request"] for row in seen.of_kind("request")}
    assert len(seen.scrape.families) >= 20
    for family in seen.scrape.families.values():
        assert family.documentation
        for sample in family.samples:
            assert set(LABELS) <= set(sample.labels), sample.name
            assert not ids & set(sample.labels.values())


def test_what_is_not_there_is_absent_and_reported_as_absent(seen: Seen) -> None:
    assert "inferscope_gpu_sm_active_seconds" not in seen.scrape.text
    assert 'phase="foreign"' not in seen.scrape.text
    assert seen.scrape.one("inferscope_source_up", source="gpm") == 0
    assert seen.scrape.all("inferscope_requests_running") == []


def test_the_names_are_well_formed(seen: Seen) -> None:
    promtool = debian.program("promtool")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=seen.scrape.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""


def test_sigterm_ends_it_well(seen: Seen) -> None:
    assert seen.exit_code == 0
    assert "Traceback" not in seen.log


def test_a_pin_replays_with_the_requests_in_it_whole(seen: Seen, tmp_path: Path) -> None:
    pinned, replayed = {}, seen.pins[0]
    for number, pin in enumerate(seen.pins):  # one, where the machine is fast enough to overlap
        assert pin.stat().st_mode & 0o077 == 0
        assert pin.parent.stat().st_mode & 0o077 == 0
        rows = exported(pin, tmp_path / f"pin-{number}.jsonl")
        requests = [row for row in rows if row["kind"] == "request"]
        if any(row["engine"] == "under-test" for row in requests):
            replayed = pin  # the first may have ended before that engine was up
        pinned |= {row["request"]: row for row in requests if not row["joined_late"]}
    assert pinned["v"]["finish"] == "engine_lost"
    for row in seen.of_kind("request"):
        assert pinned[row["request"]]["ledger_ns"] == row["ledger_ns"]
    looked = inferscope("attach", str(replayed), "--once", rings=tmp_path, NO_COLOR="1")
    assert looked.returncode == 0
    assert "builtin" in looked.stdout
    assert looked.stderr == ""


def test_an_engine_that_is_killed_loses_its_requests_and_stays_in_sight(seen: Seen) -> None:
    victim = seen.whole.of_engine("victim")
    assert victim.one("inferscope_requests_total", finish_reason="engine_lost") == 1
    assert victim.total("inferscope_requests_total") == 1
    assert victim.one("inferscope_source_up", source="probe") == 0
    assert victim.one("inferscope_tokens_total", phase="decode") == 3
