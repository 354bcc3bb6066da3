"""The conventions' metrics, as a real receiver reads them, held against the requests."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import pytest
from inferscope_otlp import OtlpExporter
from inferscope_otlp.metrics import BOUNDS
from msgspec.structs import replace

from inferscope.fold.final_records import DeviceHealth
from inferscope.fold.snapshots import DeviceCounters, Snapshot
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import Sink, attributes, receiving


def points(sink: Sink) -> dict[str, list[tuple[dict[str, Any], Any]]]:
    """Return the points of the last post, by metric, with their attributes."""
    (group,) = sink.metrics[-1].resource_metrics
    assert attributes(group.resource.attributes)["service.name"] == "inferscope"
    found = {}
    for metric in group.scope_metrics[0].metrics:
        assert metric.unit == "s"
        assert metric.description
        assert metric.histogram.aggregation_temporality == 2  # cumulative
        found[metric.name] = [
            (attributes(point.attributes), point) for point in metric.histogram.data_points
        ]
    return found


@pytest.mark.thorough
def test_each_histogram_is_that_of_the_requests(finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "metrics_interval_s": 3600})
        exporter.open()
        finals.export_to(exporter)
        exporter.close()
        found = points(sink)
    requests = finals.requests
    durations = {
        "gen_ai.server.request.duration": [r.delivered_ns - r.arrived_ns for r in requests],
        "gen_ai.server.time_to_first_token": [
            r.first_token_ns - r.arrived_ns for r in requests if r.first_token_ns is not None
        ],
        "gen_ai.server.time_per_output_token": [
            (r.last_token_ns - r.first_token_ns) / (r.output_tokens - 1)
            for r in requests
            if r.first_token_ns is not None and r.last_token_ns is not None and r.output_tokens > 1
        ],
    }
    assert found.keys() == durations.keys()
    for name, of_all in durations.items():
        ((labels, point),) = found[name]
        assert labels["gen_ai.operation.name"] == "text_completion"
        assert labels["gen_ai.provider.name"] == "inferscope"
        assert labels["gen_ai.request.model"] == "builtin"
        assert point.count == len(of_all) > 50
        assert point.sum == pytest.approx(sum(of_all) / 1e9)
        assert tuple(point.explicit_bounds) == BOUNDS[name]
        assert sum(point.bucket_counts) == point.count
        below = 0
        for bound_s, num in zip(point.explicit_bounds, point.bucket_counts, strict=False):
            below += num
            assert below == sum(ns / 1e9 <= bound_s for ns in of_all)
        assert 0 < point.start_time_unix_nano <= point.time_unix_nano


def test_counts_go_on_and_failures_are_series_of_their_own(finals: Finals) -> None:
    assert finals.view is not None
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "metrics_interval_s": 0.001})
        exporter.open()
        exporter.on_snapshot(finals.view)
        exporter.on_request(finals.requests[0])
        exporter.on_snapshot(changed(finals.view, mono_ns=finals.view.mono_ns + 10**9))
        exporter.on_request(replace(finals.requests[1], finish="engine_lost"))
        exporter.on_request(replace(finals.requests[2], joined_late=True))
        exporter.close()
        found = points(sink)["gen_ai.server.request.duration"]
    assert {labels.get("error.type"): point.count for labels, point in found} == {
        None: 1,
        "engine_lost": 1,
    }


def on_a_gpu(view: Snapshot, **gauges: float) -> Snapshot:
    """Return a view of the engine as if it ran on a GPU with these samples."""
    (engine,) = view.engines
    device = changed(engine.devices[0], device="GPU-1b2c", health=DeviceHealth(xids={"xid_79": 2}))
    counters = changed(engine.counters, devices={"GPU-1b2c": DeviceCounters("H200", {}, gauges)})
    return changed(
        view,
        engines=(
            changed(engine, device="H200", devices=(device,), counters=counters, is_alive=True),
        ),
    )


def device_points(*looks: Snapshot) -> dict[str, Any]:
    """Return what arrives of their hardware, by name."""
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "metrics_interval_s": 3600})
        exporter.open()
        for look in looks:
            exporter.on_snapshot(look)
        exporter.close()
        groups = [group for post in sink.metrics for group in post.resource_metrics]
    found = [each for group in groups for each in group.scope_metrics[0].metrics]
    return {each.name: each for each in found if each.name.startswith("hw.")}


def test_what_samplers_state_of_a_device_has_the_conventions_names_and_units(
    finals: Finals,
) -> None:
    assert finals.view is not None
    found = device_points(
        on_a_gpu(
            finals.view,
            **{"busy_share": 0.75, "memory_used_bytes": 60e9, "memory_total_bytes": 80e9},
            **{"power_w": 412.5, "sm_active_share": 0.5},
        )
    )
    assert {(each.name, each.unit, each.WhichOneof("data")) for each in found.values()} == {
        ("hw.gpu.utilization", "1", "gauge"),
        ("hw.gpu.memory.usage", "By", "sum"),
        ("hw.gpu.memory.limit", "By", "sum"),
        ("hw.gpu.memory.utilization", "1", "gauge"),
        ("hw.power", "W", "gauge"),
        ("hw.errors", "{error}", "sum"),
    }
    values: dict[str, float] = {}
    for name, metric in found.items():
        assert metric.description
        (point,) = getattr(metric, metric.WhichOneof("data")).data_points
        labels = attributes(point.attributes)
        assert (labels["hw.id"], labels["hw.name"]) == ("GPU-1b2c", "H200")
        assert (labels.get("hw.type") == "gpu") is (not name.startswith("hw.gpu."))
        assert 0 < point.start_time_unix_nano <= point.time_unix_nano
        values[name] = getattr(point, point.WhichOneof("value"))
    assert values == {
        "hw.gpu.utilization": 0.75,
        "hw.gpu.memory.usage": 60_000_000_000,
        "hw.gpu.memory.limit": 80_000_000_000,
        "hw.gpu.memory.utilization": 0.75,
        "hw.power": 412.5,
        "hw.errors": 2,
    }
    (error,) = found["hw.errors"].sum.data_points
    assert attributes(error.attributes)["error.type"] == "xid_79"
    for name, is_monotonic in (("hw.errors", True), ("hw.gpu.memory.usage", False)):
        assert found[name].sum.is_monotonic is is_monotonic
        assert found[name].sum.aggregation_temporality == 2  # cumulative


def test_uncounted_or_exited_devices_have_no_points(
    finals: Finals,
) -> None:
    assert finals.view is not None
    assert device_points(finals.view) == {}
    look = on_a_gpu(finals.view, power_w=400.0)
    (engine,) = look.engines
    gone = changed(engine, is_alive=False)
    assert device_points(changed(look, engines=(gone,))) == {}


def test_each_of_several_devices_has_points_of_its_own(finals: Finals) -> None:
    assert finals.view is not None
    look = on_a_gpu(finals.view, power_w=400.0)
    (engine,) = look.engines
    other = DeviceCounters("H100", {}, {"power_w": 250.0, "busy_share": 0.5})
    counters = changed(engine.counters, devices={**engine.counters.devices, "GPU-2": other})
    # Two ranks are on the first device, which had its errors once.
    ranks = ("GPU-1b2c#0", "GPU-1b2c#1", "GPU-2")
    health = (engine.devices[0].health, engine.devices[0].health, DeviceHealth(xids={"nvlink": 1}))
    devices = tuple(
        changed(engine.devices[0], device=name, health=each)
        for name, each in zip(ranks, health, strict=True)
    )
    found = device_points(
        changed(look, engines=(changed(engine, counters=counters, devices=devices),))
    )

    def by_device(name: str) -> dict[tuple[str, str], float]:
        metric = found[name]
        values = {}
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            labels = attributes(point.attributes)
            values[labels["hw.id"], labels["hw.name"]] = getattr(point, point.WhichOneof("value"))
        return values

    assert by_device("hw.power") == {("GPU-1b2c", "H200"): 400.0, ("GPU-2", "H100"): 250.0}
    assert by_device("hw.gpu.utilization") == {("GPU-2", "H100"): 0.5}
    assert by_device("hw.errors") == {("GPU-1b2c", "H200"): 2, ("GPU-2", "H100"): 1}
    assert len(found["hw.errors"].sum.data_points) == 2


def test_all_of_many_engines_are_reported(finals: Finals) -> None:
    assert finals.view is not None
    (view,) = finals.view.engines
    names = {f"engine-{number}" for number in range(150)}
    engines = tuple(changed(view, engine_id=name) for name in names)
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "metrics_interval_s": 3600})
        exporter.open()
        exporter.on_snapshot(changed(finals.view, engines=engines))
        for name in names:
            exporter.on_request(replace(finals.requests[0], engine_id=name))
        exporter.close()
        instances = {
            attributes(group.resource.attributes)["service.instance.id"]
            for post in sink.metrics
            for group in post.resource_metrics
        }
    assert instances == names


def test_no_metrics_are_sent_unless_wanted(finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        finals.export_to(exporter)
        exporter.close()
        assert exporter.num_sent == len(finals.requests)
        assert not sink.metrics


def test_where_they_go_follows_from_where_traces_go() -> None:
    from inferscope_otlp.settings import read_settings

    def url(**section: object) -> str:
        return read_settings(section).metrics_url

    assert url(endpoint="https://h:1/v1/traces?k=v") == "https://h:1/v1/metrics?k=v"
    assert url(endpoint="http://h/otlp/v1/traces") == "http://h/otlp/v1/metrics"
    assert url(metrics_endpoint="http://other/m") == "http://other/m"
