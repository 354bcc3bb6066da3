"""One trace per finished request, over OTLP/HTTP, from the collector's process.

The fold's thread only notes what a request was (`request` takes microseconds and never waits); the
courier's thread makes the spans and sends them. It starts with the first `look`, which tells the
wall clock and the models' names.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot
from inferscope.errors import BadInput
from inferscope_otlp.courier import Courier
from inferscope_otlp.facts import FactTable
from inferscope_otlp.finished import Engine, Finished, gaps_of, tbt_ns_of
from inferscope_otlp.identity import parent_of, trace_id_of
from inferscope_otlp.keeping import is_kept, verdicts
from inferscope_otlp.settings import read_settings
from inferscope_otlp.spans import trace_of

if TYPE_CHECKING:
    from inferscope_otlp.sdk import Post

_NO_TIMES = array("q")


class OtlpExporter:
    """Sends traces to an OTLP/HTTP receiver.

    Attributes:
        num_left_out: requests that were not kept, as the settings want it.
    """

    is_live = True

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Check the settings; nothing is opened yet.

        Raises:
            BadInput: a setting is not known, or its value cannot be used.
        """
        self._settings = read_settings(settings)
        self.num_left_out = 0
        self._facts = FactTable()
        self._engines: dict[str, Engine] = {}
        self._offset_ns = 0
        self._post: Post | None = None
        self._courier: Courier[Finished] | None = None

    def describe(self) -> str:
        """Return one line on what goes where."""
        settings = self._settings
        line = f"OTLP traces to {settings.shown_endpoint}"
        if settings.keep_share < 1:
            line += f", {settings.keep_share:g} of the unremarkable requests"
        return line

    def check(self) -> None:
        """Import OpenTelemetry; its receiver may come later.

        Raises:
            BadInput: it is not installed here.
        """
        try:
            import inferscope_otlp.sdk  # noqa: F401
        except ImportError as error:
            raise BadInput(
                f"the exporter otlp needs {error.name}. "
                'Install it with: pip install "inferscope[otlp]"'
            ) from error

    def open(self) -> None:
        """Make ready to send.

        Raises:
            BadInput: OpenTelemetry is not installed here.
        """
        self.check()
        from inferscope_otlp.sdk import Post

        self._post = Post(self._settings)
        self._courier = Courier(
            self._deliver,
            self._post.stop,
            max_waiting=self._settings.queue_size,
            name=f"traces to {self._settings.shown_endpoint}",
        )

    def step(self, step: FinalStep) -> None:
        """Note what a step says of its requests."""
        self._facts.take(step)

    def request(self, request: FinalRequest) -> None:
        """Take a finished request; never waits."""
        assert self._courier is not None, "open() comes first"
        engine_id, request_id = request.engine_id, request.request_id
        facts = self._facts.pop(engine_id, request_id, since_ns=request.admitted_ns)
        parent = parent_of(request.trace)
        trace_id = parent.trace_id if parent else trace_id_of(engine_id, request_id)
        tbt_ns = tbt_ns_of(request)
        found = verdicts(request, tbt_ns, self._settings)
        if request.judged is not None:
            found |= request.judged.results
        if not is_kept(request, found, parent, trace_id, self._settings.keep_share):
            self.num_left_out += 1
            return
        gaps = None if tbt_ns is None else gaps_of(tbt_ns)
        # A thousand waiting requests of a hundred thousand tokens each would fill the memory.
        small = replace(request, token_times_ns=_NO_TIMES, tokens_per_event=())
        self._courier.put(Finished(small, gaps, facts, parent, found))

    def look(self, snapshot: Snapshot) -> None:
        """Take the engines' names and the wall clock."""
        assert self._courier is not None, "open() comes first"
        self._engines = {
            view.engine_id: Engine(
                view.engine_id,
                view.engine,
                view.version,
                view.model,
                view.device,
                view.is_synthetic,
            )
            for view in snapshot.engines
        }
        if snapshot.real_ns:
            self._offset_ns = snapshot.real_ns - snapshot.mono_ns
            self._courier.start()

    def close(self) -> None:
        """Send what is waiting, within three seconds; what is left is dropped and counted."""
        if self._courier is not None and self._post is not None:
            self._courier.close()
            self._post.close()

    @property
    def num_sent(self) -> int:
        """Return how many traces arrived."""
        return self._courier.num_sent if self._courier else 0

    @property
    def num_waiting(self) -> int:
        """Return how many traces are still to be sent."""
        return self._courier.num_waiting if self._courier else 0

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return how many traces were given up: queue_full, not_delivered, closed."""
        return dict(self._courier.num_dropped) if self._courier else {}

    def _deliver(self, batch: Sequence[Finished]) -> None:
        assert self._post is not None
        engines, offset_ns = self._engines, self._offset_ns
        traces = []
        for finished in batch:
            engine_id = finished.request.engine_id
            engine = engines.get(engine_id) or Engine(engine_id)
            traces.append((engine, trace_of(finished, engine, offset_ns)))
        self._post.send(traces)
