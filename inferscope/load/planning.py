"""Plan of a load, determined before anything is sent.

Arrivals, lengths, prompts and sampling seeds are drawn from separate streams of one seed: other
lengths do not change the arrivals, and the server cannot influence later requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from random import Random
from typing import TypeAlias

from inferscope.load.lengths import Lengths
from inferscope.load.prompts import WordPrompts
from inferscope.load.workload import KindPrompts, PlannedRequest, Sections, draw_kind

Composer: TypeAlias = Callable[[], tuple[str, str, int, Sections]]
"""Function that returns kind, prompt, maximum tokens and sections of the next request."""

MIX = "mix"
_MOST_COMPARED = 10_000
"""Maximum number of requests whose prompts are compared; each takes about 200 bytes."""


def stream(seed: int, purpose: str) -> Random:
    """Return the random stream of one purpose; seeded with text, the same on every machine."""
    return Random(f"{seed}/{purpose}")


def of_kind(seed: int, kind: str) -> Composer:
    """Return a composer of one of the workload's kinds, or of their mix."""
    kinds = stream(seed, "kinds")
    prompts = KindPrompts(stream(seed, "prompts"))

    def compose() -> tuple[str, str, int, Sections]:
        drawn = draw_kind(kinds) if kind == MIX else kind
        return (drawn, *prompts.compose(drawn))

    return compose


def of_lengths(seed: int, words: WordPrompts, *, prompt: Lengths, output: Lengths) -> Composer:
    """Return a composer of requests of given lengths."""
    lengths = stream(seed, "lengths")

    def compose() -> tuple[str, str, int, Sections]:
        prompt_tokens, output_tokens = prompt.draw(lengths), output.draw(lengths)
        text, sections = words.prompt(prompt_tokens)
        return "lengths", text, output_tokens, sections

    return compose


def plan(
    seed: int,
    arrivals: Iterable[float],
    compose: Composer,
    *,
    run: str = "load",
    is_traced: bool = False,
) -> Iterator[PlannedRequest]:
    """Yield the planned requests in time order; their names begin with the run's."""
    seeds, traces = stream(seed, "sampling"), stream(seed, "traces")
    prefixes = _Prefixes()
    for number, at_s in enumerate(arrivals):
        kind, prompt, max_tokens, sections = compose()
        name = f"{run}-{number:06d}"
        traceparent = _traceparent(traces) if is_traced else ""
        sampling_seed = seeds.getrandbits(31)
        yield PlannedRequest(
            at_s,
            name,
            kind,
            prompt,
            max_tokens,
            sampling_seed,
            traceparent,
            sections,
            prefixes.repeated_share(prompt, sections) if number < _MOST_COMPARED else None,
        )


class _Prefixes:
    """Prefixes of a load's prompts, up to the end of each section."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def repeated_share(self, prompt: str, sections: Sections) -> float:
        """Return the share of a prompt that repeats an earlier prefix, and store its prefixes."""
        ends = list(accumulate(num_characters for _, num_characters in sections))
        found = {end: hash(prompt[:end]) for end in ends}
        repeated = max((end for end in ends if found[end] in self._seen), default=0)
        self._seen.update(found.values())
        return repeated / len(prompt) if prompt else 0.0


def _traceparent(random: Random) -> str:
    """Return a random W3C trace context, sampled, with the client's span as parent; no ID is 0."""
    trace_id = random.randrange(1, 1 << 128)
    span_id = random.randrange(1, 1 << 64)
    return f"00-{trace_id:032x}-{span_id:016x}-01"
