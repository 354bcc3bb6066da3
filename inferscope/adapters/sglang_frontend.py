"""SGLang's front end, as the probe is told of it: which HTTP request is which of the engine's.

The tokenizer manager gives a request its id (`rid`: the client's own, if the body names one) and
sends it to the scheduler once it is tokenised; the detokenised outputs come back to it in batches.
The edge, around the HTTP server, does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inferscope.adapters.edge import Edge

_MARK = "_inferscope_tokens"
"""Attribute of SGLang's `ReqState`: how many of its tokens were produced."""


class FrontEndWatch:
    """Joins SGLang's requests to the edge's exchanges."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def sending(self, manager: Any, tokenized: Any) -> None:
        """A request is tokenised and goes to the scheduler, in the task that serves it."""
        self._edge.join(tokenized.rid, prompt_tokens=len(tokenized.input_ids or ()))

    def sending_batch(self, manager: Any, tokenized: Sequence[Any]) -> None:
        """Several prompts of one HTTP request go to the scheduler together."""
        for one in tokenized:
            self.sending(manager, one)

    def received(self, manager: Any, outputs: Any) -> None:
        """A step's outputs come back, about to be handed to those who write them."""
        counts = getattr(outputs, "completion_tokens", None)
        if counts is None:  # embeddings
            return
        for request_id, count in zip(outputs.rids, counts, strict=True):
            state = manager.rid_to_state.get(request_id)
            if state is not None:
                self._edge.produced(request_id, count - getattr(state, _MARK, 0))
                setattr(state, _MARK, count)
