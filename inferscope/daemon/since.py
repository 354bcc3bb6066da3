"""Differences of engine views: a fold's totals start before a collector's counting does."""

from __future__ import annotations

from dataclasses import replace

from inferscope.fold import CountersView, DeviceHealth, DeviceTime, EngineView

Totals = dict[str, dict[str, int]]


def since(before: EngineView, view: EngineView) -> EngineView:
    """Return a view whose totals start at an earlier view, which may lack newer devices."""
    then = {device.device: device for device in before.devices}
    health, old = view.health, before.health
    return replace(
        view,
        devices=tuple(_time_since(then.get(now.device), now) for now in view.devices),
        counters=_counters_since(before.counters, view.counters),
        health=replace(
            health,
            num_records=health.num_records - old.num_records,
            num_lost=health.num_lost - old.num_lost,
            num_late=health.num_late - old.num_late,
            num_unjoined=health.num_unjoined - old.num_unjoined,
            num_unknown=health.num_unknown - old.num_unknown,
            num_refused=health.num_refused - old.num_refused,
        ),
    )


def _time_since(before: DeviceTime | None, now: DeviceTime) -> DeviceTime:
    if before is None:
        return now
    spent = _nums_since(before.seconds_by_ns, now.seconds_by_ns)
    return replace(
        now,
        wall_ns=now.wall_ns - before.wall_ns,
        seconds_by_ns=spent,
        health=_health_since(before.health, now.health),
    )


def _counters_since(before: CountersView, now: CountersView) -> CountersView:
    devices = {
        name: replace(device, totals=_totals_since(before.devices[name].totals, device.totals))
        if name in before.devices
        else device
        for name, device in now.devices.items()
    }
    return replace(now, totals=_totals_since(before.totals, now.totals), devices=devices)


def _totals_since(before: Totals, now: Totals) -> Totals:
    return {
        counted: _nums_since(before.get(counted, {}), totals) for counted, totals in now.items()
    }


def _health_since(before: DeviceHealth | None, now: DeviceHealth | None) -> DeviceHealth | None:
    if before is None or now is None:
        return now
    return replace(
        now,
        throttle_ns=_counts_since(before.throttle_ns, now.throttle_ns),
        told_ns=now.told_ns - before.told_ns,
        xids=_counts_since(before.xids, now.xids),
    )


def _counts_since(
    before: dict[str, int] | None, now: dict[str, int] | None
) -> dict[str, int] | None:
    return now if before is None or now is None else _nums_since(before, now)


def _nums_since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {word: num - before.get(word, 0) for word, num in now.items()}
