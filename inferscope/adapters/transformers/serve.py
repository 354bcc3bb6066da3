"""HTTP edge of `transformers serve`, joined to the records of `generate` or continuous batching.

    POST ─► handler ─► generate_streaming │ generate_non_streaming(request_id=…)     `join`
                         └ streamer.put(tokens)                                      `produced`

Each loaded model is an engine of its own, so it has its own front-end ring too.

Continuous batching uses the server's request id (the client's `X-Request-Id`, else a generated
one). `generate` has no ids: `Session.expect` names its request by the identity of the inputs.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from types import ModuleType
from typing import Any

from inferscope.adapters.edge import Edge
from inferscope.adapters.transformers.hooks import Function, Session, watch_all
from inferscope.adapters.transformers.info import asked_of
from inferscope.probe import EngineInfo, Probe

_UTILITIES = "transformers.cli.serving.utils"


def observe_server(module: ModuleType) -> None:
    """Observe all servers built from now on; called with `transformers…serving.server`."""
    session = watch_all()
    served = ServedRequests(session)
    session.patches.around(module, "build_server", before=lambda *_args, **_kwargs: served.begin())


class ServedRequests:
    """Hooks that join HTTP requests to those of the models."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches = session.patches
        self._edge: Edge | None = None
        self._lock = threading.Lock()
        self._id_by_streamer: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._num_recorded: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Number of tokens recorded so far, by streamer."""

    def begin(self) -> None:
        """Open the front end's ring and install its hooks; a second server changes nothing."""
        if self._edge is not None:
            return
        patches = self._patches
        app = patches.find("fastapi", "FastAPI")
        if app is None:
            return
        probe = Probe.open(EngineInfo(0, "transformers"), role="frontend")
        patches.attach(probe)
        self._edge = Edge(probe, patches)
        self._edge.watch(app)
        for name in ("GenerateManager", "CBGenerateManager"):
            manager = patches.find(_UTILITIES, name)
            joins = functools.partial(self._join, True)
            patches.around(manager, "generate_streaming", before=joins, after=self._streams)
            patches.replace(manager, "generate_non_streaming", self._answers)
        streamers = [patches.find(_UTILITIES, name) for name in ("DirectStreamer", "CBStreamer")]
        patches.around(streamers[0], "put", after=self._put_elsewhere)
        patches.around(streamers[1], "put", before=self._put)

    def _join(
        self,
        is_stream: bool,
        manager: Any,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        **_kwargs: Any,
    ) -> str:
        ids = inputs["input_ids"]
        if isinstance(ids, list):  # for continuous batching
            num_tokens = len(ids)
        else:
            num_tokens = int(ids.shape[-1])
            self._session.expect(ids, request_id, time.monotonic_ns())
        if self._edge is not None:
            self._edge.join(
                request_id,
                prompt_tokens=num_tokens,
                asked=asked_of(gen_config, is_stream=is_stream),
                probe=self._session.front_end(model),
            )
        return request_id

    def _streams(self, joined: str | None, result: Any, *_args: Any, **_kwargs: Any) -> None:
        if joined is not None:
            _, streamer = result
            with self._lock:
                self._id_by_streamer[streamer] = joined

    def _answers(self, original: Function) -> Function:
        run = self._patches.run

        @functools.wraps(original)
        async def generate_non_streaming(*args: Any, **kwargs: Any) -> Any:
            request_id = run(self._join, False, *args, **kwargs)
            result = await original(*args, **kwargs)
            if request_id is not None:
                run(self._answered, request_id, result)
            return result

        return generate_non_streaming

    def _answered(self, request_id: str, result: Any) -> None:
        if self._edge is not None:
            self._edge.produced(request_id, len(result[2]))

    def _put(self, streamer: Any, output: Any) -> None:
        """Count the tokens before their text is queued: its consumer may send it at once."""
        self._produced(streamer, len(output.generated_tokens))

    def _put_elsewhere(self, _: None, _result: None, streamer: Any, *_args: Any) -> None:
        """Count, in the event loop, the tokens that the model's thread has queued there."""
        streamer._loop.call_soon_threadsafe(
            self._patches.run, self._produced, streamer, streamer.total_tokens
        )

    def _produced(self, streamer: Any, total: int) -> None:
        with self._lock:
            request_id = self._id_by_streamer.get(streamer)
            num_new = total - self._num_recorded.get(streamer, 0)
            if request_id is None or num_new <= 0 or self._edge is None:
                return
            self._num_recorded[streamer] = total
        self._edge.produced(request_id, num_new)
