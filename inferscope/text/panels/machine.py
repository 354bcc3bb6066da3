"""Devices of an engine by its samplers, its configuration, and the health of its probe."""

from __future__ import annotations

from textwrap import wrap

from inferscope.fold import DeviceCounters, EngineView
from inferscope.text.header_line import format_probe
from inferscope.text.labels import more_or_less
from inferscope.text.lines import Line, Role, Span, frame
from inferscope.text.plots import UNKNOWN, bar, count, duration, fit, fit_name, plain, share

_HEAD = 10
_NUMBER = 25


def devices(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the newest counters of each device; `-` where no source reports one."""
    counters, inner = view.counters, width - 4
    sources = ", ".join(counters.up)
    lines: list[Line] = []
    throttled = {
        device.device: device.health.throttled_now
        for device in view.devices
        if device.health is not None
    }
    if not counters.devices:
        lines += _gauges({}, inner)
    per_device = max((height - 3) // max(len(counters.devices), 1), 1)
    for uuid, device in counters.devices.items():
        block = _device_lines(uuid, device, throttled.get(uuid), inner, is_one=len(lines) == 0)
        lines += block[:per_device]
    if not any(device.gauges for device in counters.devices.values()):
        reason = counters.reason or "no sampler reports this device"
        lines += [((part, "dim"),) for part in wrap(f"{UNKNOWN} {reason}", max(inner, 10))]
    cores, resident = counters.host.get("cpu_cores"), counters.host.get("rss_bytes")
    if cores is not None or resident is not None:
        memory = UNKNOWN if resident is None else f"{resident / 1e9:.2f} GB"
        used = UNKNOWN if cores is None else f"{cores:.1f} cores"
        lines.append(_text("host", f"{used}, {memory} resident"))
    title = "Device" if len(counters.devices) < 2 else f"{len(counters.devices)} devices"
    name = plain(view.device)
    return frame(title, lines, width, height, note=name, foot=f"from {sources}" if sources else "")


def _device_lines(
    uuid: str,
    device: DeviceCounters,
    throttled: tuple[str, ...] | None,
    width: int,
    *,
    is_one: bool,
) -> list[Line]:
    lines: list[Line] = [] if is_one else [((fit_name(plain(uuid), width), "strong"),)]
    lines += _gauges(device.gauges, width)
    # Without a sampler that reads it now, the last known state of the device is old.
    known = throttled if device.gauges else None
    words = UNKNOWN if known is None else ", ".join(known).replace("_", " ") or "none"
    lines.append(_text("throttle", words, "alarm" if known else "body"))
    return lines


def _gauges(gauges: dict[str, float], width: int) -> list[Line]:
    """Return busy time, memory bandwidth, memory, power, temperature and clock."""
    busy, dram = gauges.get("busy_share"), gauges.get("dram_share")
    used, total = gauges.get("memory_used_bytes"), gauges.get("memory_total_bytes")
    power, limit = gauges.get("power_w"), gauges.get("power_limit_w")
    clock, heat = gauges.get("sm_clock_mhz"), gauges.get("temperature_c")
    memory = UNKNOWN
    if used is not None:
        memory = f"{used / 1e9:.1f} of {_or_unknown(total, 1e-9, '.1f')} GB"
    watts = UNKNOWN
    if power is not None:
        watts = f"{power:.0f} of {_or_unknown(limit, 1.0, '.0f')} W"
    return [
        _gauge("busy", share(busy), busy, width),
        _gauge("HBM rate", share(dram), dram, width),
        _gauge("memory", memory, used / total if used is not None and total else None, width),
        _gauge("power", watts, power / limit if power is not None and limit else None, width),
        _text(
            "clock", f"{_or_unknown(clock, 1.0, '.0f')} MHz   {_or_unknown(heat, 1.0, '.0f')} °C"
        ),
    ]


def _or_unknown(value: float | None, factor: float, form: str) -> str:
    return UNKNOWN if value is None else format(value * factor, form)


def _gauge(name: str, text: str, value: float | None, width: int) -> Line:
    head: tuple[Span, Span] = ((fit(name, _HEAD), "dim"), (fit(text, _NUMBER - _HEAD), "body"))
    if value is None or width <= _NUMBER:
        return head
    return (*head, (bar(value, width - _NUMBER), "gauge"))


def _text(name: str, text: str, role: Role = "body") -> Line:
    return ((fit(name, _HEAD), "dim"), (text, role))


def configuration(view: EngineView, width: int, height: int) -> list[Line]:
    """Return what the engine reports about itself."""
    of, inner = view.deployment, width - 4
    ranks = (
        f"TP {of.tensor_ranks}  PP {of.pipeline_ranks}  DP {of.data_ranks}  EP {of.expert_ranks}"
    )
    is_partial = view.is_alive and not view.has_ended and view.num_ranks_seen < view.num_ranks
    seen = f"  seen {view.num_ranks_seen}" if is_partial else ""
    modes = "  ".join(f"{plain(mode.mode)} {count(mode.num_steps)}" for mode in view.cost_models)
    residual = ""
    if view.model_residual is not None:
        residual = f", {more_or_less(view.model_residual)} than modelled"
    pids = " ".join(map(str, view.pids))
    rows = (
        ("engine", f"{plain(view.engine)} {plain(view.version)}".strip() or UNKNOWN),
        ("model", plain(view.model) or UNKNOWN),
        ("weights", of.quantization or UNKNOWN),
        ("ranks", ranks + seen),
        ("role", of.role),
        ("slots", f"{count(view.max_running or None)} sequences"),
        ("budget", f"{count(view.token_budget or None)} tokens a step"),
        ("options", of.options_hash or UNKNOWN),
        ("steps", modes or UNKNOWN),
        ("step cost", f"{view.model_source or UNKNOWN}{residual}"),
        ("pids", pids or UNKNOWN),
    )
    lines = [_text(name, fit_name(text, max(inner - _HEAD, 1)).rstrip()) for name, text in rows]
    return frame("Configuration", lines, width, height, note=plain(view.engine_id))


def probe_health(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the cost of the probe, and what was lost on the way here."""
    health, counters = view.health, view.counters
    lost: tuple[tuple[str, int], ...] = (
        ("lost", health.num_lost),
        ("late", health.num_late),
        ("unjoined", health.num_unjoined),
        ("unknown", health.num_unknown),
        ("refused", health.num_refused),
    )
    lines: list[Line] = [
        _text("state", health.probe_state.replace("_", " ") or UNKNOWN,
              "body" if health.probe_state in ("on", "closed", "") else "alarm"),
        _text("cost", f"{format_probe(health)} of wall time"),
        _text("records", f"{count(health.num_records)} read"),
        _counts(lost[:3]),
        _counts(lost[3:]),
    ]  # fmt: skip
    if view.clock == "device":
        error = duration(counters.clock_error_ns)
        lines.append(_text("clock", f"device, error {error}"))
    else:
        lines.append(_text("clock", "host, launch to outputs ready"))
    lines += [_text("not seen", plain(feature), "alarm") for feature in health.unsupported]
    if health.message:
        lines.append(_text("says", plain(health.message)))
    return frame("Probe", lines, width, height)


def _counts(counts: tuple[tuple[str, int], ...]) -> Line:
    spans: list[Span] = []
    for name, num in counts:
        spans += [(f"{name} ", "dim"), (f"{count(num)}   ", "alarm" if num else "body")]
    return tuple(spans)
