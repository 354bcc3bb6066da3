"""One request as its front end sees it: tokens come in as steps end, text goes out as it can.

    engine ── push(tokens) ──> Conversation ── take() ──> client
                                    │ wake()  ▲
                                    └─────────┘

What the client has not taken yet is kept in one piece: a client that reads slowly gets fewer and
larger deliveries, and never holds up anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferscope.engine.stops import StopSearch
from inferscope.engine.tokenizer import TextStream, Tokenizer
from inferscope.records import RequestIndex


class Delivery:
    """Tokens of one request as they reach the client."""

    __slots__ = ("finish", "num_tokens", "text")

    def __init__(self, text: str, num_tokens: int, finish: str | None) -> None:
        self.text = text
        self.num_tokens = num_tokens
        self.finish = finish


class Conversation:
    """One request under way.

    Attributes:
        index: its name in the front end's records.
        num_tokens: generated so far, up to the one that completed a stop string.
        is_over: nothing more comes.
        is_cut: a stop string ended it, and the engine does not know yet.
        wake: is called when there is something to take.
    """

    __slots__ = (
        "_min_tokens", "_pending", "_stops", "_stream", "index", "is_cut", "is_over", "num_tokens",
        "wake",
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
        """Begin without text.

        Args:
            index: from the front end's probe.
            tokenizer: of the model.
            wake: called when there is something to take.
            stops: strings that end the text and are not part of it.
            min_tokens: stop strings are not looked for in the text of the first so many tokens.
        """
        self.index = index
        self.num_tokens = 0
        self.is_over = False
        self.is_cut = False
        self._stream = TextStream(tokenizer)
        self._stops = StopSearch(stops) if stops else None
        self._min_tokens = min_tokens
        self.wake = wake
        self._pending: Delivery | None = None

    def push(self, tokens: Sequence[int], finish: str | None) -> None:
        """Add what a step brought; `finish` says that it was the last."""
        if self.is_over:
            return
        parts, num_tokens = [], 0
        for token in tokens:
            num_tokens += 1
            parts.append(self._grown(self._stream.push((token,)), num_tokens))
            if self._stops is not None and self._stops.is_found:
                self.is_cut = finish is None
                finish = "stop"
                break
        else:
            if finish is not None:
                parts.append(self._grown(self._stream.finish(), num_tokens))
                if self._stops is not None:
                    parts.append(self._stops.finish())
        self.num_tokens += num_tokens
        self.is_over = finish is not None
        self._deliver("".join(parts), num_tokens, finish)

    @property
    def has_news(self) -> bool:
        """There is something to take."""
        return self._pending is not None

    def take(self) -> Delivery | None:
        """Return all that came since the last call, None if nothing did."""
        pending, self._pending = self._pending, None
        return pending

    def _grown(self, text: str, num_new: int) -> str:
        if self._stops is None or self.num_tokens + num_new <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _deliver(self, text: str, num_tokens: int, finish: str | None) -> None:
        pending = self._pending
        if pending is None:
            self._pending = Delivery(text, num_tokens, finish)
        else:
            pending.text += text
            pending.num_tokens += num_tokens
            pending.finish = finish
        self.wake()
