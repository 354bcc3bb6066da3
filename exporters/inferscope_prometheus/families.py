"""Prometheus families of engine samples: the values of METRICS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from inferscope.fold import EngineView
from inferscope_prometheus import names
from inferscope_prometheus.engine_counters import ReplicaCounters
from inferscope_prometheus.metric import family_if_rows, family_of, histogram_of
from inferscope_prometheus.metric_table import OF_ALL, REQUEST_HISTOGRAMS
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
    yield family_of(
        "folded_timestamp_seconds",
        ((sample.whole, (sample.view.folded_ns + sample.offset_ns) / 1e9) for sample in samples),
    )
    yield from _histograms(samples)
    replicas = [
        (sample.labels(rank), c) for sample in samples for rank, c in sample.by_replica.items()
    ]
    yield from _counters(replicas)
    yield from _ranks(samples)
    yield from _experts(samples)
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
    for name in REQUEST_HISTOGRAMS:
        family = histogram_of(name)
        for labels, counts, offset_ns in replicas:
            family.add(labels, counts.histograms[name], offset_ns)
        yield family
    steps, shares = histogram_of("step_duration_seconds"), histogram_of("request_gpu_seconds")
    for labels, counts, offset_ns in replicas:
        for phase, histogram in counts.step_ns.items():
            steps.add((*labels, phase), histogram, offset_ns)
        for phase, histogram in counts.gpu_ns.items():
            shares.add((*labels, phase), histogram, offset_ns)
    yield steps
    yield shares


def _counters(replicas: list[tuple[tuple[str, ...], ReplicaCounters]]) -> Iterator[Metric]:
    yield family_of(
        "requests_total",
        (((*at, how), num) for at, c in replicas for how, num in c.finishes.items()),
    )
    yield family_of(
        "latency_seconds_total",
        (((*at, why), ns / 1e9) for at, c in replicas for why, ns in c.cause_ns.items()),
    )
    yield family_of(
        "wasted_gpu_seconds_total",
        (((*at, why), ns / 1e9) for at, c in replicas for why, ns in c.waste_ns.items()),
    )
    yield family_of(
        "tokens_total",
        (((*at, *which), num) for at, c in replicas for which, num in c.tokens.items()),
    )
    yield from family_if_rows(
        "prompt_tokens_total",
        (
            ((*at, cache), num)
            for at, c in replicas
            if any(c.cache_tokens.values())
            for cache, num in c.cache_tokens.items()
        ),
    )
    yield from family_if_rows(
        "cache_miss_gpu_seconds_total",
        (
            ((*at, cause), ns / 1e9)
            for at, c in replicas
            if any(c.cache_tokens.values())
            for cause, ns in c.cache_miss_ns.items()
        ),
    )
    yield family_of(
        "spec_tokens_total",
        (((*at, result), num) for at, c in replicas for result, num in c.spec_tokens.items()),
    )


def _ranks(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the admissions, and the times of ranks that compute together, on any host."""
    yield from family_if_rows(
        "admissions_total",
        (
            (sample.whole, sample.view.num_admissions)
            for sample in samples
            if sample.view.num_admissions is not None
        ),
    )
    yield from family_if_rows(
        "rank_step_seconds_total",
        (
            ((*sample.labels(dp_rank), str(rank)), ns / 1e9)
            for sample in samples
            for dp_rank, counts in sample.by_replica.items()
            if len(counts.rank_ns) > 1 or sample.view.deployment.team_ranks > 1
            for rank, ns in sorted(counts.rank_ns.items())
        ),
    )
    yield from family_if_rows(
        "rank_overdue_seconds",
        (
            ((*sample.labels(each.dp_rank), str(each.rank)), each.overdue_ns / 1e9)
            for sample in samples
            if sample.view.is_alive
            for each in sample.view.ranks
        ),
    )


def _experts(samples: list[EngineSample]) -> Iterator[Metric]:
    known = [(sample.whole, each) for sample in samples if (each := sample.view.experts)]
    rows = [((*at, "mean"), each.mean_tokens) for at, each in known]
    rows += [((*at, "busiest"), each.busiest_tokens) for at, each in known]
    yield from family_if_rows("expert_load_tokens_total", rows)


def _devices(samples: list[EngineSample]) -> Iterator[Metric]:
    yield from family_if_rows(
        "gpu_phase_seconds_total",
        (
            ((*sample.whole, device.device, phase), ns / 1e9)
            for sample in samples
            for device in sample.view.devices
            for phase, ns in device.seconds_by_ns.items()
        ),
    )
    yield from family_if_rows(
        "flops_total",
        (
            ((*sample.labels(rank), sample.device, phase), flops)
            for sample in samples
            if sample.view.is_counted
            for rank, counts in sample.by_replica.items()
            for phase, flops in counts.flops.items()
        ),
    )
    yield from family_if_rows(
        "gpu_peak_flops_per_second",
        (
            ((*sample.whole, name, source), flops_s)
            for sample in samples
            if sample.view.is_alive
            for name in {device.device.partition("#")[0]: None for device in sample.view.devices}
            for source, flops_s in sample.view.counters.compute_peaks_flops_s.items()
        ),
    )
    yield from family_if_rows(
        "attribution_residual_ratio",
        (
            ((*sample.whole, sample.device), sample.residual)
            for sample in samples
            if sample.residual is not None
        ),
    )
    yield from family_if_rows(
        "cost_model_residual_ratio",
        (
            ((*sample.whole, model.mode, model.source), model.residual)
            for sample in samples
            for model in sample.view.cost_models
            if model.residual is not None
        ),
    )


def _counted(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the families of sampled counters; absent sources have none."""
    by_device = [
        ((*sample.whole, name), device, sample.view.is_alive)
        for sample in samples
        for name, device in sample.view.counters.devices.items()
    ]
    for counted, metric, scale in (
        ("sm_active_ns", "gpu_sm_active_seconds_total", 1e9),
        ("gpu_busy_ns", "gpu_busy_seconds_total", 1e9),
        ("energy_uj", "energy_joules_total", 1e6),
    ):
        yield from family_if_rows(
            metric,
            (
                ((*at, phase), number / scale)
                for at, device, _ in by_device
                for phase, number in device.totals.get(counted, {}).items()
            ),
        )
    yield from family_if_rows(
        "gpu_hbm_bytes_total",
        (
            ((*at, phase, direction), number)
            for at, device, _ in by_device
            for direction in ("read", "write")
            for phase, number in device.totals.get(f"hbm_{direction}_bytes", {}).items()
        ),
    )
    yield from family_if_rows(
        "apportioned_error_ratio",
        (
            ((*sample.whole, names.FITTED[counted]), error)
            for sample in samples
            for counted, error in sample.view.counters.errors.items()
            if error is not None
        ),
    )
    for word, metric in (
        ("sm_active_share", "gpu_sm_active_ratio"),
        ("dram_share", "gpu_dram_active_ratio"),
        ("memory_used_bytes", "gpu_memory_used_bytes"),
        ("dram_peak_bytes_per_s", "gpu_hbm_peak_bytes_per_second"),
    ):
        yield from family_if_rows(
            metric,
            (
                (at, device.gauges[word])
                for at, device, is_alive in by_device
                if is_alive and word in device.gauges
            ),
        )


def _device_health(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the causes of reduced clocks, as reported by drivers; each exists from the start."""
    by_device = [
        ((*sample.whole, device.device), device.health)
        for sample in samples
        for device in sample.view.devices
        if device.health is not None
    ]
    yield from family_if_rows(
        "throttle_seconds_total",
        (
            ((*at, reason), ns / 1e9)
            for at, health in by_device
            for reason, ns in (health.throttle_ns or {}).items()
        ),
    )
    yield from family_if_rows(
        "xid_errors_total",
        (
            ((*at, reason), num)
            for at, health in by_device
            if health.xids is not None
            for reason, num in (dict.fromkeys(names.XIDS, 0) | health.xids).items()
        ),
    )


def _gauges(samples: list[EngineSample]) -> Iterator[Metric]:
    """Return the gauges of engines that are alive."""
    alive = [(sample.whole, sample.view) for sample in samples if sample.view.is_alive]
    yield family_of("requests_running", ((at, view.num_running) for at, view in alive))
    yield family_of(
        "requests_waiting", ((at, view.num_waiting + view.num_held) for at, view in alive)
    )
    yield family_of("engine_paused", ((at, view.is_paused) for at, view in alive))
    yield from family_if_rows(
        "kv_cache_usage_ratio",
        ((at, view.blocks_used / view.blocks_total) for at, view in alive if view.blocks_total),
    )
    yield from family_if_rows(
        "cache_hit_ratio_at_size",
        (
            ((*at, f"{point.size:g}"), point.hit_share)
            for at, view in alive
            if view.cache is not None and view.cache.curve is not None
            for point in view.cache.curve.points
            if point.hit_share is not None
        ),
    )
    yield from family_if_rows(
        "overhead_ratio",
        (
            (at, view.health.probe_share)
            for at, view in alive
            if view.health.probe_share is not None
        ),
    )
    yield family_of("engine_info", ((_info(sample), 1) for sample in samples))


def _info(sample: EngineSample) -> tuple[str, ...]:
    view, how = sample.view, sample.view.deployment
    sizes = (how.tensor_ranks, how.pipeline_ranks, how.data_ranks, how.expert_ranks)
    what = (view.version, how.revision, how.quantization)
    origin = "true" if view.is_synthetic else "false"
    return (*sample.whole, *what, *map(str, sizes), sample.device, how.options_hash, origin)


def _health(
    samples: list[EngineSample], dropped: Mapping[str, Mapping[str, int]]
) -> Iterator[Metric]:
    rows: list[tuple[tuple[str, ...], float]] = []
    for sample in samples:
        view = sample.view
        is_up = {
            "probe": view.is_alive and view.health.probe_state == "on",
            "device_clock": view.is_alive and view.clock == "device",
            **dict.fromkeys(view.counters.up, view.is_alive),
        }
        rows += [((*sample.whole, each), is_up.get(each, False)) for each in names.SOURCES]
    yield family_of("source_up", rows)
    yield from family_if_rows(
        "attribution_coverage_ratio",
        (
            ((*sample.whole, sample.device), sample.coverage)
            for sample in samples
            if sample.coverage is not None
        ),
    )
    rows = []
    for sample in samples:
        health = sample.view.health
        late = sum(counts.num_joined_late for counts in sample.by_replica.values())
        drops = (health.num_lost, health.num_unknown, health.num_unjoined, late, health.num_refused)
        rows += [
            ((*sample.whole, *which), num) for which, num in zip(names.DROPS, drops, strict=True)
        ]
    rows += [
        ((*OF_ALL, exporter, reason), num)
        for exporter, reasons in dropped.items()
        for reason, num in reasons.items()
    ]
    yield family_of("records_dropped_total", rows)
