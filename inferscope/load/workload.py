"""Workload: a seeded stream of prompts in the three shapes of real traffic.

    chat   short question, medium response
    rag    long prompt of new documents, short response
    agent  turns of a growing conversation with a shared system prompt

`Workload` is the demo's: arrivals are Poisson, and every few seconds a burst of chats with long
responses arrives at once, as when a batch job starts: their KV caches grow until the pool is full
and a request is preempted. The words come from InferScope's own source, so that the same seed gives
the same requests everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

import inferscope

Sections: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PlannedRequest:
    """One request to send.

    Attributes:
        at_s: time in seconds after the start of the load.
        name: the client's own ID.
        kind: chat, rag or agent.
        prompt: text of the prompt.
        max_tokens: maximum tokens of the response.
        seed: sampling seed.
        traceparent: W3C trace context to send, if any.
        sections: all sections of the prompt: name and number of characters.
        repeated_share: share of the prompt's characters that repeats an earlier prefix of the
            load, 0..1; None if unknown.
    """

    at_s: float
    name: str
    kind: str
    prompt: str
    max_tokens: int
    seed: int
    traceparent: str = ""
    sections: Sections = ()
    repeated_share: float | None = None


KINDS = ("chat", "rag", "agent")
_SHARES = (0.20, 0.45, 0.35)
_AGENTS = 4
_BURST_S = 6.0
_BURST = 8


class KindPrompts:
    """Composer of prompts of the three kinds, with the maximum lengths of their responses."""

    def __init__(self, draw: Random) -> None:
        """Keep the random source; lengths do not depend on the texts, which any commit changes."""
        self._random = draw
        self._places = Random(draw.getrandbits(64))
        self._texts = _corpus()
        self._system = self._excerpt(900)
        self._agents = [self._system + self._excerpt(200) for _ in range(_AGENTS)]

    def compose(self, kind: str) -> tuple[str, int, Sections]:
        """Return a prompt of the kind, the maximum tokens of its response, and its sections."""
        draw = self._random
        if kind == "chat":
            question = self._excerpt(draw.randint(60, 400))
            return question, draw.randint(24, 112), (("user", len(question)),)
        if kind == "rag":
            documents = [self._excerpt(draw.randint(500, 900)) for _ in range(draw.randint(2, 4))]
            question = "# In short:\n"
            prompt = "\n\n".join([*documents, question])
            retrieved = len(prompt) - len(question)
            sections: Sections = (("retrieved", retrieved), ("user", len(question)))
            return prompt, draw.randint(8, 40), sections
        agent = draw.randrange(_AGENTS)
        before = self._agents[agent]
        turn = before + self._excerpt(draw.randint(80, 240))
        system, history = len(self._system), len(before) - len(self._system)
        sections = (("system", system), ("history", history), ("user", len(turn) - len(before)))
        # The conversation restarts before it outgrows the model.
        self._agents[agent] = turn if len(turn) < 3000 else self._system
        return turn, draw.randint(16, 64), sections

    def _excerpt(self, num_characters: int) -> str:
        text = self._places.choice(self._texts)
        while len(text) <= num_characters + 1:
            text += self._places.choice(self._texts)
        start = self._places.randrange(len(text) - num_characters)
        return text[start : start + num_characters]


def draw_kind(draw: Random) -> str:
    """Return a random kind by its share of the mix."""
    return draw.choices(KINDS, _SHARES)[0]


class Workload:
    """Seeded stream of planned requests with Poisson arrivals."""

    def __init__(
        self,
        seed: int,
        *,
        rate_s: float,
        pace: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Prepare the stream.

        Args:
            seed: the same seed gives the same stream.
            rate_s: mean arrivals per second.
            pace: factor of the rate from the current request to the next.
        """
        self._random = Random(seed)
        self._rate_s = rate_s
        self._pace = pace
        self._prompts = KindPrompts(self._random)

    def asks(self) -> Iterator[PlannedRequest]:
        """Yield planned requests without end, in time order."""
        at_s = before_s = 0.0
        for number, (planned_s, kind, is_burst) in enumerate(self._arrivals()):
            at_s += (planned_s - before_s) / self._pace()
            before_s = planned_s
            prompt, max_tokens, sections = self._prompts.compose(kind)
            if is_burst:
                max_tokens = self._random.randint(110, 180)
            seed = self._random.getrandbits(31)
            name = f"{kind}-{number:04x}"
            yield PlannedRequest(at_s, name, kind, prompt, max_tokens, seed, sections=sections)

    def _arrivals(self) -> Iterator[tuple[float, str, bool]]:
        """Yield times, kinds, and whether it is a burst's; bursts are part of the mean rate."""
        draw = self._random
        # At most half of all requests are in bursts: a slower stream spaces them further.
        between_s = max(_BURST_S, 2 * _BURST / self._rate_s)
        steady_s = self._rate_s - _BURST / between_s
        at_s = 0.0
        burst_s = draw.uniform(0.5, 1.0) * between_s
        while True:
            next_s = at_s + draw.expovariate(steady_s)
            while burst_s < next_s:
                for _ in range(_BURST):
                    yield burst_s, "chat", True
                burst_s += draw.uniform(0.5, 1.5) * between_s
            at_s = next_s
            yield at_s, draw_kind(draw), False


def _corpus() -> list[str]:
    """Return the package's source files in a fixed order."""
    root = Path(inferscope.__file__).parent
    return [path.read_text(encoding="utf-8") for path in sorted(root.glob("**/*.py"))]
