"""Hooks of vLLM's front end, which join HTTP requests to the engine's ids.

`OutputProcessor.add_request` runs in the task that serves the HTTP request, after the prompt is
tokenised and before the core receives it. There an exchange gets the internal id,
`<external>-<8 hex>`, or one for each of n answers, `<i>_<external>-<8 hex>`. Its sampling
attributes come from `SamplingParams`, as in vLLM's own traces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from inferscope.adapters.edge import Edge, Prompt
from inferscope.adapters.patching import Around, Patches
from inferscope.adapters.sampling_attributes import asked
from inferscope.adapters.vllm.info import engine_info
from inferscope.probe import Probe

_IS_STREAM = {"DELTA": True, "FINAL_ONLY": False}
"""Whether a response streams, by `RequestOutputKind`; the third, cumulative, is for Python."""


class FrontEndHooks:
    """Observer of an API server process, which has one engine client."""

    def __init__(
        self, patches: Patches, id_of: Callable[[Any], str | None] = lambda core_client: None
    ) -> None:
        """Observe nothing yet.

        Args:
            patches: patches that hold the hooks.
            id_of: function that returns the engine id of a core's client; None for the process's.
        """
        self._patches = patches
        self._id_of = id_of
        self._edge: Edge | None = None
        self._probe = Probe.disabled()
        self._engine: weakref.ref[Any] | None = None
        """The client that is observed."""
        self._max_model_tokens = 0

    def install(self, engine_class: Any) -> None:
        """Hook `AsyncLLM`."""
        self._patches.unit("the front end", engine_class, {"__init__": Around(after=self.made)})

    def made(
        self, _: None, result: None, engine: Any, vllm_config: Any, *args: Any, **kw: Any
    ) -> None:
        """Open this process's ring: several front ends of one server differ by their index."""
        patches = self._patches
        if self._engine is not None and self._engine() is not None:
            patches.unsupported("a second engine client in one process")
            return
        self._close()  # of one that is gone without a shutdown
        self._engine = weakref.ref(engine)
        probe = self._probe = Probe.open(
            engine_info(vllm_config),
            role="frontend",
            rank=int(kw.get("client_index", 0)),
            engine_id=self._id_of(getattr(engine, "engine_core", None)),
        )
        application = patches.find("starlette.applications", "Starlette")
        is_whole = application is not None and patches.unit(
            "requests at the front end",
            type(getattr(engine, "output_processor", None)),
            {
                "add_request": Around(after=self.added),
                "process_outputs": Around(after=self.processed),
            },
        )
        patches.attach(probe, is_observing=is_whole)
        patches.unit(
            "the front end's shutdown in good order",
            type(engine),
            {"shutdown": Around(before=self.closing, after=self.closed)},
        )
        if not is_whole:
            return
        self._max_model_tokens = int(getattr(vllm_config.model_config, "max_model_len", 0) or 0)
        if self._edge is not None:
            self._edge.record_into(probe)
            return
        self._edge = edge = Edge(probe, patches)
        edge.watch(application)

    def closing(self, engine: Any, *args: Any, **kw: Any) -> bool:
        """Return whether a core has died, so that this shutdown is in answer to it."""
        client = getattr(engine, "engine_core", None)
        return bool(getattr(getattr(client, "resources", None), "engine_dead", False))

    def closed(
        self, is_core_dead: bool | None, result: None, engine: Any, *args: Any, **kw: Any
    ) -> None:
        """Close the ring with its own client: others have shutdowns too, and finalisers call it."""
        if self._engine is not None and self._engine() in (engine, None):
            self._engine = None
            if is_core_dead:
                self._probe.abandon()
            self._close()

    def _close(self) -> None:
        self._probe.close()
        self._patches.detach(self._probe)

    def added(
        self,
        _: None,
        result: None,
        processor: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        *args: Any,
        **kw: Any,
    ) -> None:
        """Join the HTTP request being served to the engine's id."""
        edge = self._edge_of(processor)
        if edge is None:
            return
        tokens = request.prompt_token_ids
        edge.join(
            request.request_id,
            prompt_tokens=None if tokens is None else len(tokens),
            external_id=request.external_req_id,
            parent="" if parent_req is None else parent_req.request_id,
            asked=asked_of(request, parent_req, max_model_tokens=self._max_model_tokens),
            prompt=prompt_of(request, parent_req),
        )

    def processed(
        self, _: None, result: Any, processor: Any, engine_core_outputs: Any, *args: Any, **kw: Any
    ) -> None:
        """Take the new tokens of a step, and the requests that ended by a stop string."""
        edge = self._edge_of(processor)
        if edge is None:
            return
        for output in engine_core_outputs:
            edge.produced(output.request_id, len(output.new_token_ids))
        for request_id in result.reqs_to_abort:
            edge.ended(request_id, "stop")

    def _edge_of(self, processor: Any) -> Edge | None:
        """Return the edge of the client that has this processor; None if it is not observed."""
        engine = None if self._engine is None else self._engine()
        is_observed = getattr(engine, "output_processor", None) is processor
        return self._edge if is_observed else None


def prompt_of(request: Any, parent: Any) -> Prompt | None:
    """Return the prompt of a request; None of embeddings, and of all answers but the first."""
    tokens = request.prompt_token_ids
    if tokens is None or (parent is not None and not request.request_id.startswith("0_")):
        return None
    multimodal = getattr(request, "mm_features", None)
    return Prompt(
        tokens,
        salt=getattr(request, "cache_salt", None),
        adapter=getattr(getattr(request, "lora_request", None), "lora_name", None),
        multimodal=tuple(feature.identifier for feature in multimodal) if multimodal else None,
    )


def asked_of(request: Any, parent: Any, *, max_model_tokens: int) -> dict[str, str]:
    """Return what was asked of a request's sampling; nothing of one that only embeds.

    Args:
        request: vLLM's `EngineCoreRequest`, one of several answers where there is a parent.
        parent: its `ParentRequest`, or None.
        max_model_tokens: where the model ends a text. An answer that may go on until there has
            the limit that vLLM gives to those that ask for none.
    """
    params = getattr(request, "sampling_params", None)
    if params is None:
        return {}

    def of(name: str) -> Any:
        return getattr(params, name, None)

    most, prompt = of("max_tokens"), request.prompt_token_ids
    if prompt is not None and most is not None and len(prompt) + most >= max_model_tokens > 0:
        most = None
    whole = getattr(parent, "sampling_params", params)
    numbers = {
        "max_tokens": most,
        "temperature": of("temperature"),
        "top_p": of("top_p"),
        "top_k": of("top_k"),
        "frequency_penalty": of("frequency_penalty"),
        "presence_penalty": of("presence_penalty"),
        "seed": getattr(whole, "seed", None),
        "n": getattr(whole, "n", None),
    }
    kind = getattr(of("output_kind"), "name", "")
    return asked(numbers, is_stream=_IS_STREAM.get(kind))
