"""Engine process of the demo: engine, front end and load generator.

`inferscope demo` starts it through start.py, for one run (here) or the runs of a comparison
(rounds.py). It prints one line of JSON when the load begins, or when the start fails. Standard
input is a pipe without data: it closes when the parent exits, even if the parent is killed, and
this process then exits too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

import msgspec

from inferscope.cli.demo.link import Ready, Rounds, Settings, Stage
from inferscope.cli.demo.rounds import serve_rounds
from inferscope.cli.demo.serving import InProcessClient, capacity, observed
from inferscope.engine import Engine, FrontEnd, Tokenizer, load_engine, load_tokenizer
from inferscope.engine.server import Failed, listen_to_parent, send_to_parent
from inferscope.errors import InferScopeError
from inferscope.load import INTERVAL_S, ClientTimes, OpenLoop, Pacing, Workload, from_now_on
from inferscope.private import private_file

_SETTLE_S = 0.3


def main() -> int:
    """Run until the load has ended or standard input closes; return the process's exit code."""
    try:
        settings = msgspec.json.decode(sys.argv[1], type=Settings | Rounds)
        _prepare()
        if isinstance(settings, Rounds):
            serve_rounds(settings)
        else:
            _run(settings)
    except InferScopeError as error:
        send_to_parent(Failed(str(error), error.exit_code))
        return error.exit_code
    return 0


def _prepare() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    listen_to_parent(lambda word: None)


def _run(settings: Settings) -> None:
    _begin(settings, f"loading the model {settings.model}")
    engine = load_engine(settings.model, settings.options)
    tokenizer = load_tokenizer(settings.model)
    _begin(settings, "measuring how many requests this machine serves")
    rate_s, pacing = _rate(settings, engine, tokenizer)
    workload = Workload(settings.seed, rate_s=rate_s, pace=lambda: pacing.pace)
    ended: list[ClientTimes] = []
    asks = from_now_on(workload.asks()) if _is_paced(settings) else workload.asks()
    with observed(engine, tokenizer, name=settings.model) as front_end:
        load = OpenLoop(InProcessClient(front_end), asks, ended.append)
        asyncio.run(_serve(front_end, engine, load, settings, pacing, rate_s))
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
    capacity_s, share = capacity(settings.model, engine, tokenizer, settings.seed)
    return settings.load * capacity_s, Pacing(share if _is_paced(settings) else 1.0)


def _is_paced(settings: Settings) -> bool:
    """Return whether the rate adapts to the machine; a given rate and an overload do not."""
    return settings.rate_s is None and settings.load < 1


async def _follow(engine: Engine, pacing: Pacing) -> None:
    """Adapt the pace to the engine's queue, which grows if other processes use the machine."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        pacing.observe(engine.stats().waiting)
