"""Prometheus exporter: counts on the collector's thread, serves finished samples on others.

Once a second the counters are copied into an `EngineSample` per engine, and a scrape renders the
latest samples: all values are of one time, and a scrape takes no lock and blocks nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from inferscope.errors import BadInput
from inferscope.fold import EngineView, FinalRequest, FinalStep, Snapshot
from inferscope_prometheus import names
from inferscope_prometheus.budgets import labelled
from inferscope_prometheus.cost_allocation import CostAllocation, adapter_of
from inferscope_prometheus.engine_counters import EngineCounters
from inferscope_prometheus.settings import (
    ANY_ENGINE,
    LAST_PORT,
    PATHS,
    read_settings,
    read_token,
)
from inferscope_prometheus.tenants import Tenants

if TYPE_CHECKING:
    from inferscope_prometheus.coverage import Coverage
    from inferscope_prometheus.families import EngineSample
    from inferscope_prometheus.server import AccessGate, MetricsServer


_WAS_SET_NS = 50_000_000
"""Minimum wall-clock jump that counts as a clock change, in ns.

Following the clock exactly would give the same exemplar another time in each scrape, and Prometheus
would take it for a new one.
"""

_SILENT_NS = 60_000_000_000
"""Age of the published page, renewed each second, from which /health returns 503."""


class PrometheusExporter:
    """Live exporter that serves /metrics."""

    is_live: ClassVar[bool] = True
    path_settings: ClassVar[tuple[str, ...]] = PATHS

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Check the settings; open nothing.

        Raises:
            BadInput: a setting is unknown or invalid.
        """
        self._settings = read_settings(settings)
        self._tenants = Tenants(self._settings.tenants, most=self._settings.most_tenants)
        self._adapters = Tenants(most=self._settings.most_tenants)
        self._by_engine: dict[str, EngineCounters] = {}
        self._models: set[str] = set()
        self._published = PublishedPages(self._settings.max_series)
        self._offset_ns = 0
        """Wall clock minus monotonic clock in ns, as on the page."""
        self._kept_trace: Callable[[FinalRequest], str | None] = _no_trace
        self._server: MetricsServer | None = None
        self._gate: AccessGate | None = None
        """Access control to apply when another exporter's server is taken over."""
        self._address = self._settings.host, self._settings.port
        """Configured address; with port 0 it serves on another port."""
        self._coverage: Coverage | None = None

    def share(self, number: int, total: int) -> None:
        """Serve on a port of its own: shard 1 on the configured port, the others on those after it.

        Raises:
            BadInput: there is no such port, or `engine_metrics` names a single engine.
        """
        if ANY_ENGINE in dict(self._settings.engine_metrics):
            raise BadInput(
                f"engine_metrics has '{ANY_ENGINE}', the page of a single engine, but {total} "
                "shards have several. Use ENGINE_ID: http://HOST:PORT."
            )
        port = self._settings.port and self._settings.port + number - 1
        if port > LAST_PORT:
            raise BadInput(
                f"port is {self._settings.port}, and shard {number} of {total} would be on {port}. "
                f"Give one up to {LAST_PORT - total + 1}."
            )
        self._settings = replace(self._settings, port=port)
        self._address = self._settings.host, port

    def describe(self) -> str:
        """Return the URL it serves and who can reach it."""
        settings = self._settings
        line = f"serves {settings.url}"
        if settings.token_file is not None:
            return f"{line} to clients with the token"
        if settings.tls_client_ca is not None:
            return f"{line} to clients with a certificate"
        return line if settings.is_local else f"{line} to any client that can reach it"

    def check(self) -> None:
        """Import the client library, read token and certificates, and try the address.

        Raises:
            BadInput: one of them cannot be used.
        """
        import prometheus_client  # noqa: F401  # checks that it is installed

        from inferscope_prometheus.server import tls_context

        settings = self._settings
        tls_context(settings)
        if settings.token_file is not None:
            read_token(settings.token_file)
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                settings.host, settings.port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                tried.bind(address)
        except OSError as error:
            raise self._cannot_serve(error) from error

    def open(self) -> None:
        """Bind and serve.

        Raises:
            BadInput: the address is not available, or token or certificates cannot be read.
        """
        self._open(beside=None)

    def _open(self, *, beside: MetricsServer | None) -> None:
        from inferscope_prometheus.coverage import Coverage
        from inferscope_prometheus.families import EngineSample
        from inferscope_prometheus.server import MetricsServer

        self._look_of = EngineSample
        try:
            self._server = MetricsServer(
                self._settings,
                self._published.render,
                is_alive=self._published.is_alive,
                beside=beside,
            )
        except OSError as error:
            raise self._cannot_serve(error) from error
        self._settings = replace(self._settings, port=self._server.port)
        if self._settings.engine_metrics:
            self._coverage = Coverage(dict(self._settings.engine_metrics))

    def open_replacing(self, former: PrometheusExporter) -> None:
        """Bind unless the former exporter serves on the same address; read token and certificates.

        Raises:
            BadInput: the address is not available, or token or certificates cannot be read.
        """
        from inferscope_prometheus.server import AccessGate

        if (self._settings.host, self._settings.port) != former._address:
            self._open(beside=former._server)
            return
        self._look_of = former._look_of
        self._settings = replace(self._settings, port=former._settings.port)
        self._gate = AccessGate(self._settings)

    def take_over(self, former: PrometheusExporter) -> None:
        """Continue the former exporter's counters and serve on its address."""
        settings = self._settings
        self._by_engine, self._models = former._by_engine, former._models
        self._tenants = former._tenants
        self._tenants.change(settings.tenants, most=settings.most_tenants)
        self._adapters = former._adapters
        self._adapters.change((), most=settings.most_tenants)
        self._offset_ns = former._offset_ns
        for numbers in self._by_engine.values():
            by_tenant, _ = numbers.allocations
            by_tenant.reprice(settings.price_per_gpu_hour)
        self._published.now = former._published.now
        if self._gate is not None and former._server is not None:
            self._server, former._server = former._server, None
            self._server.change(self._gate, self._published.render, self._published.is_alive)
        if settings.engine_metrics == former._settings.engine_metrics:
            mine, self._coverage, former._coverage = self._coverage, former._coverage, None
            if mine is not None:
                mine.close()
        elif settings.engine_metrics and self._coverage is None:
            from inferscope_prometheus.coverage import Coverage

            self._coverage = Coverage(dict(settings.engine_metrics))

    def link_traces(self, kept_trace: Callable[[FinalRequest], str | None]) -> None:
        """Take the lookup of kept traces: exemplars carry their IDs."""
        self._kept_trace = kept_trace

    def on_step(self, step: FinalStep) -> None:
        """Count a step."""
        self._counters_of(step.engine_id).on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Count a request."""
        trace_id = self._kept_trace(request)
        self._counters_of(request.engine_id).on_request(request, trace_id=trace_id)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Publish the current values; drop those of expired engines."""
        offset_ns = snapshot.real_ns - snapshot.mono_ns
        if abs(offset_ns - self._offset_ns) > _WAS_SET_NS:
            self._offset_ns = offset_ns
        samples = tuple(self._sample(view, snapshot) for view in snapshot.engines)
        in_sight = {view.engine_id for view in snapshot.engines}
        for engine_id in self._by_engine.keys() - in_sight:
            del self._by_engine[engine_id]
        promised = snapshot.promised and labelled(snapshot.promised, self._model)
        self._published.now = ModelPage(
            samples, replace(snapshot, promised=promised), time.monotonic_ns()
        )
        if self._coverage is not None:
            ours = {
                sample.view.engine_id: sum(
                    sum(num for why, num in counts.finishes.items() if why not in names.REFUSALS)
                    for counts in sample.by_replica.values()
                )
                for sample in samples
            }
            self._coverage.update(ours, [v.engine_id for v in snapshot.engines if v.is_alive])

    def close(self) -> None:
        """Stop serving."""
        if self._coverage is not None:
            self._coverage.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _sample(self, view: EngineView, snapshot: Snapshot) -> EngineSample:
        numbers = self._counters_of(view.engine_id)
        for dp_rank in range(min(view.deployment.data_ranks, names.MOST_REPLICAS)):
            numbers.replica(dp_rank)
        device_ns: dict[str, int] = {}
        for device in view.devices:
            for phase, ns in device.seconds_by_ns.items():
                device_ns[phase] = device_ns.get(phase, 0) + ns
        for allocation in numbers.allocations:
            allocation.settle(device_ns)
        by_tenant, by_adapter = numbers.allocations
        return self._look_of(
            view,
            {rank: counts.copy() for rank, counts in numbers.by_replica.items()},
            numbers.residual.next_window(),
            offset_ns=self._offset_ns,
            lag_ns=snapshot.mono_ns - view.through_ns,
            model=self._model(view.model),
            device_ns=by_tenant.device_ns.copy(),
            tenant_tokens=by_tenant.tokens.copy(),
            dollars=by_tenant.dollars(),
            adapter_ns=by_adapter.device_ns.copy(),
            adapter_tokens=by_adapter.tokens.copy(),
            coverage=None if self._coverage is None else self._coverage.ratio(view.engine_id),
        )

    def _model(self, name: str) -> str:
        """Return a model's label; excess models share one."""
        if not name or (name not in self._models and len(self._models) >= names.MOST_MODELS):
            return names.OTHER_MODEL
        self._models.add(name)
        return name

    def _cannot_serve(self, error: OSError) -> BadInput:
        return BadInput(
            f"the exporter prometheus cannot serve on {self._settings.host}:{self._settings.port}: "
            f"{error.strerror}. Set exporters.prometheus.port."
        )

    def _counters_of(self, engine_id: str) -> EngineCounters:
        numbers = self._by_engine.get(engine_id)
        if numbers is None:
            price = self._settings.price_per_gpu_hour
            numbers = self._by_engine[engine_id] = EngineCounters(
                CostAllocation(self._tenants, price=price),
                CostAllocation(self._adapters, adapter_of),
            )
        return numbers


@dataclass(frozen=True)
class ModelPage:
    """Content of one scrape."""

    samples: tuple[EngineSample, ...] = ()
    snapshot: Snapshot | None = None
    """Snapshot of the samples; None before the first."""
    published_ns: int = 0


class PublishedPages:
    """Published content: replaced as a whole, never modified."""

    def __init__(self, max_series: int) -> None:
        self.now = ModelPage(published_ns=time.monotonic_ns())
        self._max_series = max_series

    def is_alive(self) -> bool:
        """Return whether the engines' records are being folded; any thread may call it."""
        return time.monotonic_ns() - self.now.published_ns < _SILENT_NS

    def render(self, is_open: bool) -> bytes:
        """Return the page, as OpenMetrics or text; any thread may call it."""
        from inferscope_prometheus.bounded import bounded
        from inferscope_prometheus.collector_families import collector_families
        from inferscope_prometheus.families import families
        from inferscope_prometheus.page import page
        from inferscope_prometheus.slo_families import slo_families

        now = self.now
        snapshot, age_ns = now.snapshot, time.monotonic_ns() - now.published_ns
        if snapshot is None:
            return page(families(now.samples), is_open=is_open)
        families_shown = families(now.samples, dropped=snapshot.dropped, age_ns=age_ns)
        if snapshot.promised is not None:
            counts = [
                (sample.whole, one) for sample in now.samples for one in sample.view.objectives
            ]
            families_shown = chain(families_shown, slo_families(counts, snapshot.promised))
        if snapshot.running is not None:
            families_shown = chain(families_shown, collector_families(snapshot.running))
        order = [sample.view.engine_id for sample in now.samples]
        families_shown = bounded(
            families_shown, order=order, guests=snapshot.guests, most=self._max_series
        )
        return page(families_shown, is_open=is_open)


def _no_trace(request: FinalRequest) -> str | None:
    """Return None: no trace is kept."""
