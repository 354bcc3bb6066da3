"""Dashboard 4: use, saturation and errors of each device."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import GPUS, PHASES, SCHEDULER, DashboardRow, dashboard, of_label
from dashboards.generate.panels import PanelLink, PanelQuery, bad_above, graph, table_panel
from dashboards.generate.queries import ENGINE, growth, now, rate

_GPU = 'gpu=~"($gpu)(#[0-9]+)?"'
"""Matcher of devices.

A device with several ranks has its counters once, and its time once per rank.
"""
_DEVICE = "instance, gpu"
"""Labels that identify devices: devices that are not GPUs have equal names on every host."""
_LEGEND = "{{instance}} {{gpu}}"
_SECONDS = "inferscope_gpu_phase_seconds_total"
_BUSY = "inferscope_gpu_busy_seconds_total"
_PHASES = PanelLink("Phases", PHASES)


def gpus() -> model.Dashboard:
    """Return the dashboard."""
    gpu = of_label(
        "gpu", "Device", 'inferscope_gpu_phase_seconds_total{job=~"$job"}', "Devices by uuid."
    ).regex("/^([^#]+)/")
    return dashboard(
        GPUS,
        "InferScope 4: Devices",
        "How busy is each device, which resource limits it, which errors does it have?",
        [
            DashboardRow("Use", [*_use()]),
            DashboardRow("Saturation", [*_saturation()]),
            DashboardRow("Errors", [*_errors()]),
            DashboardRow(
                "Engines by device",
                [
                    table_panel(
                        "Devices",
                        "Engines on each device, and their share of its time.",
                        {
                            "busy": (
                                _share("prefill|decode", f"{_DEVICE}, engine_id, model_name"),
                                "percentunit",
                            ),
                            "foreign": (
                                _share("foreign", f"{_DEVICE}, engine_id, model_name"),
                                "percentunit",
                            ),
                        },
                    )
                ],
            ),
        ],
        variables=[gpu],
    )


def _share(phases: str, by: str = _DEVICE) -> str:
    """Return the share of a device's time spent in these phases; engines may share the device."""
    part = rate(_SECONDS, _GPU, f'phase=~"{phases}"', by=by)
    whole = f"max by ({_DEVICE}) ({rate(_SECONDS, _GPU, by=f'{_DEVICE}, engine_id')})"
    return f"{part} / on ({_DEVICE}) group_left () {whole}"


def _use() -> list[timeseries.Panel]:
    return [
        graph(
            "Time in steps",
            "Share of a device's time spent on requests.",
            "percentunit",
            PanelQuery(_share("prefill|decode|padding|unattributed"), _LEGEND),
            width=8,
            most=1,
            links=[_PHASES],
        ),
        graph(
            "SMs active",
            "Share of SMs with a resident warp, whole device, all processes. "
            "By counters: absent without a sampler.",
            "percentunit",
            PanelQuery(now("inferscope_gpu_sm_active_ratio", _GPU, by=_DEVICE, how="max"), _LEGEND),
            width=8,
            most=1,
            links=[_PHASES],
        ),
        graph(
            "Memory traffic",
            "Device memory rate over its peak, all processes. "
            "By counters: absent without a sampler.",
            "percentunit",
            PanelQuery(
                now("inferscope_gpu_dram_active_ratio", _GPU, by=_DEVICE, how="max"), _LEGEND
            ),
            width=8,
            most=1,
            links=[_PHASES],
        ),
        graph(
            "Kernels running within steps",
            "Share of the steps' time in which any kernel ran; the rest is gaps between launches. "
            "By counters: absent where the engine's busy time is not sampled.",
            "percentunit",
            PanelQuery(
                f"{rate(_BUSY, _GPU, by=ENGINE)} / {rate(_SECONDS, _GPU, _WORKED, by=ENGINE)}",
                "{{engine_id}}",
            ),
            width=8,
            most=1,
        ),
        graph(
            "Power",
            "Energy a second. By counters: absent without a sampler.",
            "watt",
            PanelQuery(rate("inferscope_energy_joules_total", _GPU, by=_DEVICE), _LEGEND),
            width=8,
        ),
        graph(
            "Used by other processes",
            "Share of a device's time in which unobserved processes used it. "
            "Absent without a source.",
            "percentunit",
            PanelQuery(_share("foreign"), _LEGEND),
            width=8,
            most=1,
        ),
    ]


_WORKED = 'phase=~"prefill|decode"'


def _saturation() -> list[timeseries.Panel]:
    return [
        graph(
            "Device memory in use",
            "All processes. By counters: absent without a sampler.",
            "bytes",
            PanelQuery(
                now("inferscope_gpu_memory_used_bytes", _GPU, by=_DEVICE, how="max"), _LEGEND
            ),
            width=8,
        ),
        graph(
            "KV blocks in use",
            "Share of the engine's blocks; at 100 % requests wait or are preempted.",
            "percentunit",
            PanelQuery(
                now("inferscope_kv_cache_usage_ratio", by="engine_id", how="max"), "{{engine_id}}"
            ),
            width=8,
            most=1,
            limits=bad_above(0.9, 0.97),
            links=[PanelLink("Scheduler of this engine", SCHEDULER, {"engine": "engine_id"})],
        ),
        graph(
            "Waiting for the host",
            "Share of a device's time idle with work pending: Python, scheduling, transfers.",
            "percentunit",
            PanelQuery(_share("idle_host_gap"), _LEGEND),
            width=8,
            most=1,
        ),
    ]


def _errors() -> list[timeseries.Panel]:
    return [
        graph(
            "Throttled",
            "Share of the time in which a device's clocks were throttled, by reason. "
            "Absent without NVML.",
            "percentunit",
            PanelQuery(
                rate("inferscope_throttle_seconds_total", _GPU, by=f"{_DEVICE}, reason"),
                f"{_LEGEND} {{{{reason}}}}",
            ),
            most=1,
        ),
        graph(
            "Xid errors",
            "Errors reported by the driver, by number, within $__rate_interval. "
            "Absent without NVML.",
            "short",
            PanelQuery(
                growth(
                    "inferscope_xid_errors_total",
                    _GPU,
                    by=f"{_DEVICE}, reason",
                    over="$__rate_interval",
                ),
                f"{_LEGEND} {{{{reason}}}}",
            ),
        ),
    ]
