"""Dashboard 3: device time by phase, utilization, and interference between phases."""

from __future__ import annotations

from functools import partial

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import GPUS, PHASES, SCHEDULER, SLOW, DashboardRow, dashboard
from dashboards.generate.panels import PanelLink, PanelQuery, graph
from dashboards.generate.queries import ENGINE, WHOLE_ENGINE, now, quantile, rate

_SECONDS = "inferscope_gpu_phase_seconds_total"
_BYTES = "inferscope_gpu_hbm_bytes_total"
_WORKED = 'phase=~"prefill|decode"'
_PEAK_FLOPS = "inferscope_gpu_peak_flops_per_second"
_GPUS = PanelLink("Devices", GPUS)


def phases() -> model.Dashboard:
    """Return the dashboard."""
    return dashboard(
        PHASES,
        "InferScope 3: Phases",
        "What do the devices compute, how efficiently, and which phases interfere?",
        [
            DashboardRow("Device time", [*_time()]),
            DashboardRow("Utilization", [*_use()]),
            DashboardRow("Interference", [*_interference()]),
            DashboardRow("Waste and energy", [*_waste()]),
        ],
    )


def _time() -> list[timeseries.Panel]:
    shares = f"{rate(_SECONDS, by='phase')} / on () group_left () {rate(_SECONDS)}"
    return [
        graph(
            "Device seconds a second, by phase",
            "Wall time of devices by phase; the stack is as high as the number of devices. "
            "`idle_host_gap`: a device waited for the host with work pending.",
            "short",
            PanelQuery(rate(_SECONDS, by="phase"), "{{phase}}"),
            stacked=True,
            links=[_GPUS],
        ),
        graph(
            "Share of device time, by phase",
            "The same, as shares of all devices' time.",
            "percentunit",
            PanelQuery(shares, "{{phase}}"),
            stacked=True,
            most=1,
            links=[_GPUS],
        ),
    ]


def _use() -> list[timeseries.Panel]:
    by = "phase, model_name"
    active, flops = "inferscope_gpu_sm_active_seconds_total", "inferscope_flops_total"
    peak = now("inferscope_gpu_hbm_peak_bytes_per_second", by=ENGINE, how="max")
    could = (
        f"sum by ({by}) ({rate(_SECONDS, by=f'{by}, {ENGINE}', where=_BYTES)}"
        f" * on ({ENGINE}) group_left () {peak})"
    )
    # The core's host reports the FLOPs of all ranks, and each host the seconds of its own.
    computed_s = partial(rate, _SECONDS, _WORKED, where=flops, of=WHOLE_ENGINE)
    computed = (
        f"sum by ({by}) ({computed_s(by=f'{by}, {WHOLE_ENGINE}')}"
        f" * on ({WHOLE_ENGINE}) group_left () {now(_PEAK_FLOPS, by=WHOLE_ENGINE, how='max')})"
    )
    moved = rate(_BYTES, by="phase, direction")
    return [
        graph(
            "SMs active while in a phase",
            "SM time over the phase's device time, on devices where SMs are counted. "
            "By counters: absent without a sampler.",
            "percentunit",
            PanelQuery(
                f"{rate(active, by=by)} / {rate(_SECONDS, by=by, where=active)}",
                "{{phase}} {{model_name}}",
            ),
            most=1,
            links=[_GPUS],
        ),
        graph(
            "Memory traffic while in a phase",
            "Bytes between memory and device per second of the phase's time on one device. "
            "By counters: absent without a sampler.",
            "Bps",
            PanelQuery(
                f"{moved} / on (phase) group_left () {rate(_SECONDS, by='phase', where=_BYTES)}",
                "{{phase}} {{direction}}",
            ),
            links=[_GPUS],
        ),
        graph(
            "Share of the memory roofline",
            "Bytes moved in a phase over the memory's peak in that time: "
            "decode near 100 % is limited by this memory. "
            "By counters: absent without a sampler.",
            "percentunit",
            PanelQuery(f"{rate(_BYTES, by=by)} / {could}", "{{phase}} {{model_name}}"),
            width=8,
            most=1,
            links=[_GPUS],
        ),
        graph(
            "Operations while in a phase",
            "Modelled: floating-point operations of ended requests, from the model's shape, per "
            "second of the phase's device time.",
            "flops",
            PanelQuery(
                f"{rate(flops, by=by)} / {computed_s(by=by)}",
                "{{phase}} {{model_name}} (modelled)",
            ),
            width=8,
        ),
        graph(
            "Share of the compute roofline",
            "Modelled operations in a phase over the devices' peak in "
            "that time, by vendor or calibration: prefill near 100 % is limited by "
            "these devices. Absent without a known peak.",
            "percentunit",
            PanelQuery(f"{rate(flops, by=by)} / {computed}", "{{phase}} {{model_name}} (modelled)"),
            width=8,
            most=1,
            links=[_GPUS],
        ),
    ]


def _interference() -> list[timeseries.Panel]:
    causes = 'cause=~".*(interference|co_batched)"'
    everything = rate("inferscope_latency_seconds_total")
    lost = rate("inferscope_latency_seconds_total", causes, by="cause")
    steps, shares = "inferscope_step_duration_seconds", "inferscope_request_gpu_seconds"
    return [
        graph(
            "Time lost to other requests",
            "Share of all requests' time by which other requests lengthened steps. `interference`: "
            "by the other phase, such as a decode in a step with a prefill; `co_batched`: by the "
            "same phase, the cost of batching.",
            "percentunit",
            PanelQuery(f"{lost} / on () group_left () {everything}", "{{cause}}"),
            width=8,
            stacked=True,
            links=[PanelLink("Slow requests", SLOW), PanelLink("Scheduler and KV", SCHEDULER)],
        ),
        graph(
            "Steps",
            "Duration of the engine's steps, by the phases in them.",
            "s",
            PanelQuery(quantile(0.99, steps, by="phase"), "{{phase}} p99"),
            PanelQuery(quantile(0.5, steps, by="phase"), "{{phase}} p50"),
            width=8,
        ),
        graph(
            "Device time of a request",
            "A request's fair share of its steps.",
            "s",
            PanelQuery(quantile(0.99, shares, by="phase"), "{{phase}} p99"),
            PanelQuery(quantile(0.5, shares, by="phase"), "{{phase}} p50"),
            width=8,
            links=[PanelLink("Slow requests", SLOW)],
        ),
    ]


def _waste() -> list[timeseries.Panel]:
    waste = rate("inferscope_wasted_gpu_seconds_total", by="reason")
    energy = "inferscope_energy_joules_total"
    tokens = rate("inferscope_tokens_total", 'source="computed"', by="phase", where=energy)
    return [
        graph(
            "Wasted device time",
            "Share of all device time whose result was not used; reasons do not overlap.",
            "percentunit",
            PanelQuery(f"{waste} / on () group_left () {rate(_SECONDS)}", "{{reason}}"),
            width=8,
            stacked=True,
        ),
        graph(
            "Power, by phase",
            "Apportioned by regression: energy of a phase per second. Absent without a sampler.",
            "watt",
            PanelQuery(rate(energy, by="phase"), "{{phase}} (apportioned)"),
            width=8,
            links=[_GPUS],
        ),
        graph(
            "Energy per token",
            "Apportioned energy of a phase over the tokens computed in it. Absent without a "
            "sampler.",
            "joule",
            PanelQuery(
                f"{rate(energy, _WORKED, by='phase')} / {tokens}", "{{phase}} (apportioned)"
            ),
            width=8,
        ),
    ]
