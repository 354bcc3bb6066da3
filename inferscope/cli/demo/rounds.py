"""Runs of a comparison in the engine's process: one engine after the other, each under its load."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Sequence
from itertools import islice

from inferscope.cli.demo.link import PlannedRun, Ready, Rounds, Stage
from inferscope.cli.demo.serving import InProcessClient, capacity, observed, practice, practise
from inferscope.engine import Tokenizer, load_engine, load_tokenizer
from inferscope.engine.server import send_to_parent
from inferscope.errors import InferScopeError
from inferscope.load import (
    MIX,
    ClientTimes,
    OpenLoop,
    PlannedRequest,
    of_kind,
    plan,
    poisson,
    stream,
)
from inferscope.probe import ENGINE_ID_VARIABLE

_SETTLE_S = 0.3
_WARM_UP_REQUESTS = 2
_REQUESTS = 20
"""Requests of a run without a duration."""
_RING_MB = 4.0
_RING_REQUEST_MB = 0.05
"""Ring size in MB and its part for each request, a multiple of what the demo writes."""


def serve_rounds(settings: Rounds) -> None:
    """Serve all runs, after checking that the model and each set of options fit.

    Raises:
        BadInput: the model is unknown, or a set of options is impossible for it.
        InferScopeError: no request of a run was served.
    """
    send_to_parent(Stage(f"loading the model {settings.model}"))
    tokenizer = load_tokenizer(settings.model)
    for options in dict.fromkeys(run.options for run in settings.runs):
        load_engine(settings.model, options).close()
    send_to_parent(Stage("measuring how many requests this machine serves"))
    rate_s = settings.rate_s or _rate(settings, tokenizer)
    num = _REQUESTS
    if settings.duration_s is not None:
        num = max(1, round(rate_s * settings.duration_s))
    os.environ.setdefault("INFERSCOPE_RING_MB", f"{_RING_MB + _RING_REQUEST_MB * num:.0f}")
    send_to_parent(Ready(rate_s, num))
    for run in settings.runs:
        send_to_parent(Stage(run.label))
        serve_run(run, settings.model, tokenizer, list(run_load(run, rate_s, num)))


def _rate(settings: Rounds, tokenizer: Tokenizer) -> float:
    """Return the load's rate: fixed for all runs, whatever other processes do meanwhile."""
    first = settings.runs[0]
    engine = load_engine(settings.model, first.options)
    per_second, left_share = capacity(settings.model, engine, tokenizer, first.seed)
    engine.close()
    return settings.load * per_second * left_share


def run_load(run: PlannedRun, rate_s: float, num: int) -> Iterator[PlannedRequest]:
    """Return a run's load: independent random arrivals of all kinds of requests."""
    arrivals = islice(poisson(stream(run.seed, "arrivals"), rate_s), num)
    return plan(run.seed, arrivals, of_kind(run.seed, MIX), run=run.engine_id)


def serve_run(
    run: PlannedRun, model: str, tokenizer: Tokenizer, asks: Sequence[PlannedRequest]
) -> None:
    """Serve one run's load on a new, observed engine.

    Raises:
        InferScopeError: no request was served.
    """
    gc.collect()  # the engine of the run before, away from what is measured
    os.environ[ENGINE_ID_VARIABLE] = run.engine_id  # of a worker's ring too
    engine = load_engine(model, run.options)
    practise(engine, tokenizer, practice(run.seed, _WARM_UP_REQUESTS))
    ended: list[ClientTimes] = []
    with observed(engine, tokenizer, name=model) as front_end:
        client = InProcessClient(front_end, ignores_eos=True)
        load = OpenLoop(client, asks, ended.append)

        async def serve() -> None:
            front_end.start()
            await load.run(None)
            await asyncio.sleep(_SETTLE_S)
            front_end.close()

        asyncio.run(serve())
    if ended and all(times.error for times in ended):
        raise InferScopeError(f"no request was served: {ended[0].error}: {ended[0].detail}")
