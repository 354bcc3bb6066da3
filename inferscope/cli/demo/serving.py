"""Observed engine with its front end and client, and the practice before: parts of every run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from inferscope.engine import (
    Engine,
    FrontEnd,
    Outline,
    Sampling,
    Tokenizer,
    describe,
    load_model,
    step_timer,
)
from inferscope.errors import RingUnavailable
from inferscope.load import PlannedRequest, ReceivedTokens, Workload
from inferscope.probe import Probe

TEMPERATURE = 0.8
PRACTICE_REQUESTS = 24
_PRACTICE_RATE_S = 8.0
"""Request rate of the practice workload, typical for a laptop; it sets the share of bursts."""


class InProcessClient:
    """Client of the load generator that calls the front end directly."""

    def __init__(self, front_end: FrontEnd, *, ignores_eos: bool = False) -> None:
        """Keep the front end; `ignores_eos` makes every response as long as planned."""
        self._front_end = front_end
        self._ignores_eos = ignores_eos

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        """Send a request; yield each delivery as it arrives."""
        sampling = _sampling(ask, ignores_eos=self._ignores_eos)
        answer = self._front_end.generate(
            ask.prompt, sampling, external_id=ask.name, sections=ask.sections
        )
        async for delivery in answer:
            if delivery.num_tokens:
                yield ReceivedTokens(time.monotonic_ns(), delivery.num_tokens)


@contextmanager
def observed(engine: Engine, tokenizer: Tokenizer, *, name: str) -> Iterator[FrontEnd]:
    """Open the probes of an engine and of its front end, yield the front end, close the probes.

    Args:
        engine: engine that is not started.
        tokenizer: the model's tokenizer.
        name: the model's name.

    Raises:
        RingUnavailable: a probe has no ring.
    """
    info = describe(engine, name=name)
    engine.probe = Probe.open(info, timer=step_timer(engine.model.device))
    probe = Probe.open(info, role="frontend")
    if not (engine.probe.on and probe.on):
        raise RingUnavailable(
            "the demo needs a ring, and none was opened; the line above gives the reason."
        )
    yield FrontEnd(engine, tokenizer, probe=probe)
    engine.probe.close()
    probe.close()


def practice(seed: int, num: int = PRACTICE_REQUESTS) -> list[PlannedRequest]:
    """Return requests to practise with."""
    return list(islice(Workload(seed + 1, rate_s=_PRACTICE_RATE_S).asks(), num))


def practise(engine: Engine, tokenizer: Tokenizer, asks: Iterable[PlannedRequest]) -> None:
    """Serve requests, all submitted at once, on an engine that is not started."""
    limit = engine.max_model_tokens
    for ask in asks:
        prompt = tokenizer.encode(ask.prompt)[: limit - ask.max_tokens]
        engine.submit(prompt, _sampling(ask))
    while engine.has_work:
        engine.step()


def capacity(name: str, engine: Engine, tokenizer: Tokenizer, seed: int) -> tuple[float, float]:
    """Measure the model's capacity on this machine with all requests submitted at once.

    The measurement uses a separate, unobserved engine in this process and without overlap, so that
    the observed one starts cold.

    Args:
        name: the model's name.
        engine: engine of the model.
        tokenizer: the model's tokenizer.
        seed: seed of the requests.

    Returns:
        Requests per second of processor time, and the share of that time other processes left.
    """
    asks, model = practice(seed), engine.model
    if isinstance(model, Outline):  # a worker has the weights
        model = load_model(name, engine.options)
    practising = Engine(model, replace(engine.options, overlap=False))
    began_s, began = time.monotonic(), time.thread_time()
    practise(practising, tokenizer, asks)
    elapsed_s, busy_s = time.monotonic() - began_s, time.thread_time() - began
    return len(asks) / busy_s, min(1.0, busy_s / elapsed_s)


def _sampling(ask: PlannedRequest, *, ignores_eos: bool = False) -> Sampling:
    return Sampling(
        max_tokens=ask.max_tokens, temperature=TEMPERATURE, seed=ask.seed, ignore_eos=ignores_eos
    )
