"""Prometheus families of device use: by tenant and adapter, cost, and autoscaling signals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from inferscope.fold import EngineView
from inferscope_prometheus import names
from inferscope_prometheus.demand import demand_of
from inferscope_prometheus.metric import counter, gauge
from inferscope_prometheus.tenants import IDLE, UNNAMED, WASTE

Labels = tuple[str, ...]
ByPayer = Mapping[tuple[str, str], int]


def tenants(
    samples: Sequence[tuple[Labels, ByPayer, ByPayer, Mapping[tuple[str, str], float] | None]],
) -> Iterator[Metric]:
    """Return the device time by tenant; requests in flight are counted when they end.

    Args:
        samples: for each engine its labels, device ns by tenant and phase, tokens by tenant and
            kind,
            and dollars by tenant and phase (None without a price).
    """
    yield counter(
        "inferscope_tenant_gpu_seconds",
        "Useful device time of ended requests, by tenant.",
        ("tenant", "phase"),
        (
            ((*at, *payer), ns / 1e9)
            for at, device_ns, _, _ in samples
            for payer, ns in device_ns.items()
            if payer[0] not in (WASTE, IDLE)
        ),
    )
    yield counter(
        "inferscope_tenant_tokens",
        "Tokens of ended requests, by tenant.",
        ("tenant", "kind"),
        (
            ((*at, *payer), float(num))
            for at, _, tokens, _ in samples
            for payer, num in tokens.items()
        ),
    )
    priced = [(at, dollars) for at, _, _, dollars in samples if dollars is not None]
    if priced:
        yield counter(
            "inferscope_cost_dollars",
            "Cost of device time by tenant, waste and idle, at the configured price.",
            ("tenant", "phase"),
            (
                ((*at, *payer), amount)
                for at, dollars in priced
                for payer, amount in dollars.items()
            ),
        )


def adapters(samples: Sequence[tuple[Labels, ByPayer, ByPayer]]) -> Iterator[Metric]:
    """Return the device time by LoRA adapter, for engines with requests that name one.

    Args:
        samples: for each engine its labels, device ns by adapter and phase, tokens by adapter and
            kind.
    """
    demands = [
        (at, device_ns, tokens)
        for at, device_ns, tokens in samples
        if any(num for (adapter, _), num in tokens.items() if adapter != UNNAMED)
    ]
    if not demands:
        return
    yield counter(
        "inferscope_adapter_gpu_seconds",
        "Useful device time of ended requests, by LoRA adapter.",
        ("adapter", "phase"),
        (
            ((*at, *which), ns / 1e9)
            for at, device_ns, _ in demands
            for which, ns in device_ns.items()
            if which[0] not in (WASTE, IDLE)
        ),
    )
    yield counter(
        "inferscope_adapter_tokens",
        "Tokens of ended requests, by LoRA adapter.",
        ("adapter", "kind"),
        (((*at, *which), float(num)) for at, _, tokens in demands for which, num in tokens.items()),
    )


def demand(samples: Iterable[tuple[Labels, EngineView, int]]) -> Iterator[Metric]:
    """Return the autoscaling signals; engines with stale views have none.

    Args:
        samples: for each engine its labels, its view, and the age of the view in ns.
    """
    demands = [(at, demand_of(view, lag_ns=lag_ns)) for at, view, lag_ns in samples]
    for name, says in names.DEMAND.items():
        rows = [
            (at, float(number))
            for at, each in demands
            if each is not None and (number := getattr(each, name)) is not None
        ]
        if rows:
            yield gauge(f"inferscope_{name}", says, (), rows)
