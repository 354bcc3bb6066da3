"""Who used the devices, what that cost, and how much more they could be used, as families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from inferscope.collector.snapshot import EngineView
from inferscope_prometheus import names
from inferscope_prometheus.demand import demand_of
from inferscope_prometheus.metric import counter, gauge
from inferscope_prometheus.tenants import IDLE, NOBODY, WASTE

Labels = tuple[str, ...]
ByPayer = Mapping[tuple[str, str], int]


def payers(
    looks: Sequence[tuple[Labels, ByPayer, ByPayer, Mapping[tuple[str, str], float] | None]],
) -> Iterator[Metric]:
    """Return who the devices worked for; requests in flight are nobody's until they end.

    Args:
        looks: of each engine its labels, nanoseconds of its devices by payer and phase, tokens by
            payer and kind, and dollars by payer and phase, None where there is no price.
    """
    yield counter(
        "inferscope_tenant_gpu_seconds",
        "Device time of ended requests that was not in vain, by who asked.",
        ("tenant", "phase"),
        (
            ((*at, *payer), ns / 1e9)
            for at, device_ns, _, _ in looks
            for payer, ns in device_ns.items()
            if payer[0] not in (WASTE, IDLE)
        ),
    )
    yield counter(
        "inferscope_tenant_tokens",
        "Tokens of ended requests, by who asked.",
        ("tenant", "kind"),
        (
            ((*at, *payer), float(num))
            for at, _, tokens, _ in looks
            for payer, num in tokens.items()
        ),
    )
    priced = [(at, dollars) for at, _, _, dollars in looks if dollars is not None]
    if priced:
        yield counter(
            "inferscope_cost_dollars",
            "Device time by who asked, waste and idle, at the price configured.",
            ("tenant", "phase"),
            (
                ((*at, *payer), amount)
                for at, dollars in priced
                for payer, amount in dollars.items()
            ),
        )


def adapters(looks: Sequence[tuple[Labels, ByPayer, ByPayer]]) -> Iterator[Metric]:
    """Return which LoRA adapters the devices worked for, of engines of which one was asked for.

    Args:
        looks: of each engine its labels, its devices' nanoseconds by adapter and phase, and tokens
            by adapter and kind.
    """
    told = [
        (at, device_ns, tokens)
        for at, device_ns, tokens in looks
        if any(num for (adapter, _), num in tokens.items() if adapter != NOBODY)
    ]
    if not told:
        return
    yield counter(
        "inferscope_adapter_gpu_seconds",
        "Device time of ended requests that was not in vain, by LoRA adapter.",
        ("adapter", "phase"),
        (
            ((*at, *which), ns / 1e9)
            for at, device_ns, _ in told
            for which, ns in device_ns.items()
            if which[0] not in (WASTE, IDLE)
        ),
    )
    yield counter(
        "inferscope_adapter_tokens",
        "Tokens of ended requests, by LoRA adapter.",
        ("adapter", "kind"),
        (((*at, *which), float(num)) for at, _, tokens in told for which, num in tokens.items()),
    )


def demand(looks: Iterable[tuple[Labels, EngineView, int]]) -> Iterator[Metric]:
    """Return what an autoscaler asks; of an engine whose numbers are old there is nothing.

    Args:
        looks: of each engine its labels, its view, and how many nanoseconds old that is.
    """
    told = [(at, demand_of(view, lag_ns=lag_ns)) for at, view, lag_ns in looks]
    for name, says in names.DEMAND.items():
        rows = [
            (at, float(number))
            for at, each in told
            if each is not None and (number := getattr(each, name)) is not None
        ]
        if rows:
            yield gauge(f"inferscope_{name}", says, (), rows)
