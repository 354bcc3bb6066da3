"""Hooks of SGLang's front end, which join HTTP requests to the engine's.

The tokenizer manager assigns a request's id (`rid`: the client's own, if the body names one) and
sends the request to the scheduler once it is tokenised; it receives the detokenised outputs in
batches. The edge, around the HTTP server, records the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscope.adapters.edge import Edge, Prompt
from inferscope.adapters.sampling_attributes import asked

_MARK = "_inferscope_tokens"
"""Attribute of SGLang's `ReqState`: number of its tokens that were produced."""
_WORDS = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "sampling_seed",
    "n": "n",
}
"""SGLang's names of sampling parameters, by attribute."""


class FrontEndWatch:
    """Join of SGLang's requests to the edge's exchanges."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def sending(self, manager: Any, tokenized: Any) -> None:
        """A request is tokenised and goes to the scheduler, in the task that serves it."""
        state = manager.rid_to_state.get(tokenized.rid)
        self._edge.join(
            tokenized.rid,
            prompt_tokens=len(tokenized.input_ids or ()),
            asked=asked_of(getattr(state, "obj", None)),
            prompt=prompt_of(tokenized),
        )

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


def prompt_of(tokenized: Any) -> Prompt | None:
    """Return the prompt of a tokenised request, as text; its images are not compared."""
    tokens = tokenized.input_ids
    if not tokens:
        return None
    salt = (getattr(tokenized, "extra_key", None), getattr(tokenized, "cache_salt", None))
    return Prompt(
        tokens,
        salt=salt if any(salt) else None,
        adapter=getattr(tokenized, "lora_id", None),
    )


def asked_of(given: Any) -> dict[str, str]:
    """Return what was asked of a request's sampling, by the request as SGLang's API took it.

    What goes to the scheduler says less: there a temperature of 0 is a `top_k` of 1.
    """
    params = getattr(given, "sampling_params", None)
    if not isinstance(params, Mapping):
        return {}
    numbers = {word: params.get(theirs) for word, theirs in _WORDS.items()}
    is_stream = getattr(given, "stream", None)
    return asked(numbers, is_stream=is_stream if isinstance(is_stream, bool) else None)
