"""Hardware metrics of the conventions for each of an engine's devices, from samplers.

Values that samplers do not report are absent. Energy is not among them: it is known only as
apportioned to phases, and engines that share a device would count its idle part twice.
"""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope_otlp import names
from inferscope_otlp.attributes import Attributes
from inferscope_otlp.wire import gauge_metric, number_point, sum_metric

_USED, _TOTAL = "memory_used_bytes", "memory_total_bytes"
_SAYS = {
    names.METRIC_GPU_UTILIZATION: ("1", "Fraction of time with any kernel or copy on the device"),
    names.METRIC_GPU_MEMORY_USAGE: ("By", "GPU memory used"),
    names.METRIC_GPU_MEMORY_LIMIT: ("By", "Size of the GPU memory"),
    names.METRIC_GPU_MEMORY_UTILIZATION: ("1", "Fraction of GPU memory used"),
    names.METRIC_HW_POWER: ("W", "Instantaneous power consumed by the component"),
    names.METRIC_HW_ERRORS: ("{error}", "Number of errors encountered by the component"),
}
_IS_MONOTONIC = {
    names.METRIC_GPU_MEMORY_USAGE: False,
    names.METRIC_GPU_MEMORY_LIMIT: False,
    names.METRIC_HW_ERRORS: True,
}
"""Whether a sum is monotonic, by metric; the other metrics are gauges."""

Values = list[tuple[str, float, Attributes]]
"""Values by metric, with the attributes of the point."""


def device_metrics(view: EngineView, *, start_ns: int, end_ns: int) -> list[bytes]:
    """Return the metrics as fields of a ScopeMetrics message.

    Args:
        view: view of the engine.
        start_ns: start of counting, on the wall clock.
        end_ns: current time, likewise.
    """
    if not view.is_alive:
        return []
    points: dict[str, list[bytes]] = {}
    for name, value, attributes in (*_gauges(view), *_errors(view)):
        point = number_point(attributes, value, start_ns=min(start_ns, end_ns), end_ns=end_ns)
        points.setdefault(name, []).append(point)
    found = []
    for name, of_devices in points.items():
        unit, description = _SAYS[name]
        is_monotonic = _IS_MONOTONIC.get(name)
        found.append(
            gauge_metric(name, description, unit, of_devices)
            if is_monotonic is None
            else sum_metric(name, description, unit, of_devices, is_monotonic=is_monotonic)
        )
    return found


def _gauges(view: EngineView) -> Values:
    """Return the latest values of each device."""
    found: Values = []
    for device_id, device in view.counters.devices.items():
        gauges_of_device, at = device.gauges, _of(device_id, device.device)
        if "busy_share" in gauges_of_device:
            found.append((names.METRIC_GPU_UTILIZATION, gauges_of_device["busy_share"], at))
        for name, word in (
            (names.METRIC_GPU_MEMORY_USAGE, _USED),
            (names.METRIC_GPU_MEMORY_LIMIT, _TOTAL),
        ):
            if word in gauges_of_device:
                found.append((name, round(gauges_of_device[word]), at))
        if _USED in gauges_of_device and gauges_of_device.get(_TOTAL):
            found.append(
                (
                    names.METRIC_GPU_MEMORY_UTILIZATION,
                    gauges_of_device[_USED] / gauges_of_device[_TOTAL],
                    at,
                )
            )
        if "power_w" in gauges_of_device:
            found.append(
                (names.METRIC_HW_POWER, gauges_of_device["power_w"], {**at, names.HW_TYPE: "gpu"})
            )
    return found


def _errors(view: EngineView) -> Values:
    """Return the errors of each device, once for a device with several ranks."""
    health_of = {time.device.partition("#")[0]: time.health for time in view.devices}
    found: Values = []
    for device_id, health in health_of.items():
        counters = view.counters.devices.get(device_id)
        at = _of(device_id, view.device if counters is None else counters.device)
        at[names.HW_TYPE] = "gpu"
        for word, num in ((health.xids if health else None) or {}).items():
            found.append((names.METRIC_HW_ERRORS, num, {**at, names.ERROR_TYPE: word}))
    return found


def _of(device_id: str, device: str) -> Attributes:
    found: Attributes = {names.HW_ID: device_id}
    if device:
        found[names.HW_NAME] = device
    return found
