"""One request in its front end: tokens arrive at each step, text leaves when the client reads.

    engine ── push(tokens) ──> Conversation ── take() ──> client
                                    │ wake()  ▲
                                    └─────────┘

Undelivered text is merged into one delivery. A client that reads slowly gets fewer and larger
deliveries, and never delays the engine or other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from inferscope.engine.request import TokenLogprobs
from inferscope.engine.stops import StopSearch
from inferscope.engine.tokenizer import TextStream, Tokenizer
from inferscope.records import RequestIndex


class ScoredToken(NamedTuple):
    """Log probabilities of a token that begins at a character of its request's text."""

    begin: int
    logprobs: TokenLogprobs


class Delivery:
    """Text of one request for its client.

    Attributes:
        text: new text, which may be empty.
        num_tokens: tokens that the text covers.
        finish: reason of the request's end; None before it.
        scored: log probabilities of the tokens, if the request asks for them.
    """

    __slots__ = ("finish", "num_tokens", "scored", "text")

    def __init__(
        self, text: str, num_tokens: int, finish: str | None, scored: list[ScoredToken]
    ) -> None:
        self.text = text
        self.num_tokens = num_tokens
        self.finish = finish
        self.scored = scored


class Conversation:
    """Text state of one running request.

    Attributes:
        index: index of the request in the front end's records.
        num_tokens: tokens generated so far, up to the one that completed a stop string.
        is_over: whether the text is complete.
        is_cut: whether a stop string ended the text before the engine ended the request.
        wake: callback for a new delivery.
    """

    __slots__ = (
        "_min_tokens", "_num_scored_chars", "_pending", "_stops", "_stream", "index", "is_cut",
        "is_over", "num_tokens", "wake",
    )  # fmt: skip

    def __init__(
        self,
        index: RequestIndex,
        tokenizer: Tokenizer,
        wake: Callable[[], object],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start with empty text.

        Args:
            index: index of the request in the front end's records.
            tokenizer: tokenizer of the model.
            wake: callback for a new delivery.
            stops: strings that end the text and are not part of it.
            min_tokens: number of first tokens whose text is not searched for stop strings.
        """
        self.index = index
        self.num_tokens = 0
        self.is_over = False
        self.is_cut = False
        self._stream = TextStream(tokenizer)
        self._stops = StopSearch(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_scored_chars = 0
        self.wake = wake
        self._pending: Delivery | None = None

    def push(
        self,
        tokens: Sequence[int],
        finish: str | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add the tokens of a step, and their log probabilities if the request asks for them.

        `finish` is set on the last call.
        """
        if self.is_over:
            return
        parts, num_tokens = [], 0
        scored: list[ScoredToken] = []
        for token in tokens:
            text = self._stream.push((token,))
            if logprobs:
                scored.append(ScoredToken(self._num_scored_chars, logprobs[num_tokens]))
                self._num_scored_chars += len(text)
            num_tokens += 1
            parts.append(self._filter_stops(text, num_tokens))
            if self._stops is not None and self._stops.is_found:
                self.is_cut = finish is None
                finish = "stop"
                break
        else:
            if finish is not None:
                parts.append(self._filter_stops(self._stream.finish(), num_tokens))
                if self._stops is not None:
                    parts.append(self._stops.finish())
        self.num_tokens += num_tokens
        self.is_over = finish is not None
        self._deliver("".join(parts), num_tokens, finish, scored)

    @property
    def has_pending(self) -> bool:
        """Whether a delivery is pending."""
        return self._pending is not None

    def take(self) -> Delivery | None:
        """Return the pending delivery and clear it; None if there is none."""
        pending, self._pending = self._pending, None
        return pending

    def _filter_stops(self, text: str, num_new: int) -> str:
        if self._stops is None or self.num_tokens + num_new <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _deliver(
        self, text: str, num_tokens: int, finish: str | None, scored: list[ScoredToken]
    ) -> None:
        pending = self._pending
        if pending is None:
            self._pending = Delivery(text, num_tokens, finish, scored)
        else:
            pending.text += text
            pending.num_tokens += num_tokens
            pending.finish = finish
            pending.scored += scored
        self.wake()
