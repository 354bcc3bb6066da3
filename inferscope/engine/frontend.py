"""The in-process front end: text in, text out, beside the engine's loop.

    client ── generate ──> FrontEnd ── tokens ──> Engine (its own thread)
      ^                  │  <── outputs, once a step ──┘
      └── text ──────────┘

It runs in one asyncio event loop and writes its own ring. Its receipt and delivery times are those
that the client would measure. The engine's thread posts a step's outputs in one message, and
detokenization happens here, outside the step loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from inferscope.engine.conversation import Conversation, Delivery
from inferscope.engine.core import Engine, Output
from inferscope.engine.request import BadRequest, Finish, QueueFull, Sampling
from inferscope.engine.tokenizer import Sections, Tokenizer, encode_sections
from inferscope.probe import Probe


class FrontEnd:
    """Text front end of an engine for clients in the same event loop."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, probe: Probe) -> None:
        """Set up on an engine that is not started, its tokenizer, and the front end's probe."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._probe = probe
        self._conversations: dict[str, Conversation] = {}
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine's thread; must run in the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._post_outputs)

    def close(self) -> None:
        """Stop the engine; running requests end as `server_abort`."""
        self._engine.close()

    async def generate(
        self,
        prompt: str,
        sampling: Sampling,
        *,
        external_id: str | None = None,
        sections: Sections = (),
    ) -> AsyncIterator[Delivery]:
        """Serve one prompt and yield its deliveries; leaving the iteration cancels it.

        Args:
            prompt: text of the prompt.
            sampling: sampling parameters.
            external_id: the client's name of the request.
            sections: sections that cover the prompt, by name and length in characters; recorded.

        Raises:
            BadRequest: the engine rejects the prompt.
            QueueFull: too many requests are waiting.
        """
        self._number += 1
        request_id = f"fe-{self._number}"
        probe = self._probe
        index = probe.received(request_id, external_id=external_id)
        wakeup = asyncio.Event()
        conversation = Conversation(index, self._tokenizer, wakeup.set)
        self._conversations[request_id] = conversation
        is_over = False
        try:
            try:
                parts: Sections = ()
                if sections:
                    tokens, parts = encode_sections(self._tokenizer, prompt, sections)
                else:
                    tokens = self._tokenizer.encode(prompt)
                probe.tokenised(index, len(tokens), prompt_parts=parts)
                self._engine.submit(
                    tokens, sampling, request_id=request_id, external_id=external_id
                )
                probe.compare_prompt(index, tokens)
            except Exception as error:
                is_over = True
                probe.finished(index, _finish_of(error))
                raise
            while not is_over:
                await wakeup.wait()
                wakeup.clear()
                delivery = conversation.take()
                if delivery is not None:
                    is_over = delivery.finish is not None
                    yield delivery
        finally:
            if not is_over:
                self._engine.cancel(request_id)
            probe.last_byte(index)
            del self._conversations[request_id]

    def _post_outputs(self, outputs: list[Output]) -> None:
        """Post a step's outputs to the event loop; runs in the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        """Detokenize a step's outputs, deliver them, and record the deliveries once."""
        indices, counts = [], []
        for output in outputs:
            conversation = self._conversations.get(output.request.request_id)
            if conversation is None:
                continue
            is_first = not conversation.num_tokens
            conversation.push(output.tokens, output.finish)
            if output.tokens:
                indices.append(conversation.index)
                counts.append(len(output.tokens))
                if is_first:
                    self._probe.first_byte(conversation.index)
        if indices:
            self._probe.emitted(indices, counts)


def _finish_of(error: Exception) -> Finish:
    if isinstance(error, QueueFull):
        return "shed"
    return "rejected" if isinstance(error, BadRequest) else "error"
