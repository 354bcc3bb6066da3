"""What is exported under which name: other people's dashboards and alerts rest on it.

A family that is new goes into the list. One that is renamed, or loses a label, stays beside its
successor for two releases, with "Deprecated" in its help; only then is its line removed.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from inferscope_prometheus import PrometheusExporter
from inferscope_prometheus.bounded import bounded
from inferscope_prometheus.collector_families import collector_families
from inferscope_prometheus.families import families
from inferscope_prometheus.metric_table import LABELS, METRICS
from inferscope_prometheus.page import page
from inferscope_prometheus.slo_families import slo_families
from msgspec.structs import replace as changed

from docs.metrics_reference import PAGE
from docs.metrics_reference import page as reference
from inferscope.attribution.cache_misses import CacheSegment
from inferscope.fold.cache_use import CacheUse
from inferscope.fold.final_records import DeviceHealth
from inferscope.fold.miss_ratio import MissRatio, curve
from inferscope.fold.snapshots import (
    BudgetView,
    CacheView,
    CollectorInfo,
    CountersView,
    DeviceCounters,
    EngineView,
    ExpertsView,
    RankView,
    SloState,
)
from inferscope.records import THROTTLES
from inferscope.slo.objectives import Objective
from inferscope.slo.tally import ObjectiveCount
from tests import debian
from tests.daemon.running import Scrape
from tests.exporters.otlp.conftest import Finals

ROOT = Path(__file__).parents[3]
LIST = ROOT / "tests" / "golden" / "metrics.txt"
_OBJECTIVE = Objective("ttft", "ttft", 500_000_000, 0.99, 3600 * 10**9)
_BY_PHASE = {"prefill": 1, "decode": 1}


def with_everything(view: EngineView) -> EngineView:
    """Return an engine of which all sources tell."""
    counted = ("sm_active_ns", "gpu_busy_ns", "energy_uj", "hbm_read_bytes", "hbm_write_bytes")
    gauges = ("sm_active_share", "dram_share", "memory_used_bytes", "dram_peak_bytes_per_s")
    totals = dict.fromkeys(counted, _BY_PHASE)
    device = DeviceCounters("H200", totals, dict.fromkeys(gauges, 0.5))
    counters = CountersView(
        totals=totals,
        devices={"GPU-1": device},
        errors={"energy_uj": 0.02, "sm_active_ns": None},
        compute_peaks_flops_s={"spec": 1e15},
    )
    health = DeviceHealth(dict.fromkeys(THROTTLES.values(), 0), 0, {})
    return replace(
        view,
        is_alive=True,
        health=replace(view.health, probe_state="on", probe_share=0.001),
        counters=counters,
        devices=tuple(replace(device, health=health) for device in view.devices),
        objectives=(ObjectiveCount(_OBJECTIVE, causes={"queue": 0}),),
        ranks=(RankView(0, 0, 0), RankView(0, 1, 0)),
        num_admissions=0,
        num_admissible=0,
        experts=ExpertsView(8, 10.0, 20, 12.5, 0, 3, 0.5),
        cache=CacheView({"hit": 1}, {"hit": 0}, curve([accessed()], peak_blocks=0)),
    )


def accessed() -> MissRatio:
    """Return the accesses to a cache of two blocks by one prompt of one block."""
    ratio = MissRatio(2)
    ratio.prompt(17, [1], num_blocks=1, block_tokens=16, rate=1.0, tenant="", hit_tokens=0)
    return ratio


def exported(finals: Finals) -> Scrape:
    """Return a page with all families there are."""
    exporter = PrometheusExporter({"port": 0, "price_per_gpu_hour": 1})
    exporter.open()
    try:
        for request in finals.requests:
            use = CacheUse((CacheSegment("new", "", 1, 1, None),))
            exporter.on_request(changed(request, adapter="sql", cache=use))
        for step in finals.steps:
            exporter.on_step(step)
            exporter.on_step(changed(step, rank=1))
        assert finals.view is not None
        (view,) = finals.view.engines
        now = replace(finals.view, engines=(with_everything(view),), mono_ns=view.through_ns)
        exporter.on_snapshot(now)
        (look,) = exporter._published.now.samples
    finally:
        exporter.close()
    budget = BudgetView("m", _OBJECTIVE, 1, 0, 1.0)
    exported_names = (
        *families([replace(look, coverage=0.99)], dropped={"otlp": {"closed": 0}}),
        *slo_families([(look.whole, look.view.objectives[0])], SloState((budget,), 0.0)),
        *collector_families(CollectorInfo("1", "0" * 12, num_refused={"engines": 0})),
    )
    exported_names = (*bounded(exported_names, order=(), guests={}, most=1000),)
    return Scrape(page(exported_names, is_open=False).decode())


def exported_names(scrape: Scrape) -> str:
    """Return a line for each: its name, its kind, and its labels beside those of all."""
    lines = []
    for family in scrape.families.values():
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(labels) == 1, f"{family.name} has no samples, or not all have the same labels"
        (found,) = labels
        assert found >= set(LABELS)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(" ".join((name, family.type, *sorted(found - set(LABELS)))))
    return "".join(f"{line}\n" for line in sorted(lines))


def test_names_kinds_and_labels_are_those_of_the_list(finals: Finals) -> None:
    assert exported_names(exported(finals)) == LIST.read_text(encoding="utf-8")


def test_promtool_finds_no_fault_in_any_of_them(finals: Finals) -> None:
    promtool = debian.program("promtool")
    text = exported(finals).text
    checked = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert checked == {row.split()[0] for row in LIST.read_text(encoding="utf-8").splitlines()}
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_table_is_the_list_and_the_docs_are_the_table() -> None:
    rows = [
        " ".join((row.full_name, row.kind.split()[0], *sorted(row.own_labels.split())))
        for row in METRICS.values()
    ]
    assert sorted(rows) == LIST.read_text(encoding="utf-8").splitlines()
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: make reference"
