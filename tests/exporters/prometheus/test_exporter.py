"""A real recording through the exporter: laws of its families, and what others' absence leaves."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from inferscope_otlp import OtlpExporter
from inferscope_prometheus import PrometheusExporter, names
from inferscope_prometheus.metric_table import LABELS
from msgspec.structs import replace as changed
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_open,
)

from inferscope.daemon.exporter_set import ExporterSet
from inferscope.fold.final_records import FinalRequest, FinalStep, TokenTime
from inferscope.fold.snapshots import BudgetView, SloState, Snapshot
from inferscope.records import CAUSES, DECODE, FINISHES, VERIFY
from inferscope.slo.objectives import Objective
from inferscope.slo.tally import ObjectiveCount
from tests.daemon.running import Scrape, eventually
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import receiving

PRICE = 3.6
"""Dollars per hour: a tenth of a cent per second."""
TTFT = Objective("ttft", "ttft", 500_000_000, 0.9, 86400 * 10**9)
OPEN = {"Accept": "application/openmetrics-text; version=1.0.0"}


class Exported:
    """An exporter with input, and its page."""

    def __init__(self, **settings: object) -> None:
        self.exporter = PrometheusExporter({"port": 0, **settings})
        self.exporter.open()

    def export_to(self, *finals: FinalStep | FinalRequest, view: Snapshot | None) -> None:
        for each in finals:
            if isinstance(each, FinalStep):
                self.exporter.on_step(each)
            else:
                self.exporter.on_request(each)
        if view is not None:
            self.exporter.on_snapshot(view)

    @property
    def url(self) -> str:
        return self.exporter.describe().split()[1]

    def scrape(self) -> Scrape:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            return Scrape(answer.read().decode())

    def close(self) -> None:
        self.exporter.close()


@pytest.fixture
def exported() -> Any:
    """Return what makes exporters, and close them."""
    made: list[Exported] = []

    def make(**settings: object) -> Exported:
        made.append(Exported(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def with_tenants(finals: Finals) -> list[FinalStep | FinalRequest]:
    """Return what became final, every third request one of `a`, every fifth one of `b`."""
    finished: list[FinalStep | FinalRequest] = []
    num = 0
    for each in finals.in_order:
        if isinstance(each, FinalRequest):
            tenant = {0: "a", 1: "b"}.get(num % 3)
            if tenant is not None:
                each = changed(each, attributes={**each.attributes, "tenant": tenant})
            if num % 10 == 9:
                each = changed(each, finish="client_cancel")
            num += 1
        finished.append(each)
    return finished


def test_tenants_waste_and_idle_sum_to_the_devices_hours_at_their_price(
    finals: Finals, exported: Any
) -> None:
    assert finals.view is not None
    (view,) = finals.view.engines
    it = exported(price_per_gpu_hour=PRICE, tenants=["a"])
    it.export_to(*with_tenants(finals), view=finals.view)
    scrape = it.scrape()
    wall_ns = sum(device.wall_ns for device in view.devices)
    whole = wall_ns / 1e9 * PRICE / 3600
    assert scrape.total("inferscope_cost_dollars_total") == pytest.approx(whole, rel=1e-3)
    for phase, ns in view.device_total_ns.items():
        by_phase = scrape.total("inferscope_cost_dollars_total", phase=phase)
        assert by_phase == pytest.approx(ns / 1e9 * PRICE / 3600, rel=1e-3, abs=1e-9)
    used = scrape.total("inferscope_tenant_gpu_seconds_total")
    unused = sum(
        scrape.total("inferscope_cost_dollars_total", tenant=each) for each in ("waste", "idle")
    )
    assert used * PRICE / 3600 + unused == pytest.approx(whole, rel=1e-3)
    tenants = {labels["tenant"] for labels, _ in scrape.all("inferscope_tenant_gpu_seconds_total")}
    assert tenants == {"a", "b", "none", "other"}
    for tenant in ("a", "b", "none"):
        assert scrape.total("inferscope_tenant_gpu_seconds_total", tenant=tenant) > 0


def test_tokens_by_tenant_sum_to_those_of_requests(finals: Finals, exported: Any) -> None:
    it = exported()
    it.export_to(*with_tenants(finals), view=finals.view)
    scrape = it.scrape()
    requests = finals.requests
    for kind, num in (
        ("output", sum(r.output_tokens for r in requests)),
        ("cached", sum(r.cached_tokens for r in requests)),
        ("input", sum((r.prompt_tokens or 0) - r.cached_tokens for r in requests)),
    ):
        assert scrape.total("inferscope_tenant_tokens_total", kind=kind) == num > 0
    assert scrape.all("inferscope_cost_dollars_total") == []  # no price is configured


@pytest.mark.thorough
def test_made_up_tenants_and_models_leave_the_number_of_series_as_it_is(
    finals: Finals, exported: Any
) -> None:
    assert finals.view is not None
    (view,) = finals.view.engines
    kept: list[str] = []
    """Models with a budget: it outlives the engine for the length of its window."""

    def with_model(name: str) -> Snapshot:
        assert finals.view is not None
        kept.append(name)
        budgets = tuple(BudgetView(each, TTFT, 8, 2, -1.0) for each in kept)
        engine = replace(view, model=name, objectives=(ObjectiveCount(TTFT, 8, 2),))
        return replace(finals.view, engines=(engine,), promised=SloState(budgets, 0))

    it = exported()
    nums = set()
    for round_ in range(2):
        for number in range(3000):
            tenant = {"tenant": f"{round_}-{number}"}
            it.exporter.on_request(changed(finals.requests[number % 90], attributes=tenant))
        for number in range(names.MOST_MODELS):
            it.exporter.on_snapshot(with_model(f"model-{round_}-{number}"))
        it.exporter.on_snapshot(with_model("one more"))
        scrape = it.scrape()
        nums.add(len(scrape.text.splitlines()))
        assert scrape.total("inferscope_requests_total", model_name="other") == 3000 * (round_ + 1)
        assert scrape.total("inferscope_slo_requests_total", model_name="other") == 10
        assert scrape.total("inferscope_slo_window_requests") == 10 * len(kept)
    assert len(nums) == 1


def test_budgets_of_models_with_one_label_are_merged(finals: Finals, exported: Any) -> None:
    assert finals.view is not None
    loose = replace(TTFT, objective=0.5, model="loose")
    budgets = [BudgetView(f"m{number}", TTFT, 1, 0, 1.0) for number in range(names.MOST_MODELS)]
    budgets += [
        BudgetView("strict", TTFT, 90, 10, 0.0),
        BudgetView("loose", loose, 80, 20, 0.6),
        BudgetView("", TTFT, 100, 0, 1.0),
    ]
    it = exported()
    it.exporter.on_snapshot(replace(finals.view, engines=(), promised=SloState(tuple(budgets), 0)))
    scrape = it.scrape()
    window = "inferscope_slo_window_requests"
    assert scrape.one(window, model_name="other", result="good") == 270
    assert scrape.one(window, model_name="other", result="bad") == 30
    left = scrape.one("inferscope_slo_budget_remaining_ratio", model_name="other")
    assert left == pytest.approx(1 - 30 / (100 * 0.1 + 100 * 0.5 + 100 * 0.1))
    assert scrape.one(window, model_name="m0", result="good") == 1


def test_a_request_of_which_a_part_was_missed_is_billed(finals: Finals, exported: Any) -> None:
    it = exported()
    late = [
        changed(each, joined_late=True) if isinstance(each, FinalRequest) else each
        for each in finals.in_order
    ]
    it.export_to(*late, view=finals.view)
    scrape = it.scrape()
    assert scrape.total("inferscope_requests_total") == 0
    assert scrape.total("inferscope_tenant_gpu_seconds_total") > 0
    assert scrape.one("inferscope_records_dropped_total", reason="joined_late") == len(
        finals.requests
    )


def test_drafts_are_accepted_or_rejected(finals: Finals, exported: Any) -> None:
    it = exported()
    step = next(step for step in finals.steps if len(step.request_ids) == 1)
    request = changed(finals.requests[0], rejected=TokenTime(2, 10))
    drafted = changed(
        step,
        step=10**6,
        request_ids=(request.request_id,),
        phases=step.phases * 0 + VERIFY,
        tokens=step.tokens * 0 + 6,
    )
    plain = changed(drafted, step=10**6 + 1, phases=step.phases * 0 + DECODE)
    it.export_to(drafted, changed(drafted, rank=1), plain, request, view=finals.view)
    scrape = it.scrape()
    assert scrape.one("inferscope_spec_tokens_total", result="accepted") == 3
    assert scrape.one("inferscope_spec_tokens_total", result="rejected") == 2


def test_every_event_counter_is_there_before_its_first_event(finals: Finals, exported: Any) -> None:
    assert finals.view is not None
    it = exported(price_per_gpu_hour=1)
    it.export_to(view=finals.view)
    scrape = it.scrape()
    for name, label, words in (
        ("requests", "finish_reason", FINISHES),
        ("latency_seconds", "cause", CAUSES),
        ("wasted_gpu_seconds", "reason", names.WASTES),
        ("spec_tokens", "result", names.SPEC_RESULTS),
        ("tenant_tokens", "kind", names.TENANT_TOKENS),
    ):
        series = scrape.all(f"inferscope_{name}_total")
        assert {labels[label] for labels, _ in series} == set(words)
        assert {value for _, value in series} == {0.0}


def test_demand_is_exported_for_live_engines_only(finals: Finals, exported: Any) -> None:
    assert finals.view is not None
    (view,) = finals.view.engines
    it = exported()
    it.export_to(view=finals.view)
    assert it.scrape().all("inferscope_headroom_ratio") == []
    alive = replace(view, is_alive=True, health=replace(view.health, probe_state="on"))
    now = replace(finals.view, engines=(alive,), mono_ns=view.through_ns)
    it.export_to(view=now)
    scrape = it.scrape()
    assert scrape.one("inferscope_queued_prompt_tokens") == 0
    assert scrape.one("inferscope_predicted_queue_seconds") == 0
    assert 0 < scrape.one("inferscope_headroom_ratio") <= 1


def test_drops_of_other_exporters_are_exported(finals: Finals) -> None:
    with receiving(status=400) as sink:
        exporters = {
            "prometheus": PrometheusExporter({"port": 0}),
            "otlp": OtlpExporter({"endpoint": sink.url}),
        }
        lines: list[str] = []
        exporter_set = ExporterSet(exporters, log_line=lines.append)
        exporter_set.open()
        try:
            assert finals.view is not None
            exporter_set.on_snapshot(finals.view)
            for request in finals.requests[:10]:
                exporter_set.on_request(request)
            url = exporters["prometheus"].describe().split()[1]

            def dropped() -> float:
                exporter_set.on_snapshot(finals.view)  # type: ignore[arg-type]
                with urllib.request.urlopen(url, timeout=30) as answer:
                    scrape = Scrape(answer.read().decode())
                return scrape.one(
                    "inferscope_records_dropped_total",
                    **dict.fromkeys(LABELS, "all"),
                    stage="otlp",
                    reason="not_delivered",
                )

            eventually(lambda: dropped() == 10)
        finally:
            exporter_set.close()
        assert len(lines) == 2, lines


def test_adapters_sum_to_tenants_and_are_absent_without_adapters(
    finals: Finals, exported: Any
) -> None:
    it = exported()
    it.export_to(*finals.in_order, view=finals.view)
    assert "inferscope_adapter" not in it.scrape().text
    it = exported(most_tenants=2)
    finished, num = list[FinalStep | FinalRequest](), 0
    for each in finals.in_order:
        if isinstance(each, FinalRequest):
            each = changed(each, adapter=("", "sql", "legal")[num % 3])
            num += 1
        finished.append(each)
    it.export_to(*finished, view=finals.view)
    scrape = it.scrape()
    labels = {labels["adapter"] for labels, _ in scrape.all("inferscope_adapter_gpu_seconds_total")}
    assert {"none", "other", "sql"} <= labels
    for phase in ("prefill", "decode"):
        whole = scrape.total("inferscope_tenant_gpu_seconds_total", phase=phase)
        by_adapter = scrape.total("inferscope_adapter_gpu_seconds_total", phase=phase)
        assert by_adapter == pytest.approx(whole, rel=1e-6)
    for kind in names.TENANT_TOKENS:
        whole = scrape.total("inferscope_tenant_tokens_total", kind=kind)
        assert scrape.total("inferscope_adapter_tokens_total", kind=kind) == whole
    assert scrape.one("inferscope_adapter_tokens_total", adapter="sql", kind="output") > 0


def test_synthetic_engines_are_marked(finals: Finals, exported: Any) -> None:
    assert finals.view is not None
    (engine,) = finals.view.engines
    made_up = replace(engine, engine_id="pretender", is_synthetic=True)
    it = exported()
    it.export_to(view=replace(finals.view, engines=(engine, made_up)))
    scrape = it.scrape()
    (labels, _) = scrape.of_engine("pretender").all("inferscope_engine_info")[0]
    assert labels["synthetic"] == "true"
    (labels, _) = scrape.of_engine(engine.engine_id).all("inferscope_engine_info")[0]
    assert labels["synthetic"] == "false"


def test_exemplars_lead_to_the_traces_that_are_kept(finals: Finals) -> None:
    with receiving() as sink:
        exporters = {
            "prometheus": PrometheusExporter({"port": 0}),
            "otlp": OtlpExporter({"endpoint": sink.url, "keep_share": 0.3}),
        }
        exporter_set = ExporterSet(exporters, log_line=lambda line: None)
        exporter_set.open()
        try:
            assert finals.view is not None
            for request in finals.requests:
                exporter_set.on_request(request)
            exporter_set.on_snapshot(finals.view)
            url = exporters["prometheus"].describe().split()[1]
            asked = urllib.request.Request(url, headers=OPEN)
            with urllib.request.urlopen(asked, timeout=30) as answer:
                families = list(read_open(answer.read().decode()))
        finally:
            exporter_set.close()
        kept = {root.span.trace_id.hex() for root in sink.roots()}
    assert 0 < len(kept) < len(finals.requests)
    shown: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sample.exemplar.value <= float(sample.labels["le"])
                shown.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    assert {
        "inferscope_time_to_first_token_seconds",
        "inferscope_time_between_tokens_seconds",
        "inferscope_request_duration_seconds",
    } <= shown.keys()
    assert set().union(*shown.values()) <= kept


def test_an_exemplar_keeps_its_time_until_the_wall_clock_is_set(finals: Finals) -> None:
    assert finals.view is not None
    exporter = PrometheusExporter({"port": 0})
    exporter.link_traces(lambda request: "4bf92f3577b34da6a3ce929d0e0e4736")
    exporter.open()
    try:
        for request in finals.requests:
            exporter.on_request(request)
        asked = urllib.request.Request(exporter.describe().split()[1], headers=OPEN)

        def times(set_by_ns: int) -> list[float]:
            view = replace(finals.view, real_ns=finals.view.real_ns + set_by_ns)
            exporter.on_snapshot(view)
            with urllib.request.urlopen(asked, timeout=30) as answer:
                families = read_open(answer.read().decode())
            samples = [sample for family in families for sample in family.samples]
            return [float(each.exemplar.timestamp) for each in samples if each.exemplar]

        exemplar_times = times(0)
        assert len(exemplar_times) > 10
        assert times(700_000) == times(-700_000) == exemplar_times
        later = times(10**9)
        assert [round(at_s - 1, 3) for at_s in later] == exemplar_times
    finally:
        exporter.close()
