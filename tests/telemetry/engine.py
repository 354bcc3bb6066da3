"""The built-in engine under an open-loop load, with faults on request: a process of its own.

    python -m tests.telemetry.engine RATE MODEL

It serves the built-in model by that name. Prints READY when the load begins. Words on standard
input, each answered by DONE:

hog     long answers take all of the engine's slots
free    they are given up
late    from now on the front end hands each token over four seconds late
burst N N requests at once
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from itertools import islice

from torch import Tensor

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine, load_tokenizer
from inferscope.engine.core import Output
from inferscope.engine.frontend import FrontEnd
from inferscope.engine.load import describe
from inferscope.engine.runner import Batch, Runner
from inferscope.engine.server.parent import listen_to_parent
from inferscope.load.arrivals import poisson
from inferscope.load.lengths import parse_lengths
from inferscope.load.open_loop import OpenLoop, ReceivedTokens
from inferscope.load.planning import of_lengths, plan, stream
from inferscope.load.prompts import WordPrompts
from inferscope.load.workload import PlannedRequest
from inferscope.probe import Probe

_LOADED = "builtin"
STEP_S = 0.01
"""Longer than a step takes here: long answers hold their slots while this machine rests."""
SLOTS, HOGS = 2, 8
"""At once; and in all, each of which takes its slot for thousands of steps."""
LATE_S = 4.0
MOST = 2000
"""Requests of the load."""
_SEED = 11
_HOG = Sampling(max_tokens=4000, ignore_eos=True)


class SlowRunner(Runner):
    """Runs steps as a slow device does."""

    def execute(self, batch: Batch) -> Tensor:
        """Launch the model; return the sampled tokens."""
        time.sleep(STEP_S)
        return super().execute(batch)


class FaultyFrontEnd(FrontEnd):
    """The engine's front end, which can be delayed on command."""

    is_late = False

    def _post_outputs(self, outputs: list[Output]) -> None:
        if not self.is_late:
            super()._post_outputs(outputs)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.call_later, LATE_S, self._deliver, outputs)


class Client:
    """The load's way to the front end."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        """Send a request; yield what comes."""
        sampling = Sampling(max_tokens=ask.max_tokens, ignore_eos=True)
        async for delivery in self._front_end.generate(ask.prompt, sampling, external_id=ask.name):
            if delivery.num_tokens:
                yield ReceivedTokens(time.monotonic_ns(), delivery.num_tokens)


class Faults:
    """What the words do; they come from another thread and work in the event loop."""

    def __init__(self, front_end: FaultyFrontEnd) -> None:
        self._front_end = front_end
        self._loop = asyncio.get_running_loop()
        self._hogs: list[asyncio.Task[None]] = []
        self._bursts: list[asyncio.Task[None]] = []

    def obey(self, line: str) -> None:
        """Take a word."""
        self._loop.call_soon_threadsafe(self._do, line.split())

    def _do(self, words: list[str]) -> None:
        if words[0] == "hog":
            self._hogs = [self._loop.create_task(self._hog(number)) for number in range(HOGS)]
        elif words[0] == "free":
            for hog in self._hogs:
                hog.cancel()
        elif words[0] == "late":
            self._front_end.is_late = True
        elif words[0] == "burst":
            load = OpenLoop(Client(self._front_end), asks("burst", 1e3, int(words[1])), let_go)
            self._bursts.append(self._loop.create_task(load.run(None)))
        announce("DONE")

    async def _hog(self, number: int) -> None:
        async for _ in self._front_end.generate("while True:", _HOG, external_id=f"hog-{number}"):
            pass


def asks(run: str, rate_s: float, num: int) -> list[PlannedRequest]:
    """Return requests that are all alike, of 32 tokens in and 2 out."""
    words = WordPrompts(stream(_SEED, run), tokens_per_word=1.5)
    compose = of_lengths(_SEED, words, prompt=parse_lengths("32"), output=parse_lengths("2"))
    planned = plan(_SEED, poisson(stream(_SEED, run), rate_s), compose, run=run)
    return list(islice(planned, num))


def let_go(_: object) -> None:
    """Discard the result of a request: the collector reports it."""


def announce(word: str) -> None:
    """Print a line for the test."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def serve(engine: Engine, front_end: FaultyFrontEnd, rate_s: float) -> None:
    """Serve until standard input ends."""
    front_end.start()
    listen_to_parent(Faults(front_end).obey)
    announce("READY")
    await OpenLoop(Client(front_end), asks("load", rate_s, MOST), let_go).run(None)


def main() -> int:
    """Load the model and serve."""
    rate_s, name = float(sys.argv[1]), sys.argv[2]
    engine = load_engine(_LOADED, EngineOptions(max_running=SLOTS, num_blocks=640))
    assert isinstance(engine._runner, Runner)
    engine._runner.__class__ = SlowRunner
    engine.probe = Probe.open(describe(engine, name=name))
    probe = Probe.open(describe(engine, name=name), role="frontend")
    front_end = FaultyFrontEnd(engine, load_tokenizer(_LOADED), probe=probe)
    asyncio.run(serve(engine, front_end, rate_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
