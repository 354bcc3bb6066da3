"""Prometheus families of engine samples; the only module that uses the client library's types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric

from inferscope.fold import EngineView
from inferscope_prometheus import names
from inferscope_prometheus.engine_counters import ReplicaCounters
from inferscope_prometheus.metric import counter as _counter
from inferscope_prometheus.metric import gauge as _gauge
from inferscope_prometheus.page import HistogramFamily
from inferscope_prometheus.use_families import adapters, demand, tenants


@dataclass(frozen=True)
class EngineSample:
    """One engine at one time; immutable."""

    view: EngineView
    by_replica: Mapping[int, ReplicaCounters]
    residual: float | None
    offset_ns: int = 0
    """Wall clock minus monotonic clock."""
    lag_ns: int = 0
    """Lag of the view when it was taken."""
    model: str = names.OTHER_MODEL
    device_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Device time by tenant label and phase."""
    tenant_tokens: Mapping[tuple[str, str], int] = field(default_factory=dict)
    adapter_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Device time by LoRA adapter and phase."""
    adapter_tokens: Mapping[tuple[str, str], int] = field(default_factory=dict)
    dollars: Mapping[tuple[str, str], float] | None = None
    """Cost in dollars; None without a price."""
    coverage: float | None = None
    """Observed share of the requests that the engine reports as finished."""

    def labels(self, dp_rank: int | str) -> tuple[str, ...]:
        """Return the values of LABELS."""
        view = self.view
        return (self.model, view.engine, view.engine_id, str(dp_rank), view.deployment.role)

    @property
    def whole(self) -> tuple[str, ...]:
        """Return the values of LABELS for all replicas together."""
        return self.labels("all" if self.view.deployment.data_ranks > 1 else 0)

    @property
    def device(self) -> str:
        """Return the engine's device; `all` for a value over several devices."""
        devices = self.view.devices
        if len(devices) > 1:
            return "all"
        return devices[0].device if devices else self.view.device or "unknown"


def families(
    samples: Iterable[EngineSample],
    *,
    dropped: Mapping[str, Mapping[str, int]] | None = None,
    age_ns: int = 0,
) -> Iterator[Metric]:
    """Return all families of the engines.

    Args:
        samples: one sample per engine.
        dropped: items dropped by other exporters, by exporter and reason.
        age_ns: age of the samples.
    """
    samples = list(samples)
    yield _gauge(
        "inferscope_folded_timestamp_seconds",
        "Wall time through which the engine's records are folded.",
        (),
        ((sample.whole, (sample.view.folded_ns + sample.offset_ns) / 1e9) for sample in samples),
    )
    yield from _histograms(samples)
    replicas = [
        (sample.labels(rank), c) for sample in samples for rank, c in sample.by_replica.items()
    ]
    yield from _counters(replicas)
    yield from _admissions(samples)
    yield from _ranks(samples)
    yield from _overdue(samples)
    yield from tenants(
        [
            (sample.whole, sample.device_ns, sample.tenant_tokens, sample.dollars)
            for sample in samples
        ]
    )
    yield from adapters(
        [(sample.whole, sample.adapter_ns, sample.adapter_tokens) for sample in samples]
    )
    yield from _devices(samples)
    yield from _counted(samples)
    yield from _device_health(samples)
    yield from _gauges(samples)
    yield from demand((sample.whole, sample.view, sample.lag_ns + age_ns) for sample in samples)
    yield from _health(samples, dropped or {})


def _histograms(samples: list[EngineSample]) -> Iterator[Metric]:
    replicas = [
        (sample.labels(rank), counts, sample.offset_ns)
        for sample in samples
        for rank, counts in sample.by_replica.items()
    ]
    for name, (bounds, help_text) in names.HISTOGRAMS.items():
        full = f"inferscope_{name}_seconds"
        family = HistogramFamily(full, help_text, labels=names.LABELS, bounds_s=bounds)
        for labels, counts, offset_ns in replicas:
            family.add(labels, counts.histograms[name], offset_ns)
        yield family
    steps = HistogramFamily(
        "inferscope_step_duration_seconds",
        "Engine steps, by the phases in them.",
        labels=(*names.LABELS, "phase"),
        bounds_s=names.BOUNDS_B,
    )
    shares = HistogramFamily(
        "inferscope_request_gpu_seconds",
        "Device time attributed to a request: its share of its steps.",
        labels=(*names.LABELS, "phase"),
        bounds_s=names.BOUNDS_A,
    )
    for labels, counts, offset_ns in replicas:
        for phase, histogram in counts.step_ns.items():
            steps.add((*labels, phase), histogram, offset_ns)
        for phase, histogram in counts.gpu_ns.items():
            shares.add((*labels, phase), histogram, offset_ns)
    yield steps
    yield shares


def _counters(replicas: list[tuple[tuple[str, ...], ReplicaCounters]]) -> Iterator[Metric]:
    yield _counter(
        "inferscope_requests",
        "Ended requests, by finish reason.",
        ("finish_reason",),
        (((*at, how), num) for at, c in replicas for how, num in c.finishes.items()),
    )
    yield _counter(
        "inferscope_latency_seconds",
        "Time of ended requests by cause; sums to their durations.",
        ("cause",),
        (((*at, why), ns / 1e9) for at, c in replicas for why, ns in c.cause_ns.items()),
    )
    yield _counter(
        "inferscope_wasted_gpu_seconds",
        "Device time whose result was not used.",
        ("reason",),
        (((*at, why), ns / 1e9) for at, c in replicas for why, ns in c.waste_ns.items()),
    )
    yield _counter(
        "inferscope_tokens",
        "Tokens computed, and prompt tokens found in the prefix cache.",
        ("phase", "source"),
        (((*at, *which), num) for at, c in replicas for which, num in c.tokens.items()),
    )
    yield _counter(
        "inferscope_spec_tokens",
        "Draft tokens of ended requests that the model verified.",
        ("result",),
        (((*at, result), num) for at, c in replicas for result, num in c.spec_tokens.items()),
    )


def _admissions(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the admissions of engines whose scheduler is observed."""
    rows = [
        (sample.whole, float(sample.view.num_admissions))
        for sample in samples
        if sample.view.num_admissions is not None
    ]
    if rows:
        yield _counter(
            "inferscope_admissions",
            "Requests admitted from the queue, again after each preemption.",
            (),
            rows,
        )


def _ranks(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the step time of ranks that compute together, if there are several, on any host."""
    rows = [
        ((*sample.labels(dp_rank), str(rank)), ns / 1e9)
        for sample in samples
        for dp_rank, counts in sample.by_replica.items()
        if len(counts.rank_ns) > 1 or sample.view.deployment.team_ranks > 1
        for rank, ns in sorted(counts.rank_ns.items())
    ]
    if rows:
        yield _counter(
            "inferscope_rank_step_seconds",
            "Time in steps as each rank measured it: the others wait for the slowest.",
            ("rank",),
            rows,
        )


def _overdue(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the time for which ranks have waited for an overdue rank."""
    rows = [
        ((*sample.labels(each.dp_rank), str(each.rank)), each.overdue_ns / 1e9)
        for sample in samples
        if sample.view.is_alive
        for each in sample.view.ranks
    ]
    if rows:
        yield _gauge(
            "inferscope_rank_overdue_seconds",
            "Time for which its peers have waited for a rank; 0 if they do not wait.",
            ("rank",),
            rows,
        )


def _devices(samples: list[EngineSample]) -> Iterator[Metric]:
    rows = [
        ((*sample.whole, device.device, phase), ns / 1e9)
        for sample in samples
        for device in sample.view.devices
        for phase, ns in device.seconds_by_ns.items()
    ]
    if rows:
        yield _counter(
            "inferscope_gpu_phase_seconds",
            "Device wall time by use; sums to the wall time.",
            ("gpu", "phase"),
            rows,
        )
    rows = [
        ((*sample.labels(rank), sample.device, phase), flops)
        for sample in samples
        if sample.view.is_counted
        for rank, counts in sample.by_replica.items()
        for phase, flops in counts.flops.items()
    ]
    if rows:
        yield _counter(
            "inferscope_flops",
            "Floating-point operations of ended requests, from the model's shape.",
            ("gpu", "phase"),
            rows,
        )
    rows = [
        ((*sample.whole, name, source), flops_s)
        for sample in samples
        if sample.view.is_alive
        for name in {device.device.partition("#")[0]: None for device in sample.view.devices}
        for source, flops_s in sample.view.counters.compute_peaks_flops_s.items()
    ]
    if rows:
        yield _gauge(
            "inferscope_gpu_peak_flops_per_second",
            "Peak compute rate of a device in the model's dtype: by vendor, by calibration.",
            ("gpu", "source"),
            rows,
        )
    rows = [
        ((*sample.whole, sample.device), sample.residual)
        for sample in samples
        if sample.residual is not None
    ]
    if rows:
        yield _gauge(
            "inferscope_attribution_residual_ratio",
            "Measured over modelled step time, less one.",
            ("gpu",),
            rows,
        )
    rows = [
        ((*sample.whole, model.mode, model.source), model.residual)
        for sample in samples
        for model in sample.view.cost_models
        if model.residual is not None
    ]
    if rows:
        yield _gauge(
            "inferscope_cost_model_residual_ratio",
            "Median of measured over modelled time of a mode's recent steps, less one.",
            ("mode", "source"),
            rows,
        )


def _counted(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the families of sampled counters; absent sources have none."""
    by_device = [
        ((*sample.whole, name), device)
        for sample in samples
        for name, device in sample.view.counters.devices.items()
    ]
    for counted, name, scale, help_text in (
        ("sm_active_ns", "gpu_sm_active_seconds", 1e9, "Time with SMs active, mean over SMs."),
        ("gpu_busy_ns", "gpu_busy_seconds", 1e9, "Time of steps with any kernel running."),
        ("energy_uj", "energy_joules", 1e6, "Energy; apportioned by regression, idle time aside."),
    ):
        rows = [
            ((*at, phase), number / scale)
            for at, device in by_device
            for phase, number in device.totals.get(counted, {}).items()
        ]
        if rows:
            yield _counter(f"inferscope_{name}", help_text, ("gpu", "phase"), rows)
    rows = [
        ((*at, phase, direction), float(number))
        for at, device in by_device
        for direction in ("read", "write")
        for phase, number in device.totals.get(f"hbm_{direction}_bytes", {}).items()
    ]
    if rows:
        yield _counter(
            "inferscope_gpu_hbm_bytes",
            "Bytes moved between memory and device, as counted.",
            ("gpu", "phase", "direction"),
            rows,
        )
    rows = [
        ((*sample.whole, names.FITTED[counted]), error)
        for sample in samples
        for counted, error in sample.view.counters.errors.items()
        if error is not None
    ]
    if rows:
        yield _gauge(
            "inferscope_apportioned_error_ratio",
            "Relative error of the regression that apportions a counter to phases.",
            ("counted",),
            rows,
        )
    for word, name, help_text in (
        (
            "sm_active_share",
            "gpu_sm_active_ratio",
            "Share of SMs with a resident warp, latest sample.",
        ),
        ("dram_share", "gpu_dram_active_ratio", "Device memory rate over its peak, latest sample."),
        ("memory_used_bytes", "gpu_memory_used_bytes", "Device memory in use, by all processes."),
        ("dram_peak_bytes_per_s", "gpu_hbm_peak_bytes_per_second", "Device memory's peak rate."),
    ):
        rows = [
            ((*sample.whole, name), device.gauges[word])
            for sample in samples
            if sample.view.is_alive
            for name, device in sample.view.counters.devices.items()
            if word in device.gauges
        ]
        if rows:
            yield _gauge(f"inferscope_{name}", help_text, ("gpu",), rows)


def _device_health(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the causes of reduced clocks, as reported by drivers; each exists from the start."""
    by_device = [
        ((*sample.whole, device.device), device.health)
        for sample in samples
        for device in sample.view.devices
        if device.health is not None
    ]
    rows = [
        ((*at, reason), ns / 1e9)
        for at, health in by_device
        for reason, ns in (health.throttle_ns or {}).items()
    ]
    if rows:
        yield _counter(
            "inferscope_throttle_seconds",
            "Time that a device's clocks were held down for a reason; reasons overlap.",
            ("gpu", "reason"),
            rows,
        )
    rows = [
        ((*at, reason), float(num))
        for at, health in by_device
        if health.xids is not None
        for reason, num in (dict.fromkeys(names.XIDS, 0) | health.xids).items()
    ]
    if rows:
        yield _counter(
            "inferscope_xid_errors",
            "Device errors reported by the driver.",
            ("gpu", "reason"),
            rows,
        )


def _gauges(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the gauges of engines that are alive."""
    alive = [(sample.whole, sample.view) for sample in samples if sample.view.is_alive]
    yield _gauge(
        "inferscope_requests_running",
        "Requests admitted.",
        (),
        ((at, view.num_running) for at, view in alive),
    )
    yield _gauge(
        "inferscope_requests_waiting",
        "Requests in the queue, preempted ones included.",
        (),
        ((at, view.num_waiting + view.num_held) for at, view in alive),
    )
    yield _gauge(
        "inferscope_engine_paused",
        "Whether the engine is paused: requests wait, and no step is due.",
        (),
        ((at, float(view.is_paused)) for at, view in alive),
    )
    kv = [(at, view.blocks_used / view.blocks_total) for at, view in alive if view.blocks_total]
    if kv:
        yield _gauge("inferscope_kv_cache_usage_ratio", "KV blocks in use.", (), kv)
    cost = [(at, v.health.probe_share) for at, v in alive if v.health.probe_share is not None]
    if cost:
        yield _gauge("inferscope_overhead_ratio", "Time inside the probe over wall time.", (), cost)
    info = GaugeMetricFamily(
        "inferscope_engine_info",
        "Start-up configuration of an engine.",
        labels=(
            *names.LABELS,
            *("engine_version", "model_revision", "quantization"),
            *("tp", "pp", "dp", "ep", "gpu", "config_hash", "synthetic"),
        ),
    )
    for sample in samples:
        view, how = sample.view, sample.view.deployment
        sizes = (how.tensor_ranks, how.pipeline_ranks, how.data_ranks, how.expert_ranks)
        what = (view.version, how.revision, how.quantization)
        origin = "true" if view.is_synthetic else "false"
        by_device = (*map(str, sizes), sample.device, how.options_hash, origin)
        info.add_metric([*sample.whole, *what, *by_device], 1)
    yield info


def _health(
    samples: list[EngineSample], dropped: Mapping[str, Mapping[str, int]]
) -> Iterator[Metric]:
    rows = []
    for sample in samples:
        view = sample.view
        is_up = {
            "probe": view.is_alive and view.health.probe_state == "on",
            "device_clock": view.is_alive and view.clock == "device",
            **dict.fromkeys(view.counters.up, view.is_alive),
        }
        rows += [((*sample.whole, each), float(is_up.get(each, False))) for each in names.SOURCES]
    yield _gauge("inferscope_source_up", "Whether a data source is available.", ("source",), rows)
    rows = [
        ((*sample.whole, sample.device), sample.coverage)
        for sample in samples
        if sample.coverage is not None
    ]
    if rows:
        yield _gauge(
            "inferscope_attribution_coverage_ratio",
            "Observed finished requests over those that the engine reports.",
            ("gpu",),
            rows,
        )
    rows = []
    for sample in samples:
        health = sample.view.health
        late = sum(counts.num_joined_late for counts in sample.by_replica.values())
        drops = (health.num_lost, health.num_unknown, health.num_unjoined, late, health.num_refused)
        rows += [
            ((*sample.whole, *which), float(num))
            for which, num in zip(names.DROPS, drops, strict=True)
        ]
    rows += [
        ((*names.OF_ALL, exporter, reason), float(num))
        for exporter, reasons in dropped.items()
        for reason, num in reasons.items()
    ]
    yield _counter(
        "inferscope_records_dropped",
        "Data missing from these metrics, and items dropped by other exporters.",
        ("stage", "reason"),
        rows,
    )
