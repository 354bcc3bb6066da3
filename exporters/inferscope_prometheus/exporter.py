"""The exporter: counts on the collector's thread, serves on others, a finished look between them.

Once a second the numbers are copied into a `Look` per engine, and a scrape renders the looks that
are there: it sees all numbers of one moment, takes no lock and stops nobody.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Promised, Snapshot
from inferscope.document import near
from inferscope.errors import BadInput
from inferscope_prometheus.numbers import Numbers

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

    from inferscope_prometheus.families import Look

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9464


class PrometheusExporter:
    """Serves /metrics."""

    is_live: ClassVar[bool] = True

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Take `host` and `port`.

        Raises:
            BadInput: a setting is unknown or cannot be used.
        """
        for key in settings:
            if key not in ("host", "port"):
                raise BadInput(f"{key} is no setting. {near(key, ('host', 'port'))}")
        host, port = settings.get("host", DEFAULT_HOST), settings.get("port", DEFAULT_PORT)
        if not isinstance(host, str) or not host:
            raise BadInput(f"host is {host!r}. Give an address, such as {DEFAULT_HOST}.")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise BadInput(f"port is {port!r}. Give a number up to 65535; 0 takes any free one.")
        self._host = host
        self._port = port
        self._by_engine: dict[str, Numbers] = {}
        self._published = Published()
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def describe(self) -> str:
        """Say where it serves."""
        return f"serves http://{self._host}:{self._port}/metrics"

    def check(self) -> None:
        """Import the client library and try the address.

        Raises:
            BadInput: the address cannot be had.
        """
        from prometheus_client import start_http_server  # noqa: F401

        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                tried.bind(address)
        except OSError as error:
            raise self._cannot_serve(error) from error

    def open(self) -> None:
        """Bind and serve.

        Raises:
            BadInput: the address cannot be had.
        """
        from prometheus_client import start_http_server
        from prometheus_client.core import CollectorRegistry

        from inferscope_prometheus.families import Look, families
        from inferscope_prometheus.slo_families import slo_families

        self._look_of = Look
        self._published.families = families
        self._published.slo_families = slo_families
        registry = CollectorRegistry()
        registry.register(self._published)
        try:
            self._server = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise self._cannot_serve(error) from error
        self._port = self._server[0].server_port

    def step(self, step: FinalStep) -> None:
        """Count a step."""
        self._numbers(step.engine_id).step(step)

    def request(self, request: FinalRequest) -> None:
        """Count a request."""
        self._numbers(request.engine_id).request(request)

    def look(self, snapshot: Snapshot) -> None:
        """Publish the numbers as they are now; drop those of engines that are forgotten."""
        looks = []
        offset_ns = snapshot.real_ns - snapshot.mono_ns
        for view in snapshot.engines:
            numbers = self._numbers(view.engine_id)
            for dp_rank in range(view.deployment.data_ranks):
                numbers.replica(dp_rank)
            copies = {rank: counts.copy() for rank, counts in numbers.by_replica.items()}
            residual, folded_ns = numbers.residual.look(), view.through_ns + offset_ns
            looks.append(self._look_of(view, copies, residual, folded_ns))
        in_sight = {view.engine_id for view in snapshot.engines}
        for engine_id in self._by_engine.keys() - in_sight:
            del self._by_engine[engine_id]
        self._published.promised = snapshot.promised
        self._published.looks = tuple(looks)

    def close(self) -> None:
        """Stop serving."""
        if self._server is None:
            return
        server, thread = self._server
        self._server = None
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    def _cannot_serve(self, error: OSError) -> BadInput:
        return BadInput(
            f"the exporter prometheus cannot serve on {self._host}:{self._port}: "
            f"{error.strerror}. Set exporters.prometheus.port."
        )

    def _numbers(self, engine_id: str) -> Numbers:
        numbers = self._by_engine.get(engine_id)
        if numbers is None:
            numbers = self._by_engine[engine_id] = Numbers()
        return numbers


class Published:
    """What a scrape sees: replaced as a whole, never changed."""

    def __init__(self) -> None:
        self.looks: tuple[Look, ...] = ()
        self.promised: Promised | None = None
        self.families: Callable[..., Iterator[Metric]] | None = None
        self.slo_families: Callable[..., Iterator[Metric]] | None = None

    def collect(self) -> Iterator[Metric]:
        """Return the families of one moment; the registry asks for them at each scrape."""
        if self.families is not None:
            looks, promised = self.looks, self.promised
            yield from self.families(looks)
            if promised is not None and self.slo_families is not None:
                told = [(look.whole, one) for look in looks for one in look.view.objectives]
                yield from self.slo_families(told, promised)
