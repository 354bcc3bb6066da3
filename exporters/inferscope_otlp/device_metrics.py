"""The conventions' metrics of hardware, of an engine's device as samplers count it.

What samplers do not tell is absent. An engine with several devices has none of them: what is told
last of any device is no device's own. Energy is not among them: what is known of it is apportioned
to phases, and engines that share a device would count its idle part twice.
"""

from __future__ import annotations

from inferscope.collector.snapshot import EngineView
from inferscope_otlp import names
from inferscope_otlp.attributes import Attributes
from inferscope_otlp.finished import Engine
from inferscope_otlp.wire import gauge_metric, number_point, sum_metric

_USED, _TOTAL = "memory_used_bytes", "memory_total_bytes"
_SAYS = {
    names.METRIC_GPU_UTILIZATION: "Fraction of time with any kernel or copy on the device",
    names.METRIC_GPU_MEMORY_USAGE: "GPU memory used",
    names.METRIC_GPU_MEMORY_LIMIT: "Size of the GPU memory",
    names.METRIC_GPU_MEMORY_UTILIZATION: "Fraction of GPU memory used",
    names.METRIC_HW_POWER: "Instantaneous power consumed by the component",
    names.METRIC_HW_ERRORS: "Number of errors encountered by the component",
}


def device_metrics(view: EngineView, engine: Engine, *, start_ns: int, end_ns: int) -> list[bytes]:
    """Return them as fields of a message ScopeMetrics.

    Args:
        view: of the engine.
        engine: the same; `device_id` is empty where it has several devices, or does not name its.
        start_ns: of the counting, by the wall clock.
        end_ns: now, likewise.
    """
    if not engine.device_id or not view.is_alive:
        return []
    told = view.counters.gauges
    at: Attributes = {names.HW_ID: engine.device_id}
    if engine.device:
        at[names.HW_NAME] = engine.device
    typed: Attributes = {**at, names.HW_TYPE: "gpu"}

    def point(value: float, attributes: Attributes = at) -> bytes:
        return number_point(attributes, value, start_ns=min(start_ns, end_ns), end_ns=end_ns)

    found = []
    if "busy_share" in told:
        name = names.METRIC_GPU_UTILIZATION
        found.append(gauge_metric(name, _SAYS[name], "1", [point(told["busy_share"])]))
    for name, word in (
        (names.METRIC_GPU_MEMORY_USAGE, _USED),
        (names.METRIC_GPU_MEMORY_LIMIT, _TOTAL),
    ):
        if word in told:
            size = [point(round(told[word]))]
            found.append(sum_metric(name, _SAYS[name], "By", size, is_monotonic=False))
    if _USED in told and told.get(_TOTAL):
        name, share = names.METRIC_GPU_MEMORY_UTILIZATION, told[_USED] / told[_TOTAL]
        found.append(gauge_metric(name, _SAYS[name], "1", [point(share)]))
    if "power_w" in told:
        name = names.METRIC_HW_POWER
        found.append(gauge_metric(name, _SAYS[name], "W", [point(told["power_w"], typed)]))
    health = view.devices[0].health
    if health is not None and health.xids:
        name = names.METRIC_HW_ERRORS
        errors = [
            point(num, {**typed, names.ERROR_TYPE: word}) for word, num in health.xids.items()
        ]
        found.append(sum_metric(name, _SAYS[name], "{error}", errors, is_monotonic=True))
    return found
