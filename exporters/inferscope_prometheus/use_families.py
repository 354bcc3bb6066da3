"""Prometheus families of device use: by tenant and adapter, cost, and autoscaling signals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client.core import Metric

from inferscope.fold import EngineView
from inferscope_prometheus.demand import Demand, demand_of
from inferscope_prometheus.metric import family_if_rows, family_of
from inferscope_prometheus.tenants import IDLE, UNNAMED, WASTE

Labels = tuple[str, ...]
ByPayer = Mapping[tuple[str, str], int]


def tenants(
    samples: Sequence[tuple[Labels, ByPayer, ByPayer, Mapping[tuple[str, str], float] | None]],
) -> Iterator[Metric]:
    """Return the device time by tenant; requests in flight are counted when they end.

    Args:
        samples: for each engine its labels, device ns by tenant and phase, tokens by tenant and
            kind, and dollars by tenant and phase (None without a price).
    """
    yield from _use("tenant", [sample[:3] for sample in samples])
    yield from family_if_rows(
        "cost_dollars_total",
        (
            ((*at, *payer), amount)
            for at, _, _, dollars in samples
            for payer, amount in (dollars or {}).items()
        ),
    )


def adapters(samples: Sequence[tuple[Labels, ByPayer, ByPayer]]) -> Iterator[Metric]:
    """Return the device time by LoRA adapter, for engines with requests that name one.

    Args:
        samples: for each engine its labels, device ns by adapter and phase, tokens by adapter and
            kind.
    """
    demands = [
        sample
        for sample in samples
        if any(num for (adapter, _), num in sample[2].items() if adapter != UNNAMED)
    ]
    if demands:
        yield from _use("adapter", demands)


def _use(payers: str, samples: Sequence[tuple[Labels, ByPayer, ByPayer]]) -> Iterator[Metric]:
    yield family_of(
        f"{payers}_gpu_seconds_total",
        (
            ((*at, *payer), ns / 1e9)
            for at, device_ns, _ in samples
            for payer, ns in device_ns.items()
            if payer[0] not in (WASTE, IDLE)
        ),
    )
    yield family_of(
        f"{payers}_tokens_total",
        (((*at, *payer), num) for at, _, tokens in samples for payer, num in tokens.items()),
    )


def demand(samples: Iterable[tuple[Labels, EngineView, int]]) -> Iterator[Metric]:
    """Return the autoscaling signals; engines with stale views have none.

    Args:
        samples: for each engine its labels, its view, and the age of the view in ns.
    """
    demands = [(at, demand_of(view, lag_ns=lag_ns)) for at, view, lag_ns in samples]
    for field in fields(Demand):
        numbers = ((at, getattr(each, field.name)) for at, each in demands if each is not None)
        yield from family_if_rows(
            field.name, ((at, number) for at, number in numbers if number is not None)
        )
