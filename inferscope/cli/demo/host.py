"""Engine process of the demo: engine, front end and load generator.

`inferscope demo` starts it through demo_start. It prints one line of JSON when the load begins, or
when the start fails. Standard input is a pipe without data: it closes when the parent exits, even
if the parent is killed, and this process then exits too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec

from inferscope.cli.demo.link import Ready, Settings, Stage
from inferscope.engine import (
    Engine,
    FrontEnd,
    Outline,
    Sampling,
    Tokenizer,
    describe,
    load_engine,
    load_model,
    load_tokenizer,
    step_timer,
)
from inferscope.engine.server import Failed, listen_to_parent, send_to_parent
from inferscope.errors import InferScopeError, RingUnavailable
from inferscope.load import (
    INTERVAL_S,
    ClientTimes,
    OpenLoop,
    Pacing,
    PlannedRequest,
    ReceivedTokens,
    Workload,
    from_now_on,
)
from inferscope.private import private_file
from inferscope.probe import Probe

TEMPERATURE = 0.8
_PRACTICE_REQUESTS = 24
_PRACTICE_RATE_S = 8.0
"""Request rate of the practice workload, typical for a laptop; it sets the share of bursts."""
_SETTLE_S = 0.3


class _InProcessClient:
    """Client of the load generator that calls the front end directly."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        answer = self._front_end.generate(
            ask.prompt, _sampling(ask), external_id=ask.name, sections=ask.sections
        )
        async for delivery in answer:
            if delivery.num_tokens:
                yield ReceivedTokens(time.monotonic_ns(), delivery.num_tokens)


def main() -> int:
    """Run until the load has ended or standard input closes; return the process's exit code."""
    try:
        _run(msgspec.json.decode(sys.argv[1], type=Settings))
    except InferScopeError as error:
        send_to_parent(Failed(str(error), error.exit_code))
        return error.exit_code
    return 0


def _run(settings: Settings) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    listen_to_parent(lambda word: None)
    _begin(settings, f"loading the model {settings.model}")
    engine = load_engine(settings.model, settings.options)
    tokenizer = load_tokenizer(settings.model)
    _begin(settings, "measuring how many requests this machine serves")
    rate_s, pacing = _rate(settings, engine, tokenizer)
    engine.probe = Probe.open(
        describe(engine, name=settings.model), timer=step_timer(engine.model.device)
    )
    front_end_probe = Probe.open(describe(engine, name=settings.model), role="frontend")
    if not (engine.probe.on and front_end_probe.on):
        raise RingUnavailable(
            "the demo needs a ring, and none was opened; the line above gives the reason."
        )
    front_end = FrontEnd(engine, tokenizer, probe=front_end_probe)
    workload = Workload(settings.seed, rate_s=rate_s, pace=lambda: pacing.pace)
    ended: list[ClientTimes] = []
    asks = from_now_on(workload.asks()) if _is_paced(settings) else workload.asks()
    load = OpenLoop(_InProcessClient(front_end), asks, ended.append)
    asyncio.run(_serve(front_end, engine, load, settings, pacing, rate_s))
    engine.probe.close()
    front_end_probe.close()
    if settings.client_times:
        with private_file(Path(settings.client_times)) as out:
            out.writelines(times.to_json() for times in ended)
    if ended and all(times.error for times in ended):
        raise InferScopeError(f"no request was served: {ended[0].error}: {ended[0].detail}")


def _begin(settings: Settings, stage: str) -> None:
    if settings.reports_stages:
        send_to_parent(Stage(stage))


async def _serve(
    front_end: FrontEnd,
    engine: Engine,
    load: OpenLoop,
    settings: Settings,
    pacing: Pacing,
    rate_s: float,
) -> None:
    front_end.start()
    send_to_parent(Ready(rate_s * pacing.pace))
    following = asyncio.create_task(_follow(engine, pacing)) if _is_paced(settings) else None
    with contextlib.suppress(asyncio.CancelledError):
        await load.run(settings.duration_s)
    if following is not None:
        following.cancel()
    await asyncio.sleep(_SETTLE_S)
    front_end.close()


def _rate(settings: Settings, engine: Engine, tokenizer: Tokenizer) -> tuple[float, Pacing]:
    """Return the request rate in requests per second, and the initial pace."""
    if settings.rate_s is not None:
        return settings.rate_s, Pacing()
    capacity_s, share = _capacity(settings, engine, tokenizer)
    return settings.load * capacity_s, Pacing(share if _is_paced(settings) else 1.0)


def _is_paced(settings: Settings) -> bool:
    """Return whether the rate adapts to the machine; a given rate and an overload do not."""
    return settings.rate_s is None and settings.load < 1


def _capacity(settings: Settings, engine: Engine, tokenizer: Tokenizer) -> tuple[float, float]:
    """Measure the model's capacity on this machine with all requests submitted at once.

    The measurement uses a separate, unobserved engine in this process and without overlap, so that
    the observed one starts cold.

    Returns:
        Requests per second of processor time, and the share of that time other processes left.
    """
    asks = Workload(settings.seed + 1, rate_s=_PRACTICE_RATE_S).asks()
    model = engine.model
    if isinstance(model, Outline):  # a worker has the weights
        model = load_model(settings.model, settings.options)
    practising = Engine(model, replace(engine.options, overlap=False))
    limit = practising.max_model_tokens
    practice = [next(asks) for _ in range(_PRACTICE_REQUESTS)]
    began_s, began = time.monotonic(), time.thread_time()
    for ask in practice:
        prompt = tokenizer.encode(ask.prompt)[: limit - ask.max_tokens]
        practising.submit(prompt, _sampling(ask))
    while practising.has_work:
        practising.step()
    elapsed_s, busy_s = time.monotonic() - began_s, time.thread_time() - began
    return len(practice) / busy_s, min(1.0, busy_s / elapsed_s)


async def _follow(engine: Engine, pacing: Pacing) -> None:
    """Adapt the pace to the engine's queue, which grows if other processes use the machine."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        pacing.observe(engine.stats().waiting)


def _sampling(ask: PlannedRequest) -> Sampling:
    return Sampling(max_tokens=ask.max_tokens, temperature=TEMPERATURE, seed=ask.seed)
