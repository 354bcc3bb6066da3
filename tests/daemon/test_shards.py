"""Several collectors on one host: each engine is in one, and together they tell what one does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_parquet.exporter import ParquetExporter
from inferscope_prometheus.exporter import PrometheusExporter

from inferscope.daemon.config import PinSettings, config_hash, read_config
from inferscope.daemon.exporter_set import make_exporters
from inferscope.daemon.lock import LOCK_NAME, only_collector
from inferscope.daemon.shard import ALL, MOST_SHARDS, Shard, read_shard
from inferscope.errors import BadInput, InferScopeError
from tests.daemon.running import Scrape, collecting, engine_by_hand, eventually

pytestmark = pytest.mark.thorough

ENGINES = ("a", "b", "c", "d", "e")
_SLO = """
slos:
  - {metric: ttft, threshold: 60s, objective: 90%, window: 1d}
  - {metric: availability, objective: 90%, window: 1d}
"""


# --- which engines are whose ----------------------------------------------------------------------


@given(st.text(), st.integers(1, MOST_SHARDS))
def test_each_engine_is_in_exactly_one_shard(engine_id: str, total: int) -> None:
    assert sum(Shard(number, total).has(engine_id) for number in range(1, total + 1)) == 1
    assert ALL.has(engine_id)


def test_shard_of_an_engine_follows_from_its_id() -> None:
    for engine_id in ("fleet-000", "vllm-7", "größer"):
        digest = hashlib.sha256(engine_id.encode()).hexdigest()
        assert Shard(1 + int(digest[:16], 16) % 3, 3).has(engine_id)
    assert [read_shard(f"{k}/2").has("fleet-000") for k in (1, 2)] == [False, True]
    sizes = [sum(Shard(k, 4).has(f"fleet-{n:03}") for n in range(400)) for k in (1, 2, 3, 4)]
    assert sum(sizes) == 400
    assert min(sizes) > 70


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2", "Give K/N"),
        ("half", "Give K/N"),
        ("-1/2", "Give K/N"),
        ("0/2", "Give a number from 1/2 to 2/2"),
        ("3/2", "Give a number from 1/2 to 2/2"),
        ("1/0", "1 to 64"),
        ("1/65", "1 to 64"),
    ],
)
def test_what_is_no_shard_is_one_line(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        read_config(None, {"INFERSCOPE_COLLECT_SHARD": text})
    assert text in str(raised.value)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", "collect", f"--shard={text}", "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path)},
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_shards_of_one_configuration_keep_out_of_each_others_way(tmp_path: Path) -> None:
    file = tmp_path / "collect.yaml"
    file.write_text(
        "rings: /run/rings\nshard: 1/4\npins: {folder: /var/pins, max_mb: 100}\n"
        "slo: {state: /var/state.json}\n"
        "exporters: {prometheus: {port: 9000}, parquet: {folder: /var/p, host: h, max_mb: 400}}\n"
    )
    first = read_config(file, {})
    second = read_config(file, {"INFERSCOPE_COLLECT_SHARD": "2/4"})
    third = read_config(file, {"INFERSCOPE_COLLECT_SHARD": "2/4"}, shard="3/4")
    assert [str(each.shard) for each in (first, second, third)] == ["1/4", "2/4", "3/4"]
    assert second.own_pins == PinSettings(Path("/var/pins/2-of-4"), 25)
    assert second.state == Path("/var/state-2-of-4.json")
    assert read_config(file, {}, shard="1/1").state == Path("/var/state.json")
    assert config_hash(second) == config_hash(read_config(file, {}, shard="1/1"))
    made = make_exporters(second.exporters, second.shard)
    assert isinstance(made["prometheus"], PrometheusExporter)
    assert made["prometheus"].describe() == "serves http://127.0.0.1:9001/metrics"
    assert isinstance(made["parquet"], ParquetExporter)
    assert made["parquet"]._settings.writer == "h-2-of-4"
    assert made["parquet"]._settings.host == "h"
    assert made["parquet"]._settings.max_mb == 100
    with pytest.raises(BadInput, match=r"shard 2 of 2 would be on 65536\. Give one up to 65534"):
        make_exporters({"prometheus": {"port": 65535}}, Shard(2, 2))


def test_a_check_states_how_many_engines_are_a_shards(tmp_path: Path) -> None:
    with engine_by_hand(tmp_path, "a"), engine_by_hand(tmp_path, "b"):
        outputs = []
        for shard in ("1/2", "2/2"):
            done = subprocess.run(
                [sys.executable, "-m", "inferscope", "collect", "--check", "--shard", shard],
                capture_output=True,
                text=True,
                check=True,
                env={
                    **os.environ,
                    "INFERSCOPE_DIR": str(tmp_path),
                    "INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_PORT": "0",
                },
            )
            lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
            assert lines["rings"].endswith("running engines: 2")
            outputs.append(lines["shard"])
    num = sum(Shard(1, 2).has(engine_id) for engine_id in "ab")
    assert outputs == [
        f"{part}/2, running engines in it: {of}" for part, of in ((1, num), (2, 2 - num))
    ]


# --- which collectors may run at once -------------------------------------------------------------


def test_shards_of_the_same_number_run_at_once(tmp_path: Path) -> None:
    with only_collector(tmp_path, Shard(1, 2)), only_collector(tmp_path, Shard(2, 2)):
        assert (tmp_path / LOCK_NAME).read_text() == ""
        for number in (1, 2):
            own = tmp_path / f"collect-{number}-of-2.lock"
            assert own.read_text() == f"{os.getpid()}\n"
    with only_collector(tmp_path):  # they are gone
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize(
    ("runs", "comes", "why"),
    [
        (ALL, ALL, "a collector runs already on FOLDER, as process PID."),
        (ALL, Shard(1, 2), "a collector runs already on FOLDER, as process PID."),
        (Shard(1, 2), ALL, "collectors of shards run already on FOLDER: 1/2 as process PID."),
        (Shard(1, 2), Shard(1, 2), "a collector of shard 1/2 runs already on FOLDER, as process"),
        (
            Shard(1, 2),
            Shard(1, 3),
            "shard 1/3 conflicts with the shards that run already on F",
        ),
        (
            Shard(1, 2),
            Shard(3, 3),
            "shard 3/3 conflicts with the shards that run already on F",
        ),
    ],
)
def test_collector_that_would_count_an_engine_twice_is_refused_in_one_line(
    tmp_path: Path, runs: Shard, comes: Shard, why: str
) -> None:
    with only_collector(tmp_path, runs):
        with pytest.raises(InferScopeError) as raised, only_collector(tmp_path, comes):
            raise AssertionError("it runs")
        message = str(raised.value).replace(str(tmp_path), "FOLDER")
        assert message.replace(str(os.getpid()), "PID").startswith(why)
        assert "\n" not in message
        if not runs.is_all:
            with only_collector(tmp_path, Shard(2, 2)):  # who fits comes in all the same
                pass
    with only_collector(tmp_path, comes):
        pass


# --- together they tell what one tells ------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Last exports of collectors, for engines that have ended."""

    whole: Scrape
    shards: list[Scrape]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Run two shards on the rings, and one collector of all on the same rings by another name."""
    folder = tmp_path_factory.mktemp("shards")
    rings, again = folder / "rings", folder / "again"
    (folder / "slo.yaml").write_text(_SLO, encoding="utf-8")
    config = f"slo: {folder}/slo.yaml\npins: off\n"
    with ExitStack() as stack:
        collectors = []
        for name, shard, of in (("one", "1/1", again), ("k1", "1/2", rings), ("k2", "2/2", rings)):
            (folder / name).mkdir()
            environment = {"INFERSCOPE_COLLECT_SHARD": shard}
            collectors.append(
                stack.enter_context(collecting(of, folder / name, config, **environment))
            )
        engines = []
        for engine_id in ENGINES:
            engines.append(stack.enter_context(engine_by_hand(rings, engine_id)))
            (again / engine_id).mkdir(mode=0o700)
            for ring in (rings / engine_id).glob("*.ring"):
                os.link(ring, again / engine_id / ring.name)
        for number, engine in enumerate(engines):
            for each in range(2 + number):
                name = f"r{each}"
                finish = "error" if each == 1 else "stop"
                engine.do(f"begin {name}", f"go {name} {1 + number + each}", f"end {name} {finish}")
            engine.do("quit")
            engine.process.wait(60)
        num = sum(2 + number for number in range(len(ENGINES)))

        def finished(*scrapes: Scrape) -> float:
            return sum(each.total("inferscope_requests_total") for each in scrapes)

        eventually(lambda: finished(collectors[0].scrape()) == num)
        eventually(lambda: finished(*(each.scrape() for each in collectors[1:])) == num)
        states = sorted(path.name for path in rings.glob(".collector-*/slo-state*"))
        assert states == ["slo-state-1-of-2.json", "slo-state-2-of-2.json"]
        whole, *shards = [each.scrape() for each in collectors]
        yield Seen(whole, shards)


def engines_of(scrape: Scrape) -> set[str]:
    found = scrape.all("inferscope_requests_total", finish_reason="stop")
    return {labels["engine_id"] for labels, _ in found}


def test_every_engine_is_exported_by_the_shard_of_its_id(seen: Seen) -> None:
    assert engines_of(seen.whole) == set(ENGINES)
    for number, scrape in enumerate(seen.shards, 1):
        expected = {engine_id for engine_id in ENGINES if Shard(number, 2).has(engine_id)}
        assert engines_of(scrape) == expected
        assert expected
        assert scrape.one("inferscope_collector_info", shard=f"{number}/2") == 1


@pytest.mark.parametrize(
    "name",
    [
        "inferscope_requests_total",
        "inferscope_latency_seconds_total",
        "inferscope_tokens_total",
        "inferscope_step_duration_seconds_bucket",
        "inferscope_step_duration_seconds_sum",
        "inferscope_time_to_first_token_seconds_bucket",
        "inferscope_time_between_tokens_seconds_sum",
        "inferscope_request_gpu_seconds_sum",
        "inferscope_wasted_gpu_seconds_total",
        "inferscope_slo_requests_total",
        "inferscope_slo_breaches_total",
        "inferscope_records_dropped_total",
    ],
)
def test_the_series_of_two_shards_are_those_of_one_collector(seen: Seen, name: str) -> None:
    def reported(scrapes: list[Scrape]) -> dict[tuple[tuple[str, str], ...], float]:
        found = {}
        for scrape in scrapes:
            for labels, value in scrape.all(name):
                if labels["engine_id"] != "all":
                    assert found.setdefault(tuple(sorted(labels.items())), value) == value
        return found

    alone, together = reported([seen.whole]), reported(seen.shards)
    assert alone.keys() == together.keys()
    for labels, value in alone.items():
        assert together[labels] == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert sum(alone.values()) > 0 or name.endswith(("dropped_total", "wasted_gpu_seconds_total"))


@pytest.mark.parametrize("slo", ["ttft", "availability"])
def test_what_is_left_of_a_budget_is_right_when_windows_are_summed(seen: Seen, slo: str) -> None:
    def window(result: str, *scrapes: Scrape) -> float:
        return sum(
            each.total("inferscope_slo_window_requests", slo=slo, result=result) for each in scrapes
        )

    for result in ("good", "bad"):
        assert window(result, *seen.shards) == window(result, seen.whole)
    good, bad = window("good", *seen.shards), window("bad", *seen.shards)
    assert good + bad > 0
    left = seen.whole.one("inferscope_slo_budget_remaining_ratio", slo=slo)
    # The objective is 90 %; docs/slo.md has the sum.
    assert left == pytest.approx(1 - bad / ((good + bad) * 0.1))
