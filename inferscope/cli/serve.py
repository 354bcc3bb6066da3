"""Serve a model with the reference engine behind an OpenAI-compatible API, the probe on.

One process runs the engine, one or more speak HTTP; the engine never waits for them. What they do
can be watched with `inferscope attach` while they do it, and afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util

from inferscope.cli.counters import add_counters_option, sample_beside
from inferscope.cli.engine_options import add_cache_options
from inferscope.cli.numbers import above_zero
from inferscope.cli.saying import say
from inferscope.engine.config import EngineOptions
from inferscope.engine.server.launch import ServeSettings, Supervisor, listen
from inferscope.errors import BadInput
from inferscope.probe.identity import engine_id

_NEEDED = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn", "httptools", "zmq")
_MOST_API_SERVERS = 64
_INTERRUPTED = 130
_ANYWHERE = ("0.0.0.0", "::", "")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    usual = EngineOptions()
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="builtin, random:SHAPE, or a checkpoint's folder",
    )
    web = parser.add_argument_group("API")
    web.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    web.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    web.add_argument(
        "--api-servers", type=int, default=1, metavar="N", help="processes for HTTP (%(default)s)"
    )
    web.add_argument("--served-model-name", metavar="NAME", help="for clients (default: MODEL)")
    web.add_argument(
        "--drain", type=above_zero, default=5.0, metavar="SECONDS",
        help="for requests under way when stopping (%(default)s)",
    )  # fmt: skip
    web.add_argument(
        "--client-timeout", type=above_zero, default=30.0, metavar="SECONDS",
        help="that a client may leave its stream unread, or take for a head or a MiB of a body "
        "(%(default)s)",
    )  # fmt: skip
    web.add_argument(
        "--max-connections", type=int, default=2048, metavar="N",
        help="of clients, for each API server (%(default)s)",
    )  # fmt: skip
    engine = parser.add_argument_group("engine")
    for name, default, text in (
        ("max-running", usual.max_running, "requests that hold KV blocks at once"),
        ("token-budget", usual.token_budget, "tokens that one step computes at most"),
        ("max-waiting", usual.max_waiting, "requests that may queue; a further one gets 429"),
        ("seed", usual.seed, "for random weights, and for requests that name none"),
        ("threads", usual.num_threads, "CPU threads of one operator"),
    ):
        engine.add_argument(f"--{name}", type=int, default=default, help=f"{text} (%(default)s)")
    engine.add_argument("--num-blocks", type=int, help="KV blocks (default: by model and memory)")
    add_cache_options(engine)
    engine.add_argument(
        "--max-model-len", type=int, help="tokens of prompt and output (default: the model's)"
    )
    engine.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)"
    )
    engine.add_argument(
        "--worker", action="store_true", help="run the model in a process of its own"
    )
    engine.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU if there is one), cpu, cuda:0, … (%(default)s)",
    )
    add_counters_option(parser.add_argument_group("beside it"))
    parser.epilog = """examples:
  inferscope serve builtin
  inferscope serve random:small-100m --port 0 --api-servers 2 --max-running 32
"""


def run(options: argparse.Namespace) -> int:
    """Run the server until somebody stops it."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    _check(options)
    settings = ServeSettings(
        model=options.model,
        served_name=options.served_model_name or options.model,
        host=options.host,
        port=options.port,
        num_api_servers=options.api_servers,
        drain_s=options.drain,
        client_timeout_s=options.client_timeout,
        max_connections=options.max_connections,
        in_worker=options.worker,
        options=EngineOptions(
            token_budget=options.token_budget,
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            num_blocks=options.num_blocks,
            block_tokens=options.block_tokens,
            prefix_cache=not options.no_prefix_cache,
            dtype=options.dtype,
            device=options.device,
            seed=options.seed,
            max_model_tokens=options.max_model_len,
            num_threads=options.threads,
        ),
    )
    name = engine_id()  # before the children start: they inherit it
    listening = listen(options.host, options.port)
    sample_beside(options.counters)
    port = listening.getsockname()[1]

    def on_ready() -> None:
        host = "127.0.0.1" if options.host in _ANYWHERE else options.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        ask = f'{{"model": "{settings.served_name}", "prompt": "def main", "max_tokens": 32}}'
        say(
            f"serving {settings.served_name} on {url}; "
            f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{ask}'; "
            f"watch: inferscope attach {name}"
        )

    has_served = asyncio.run(Supervisor(settings, listening, say).run(on_ready))
    return 0 if has_served else _INTERRUPTED


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65535:
        raise BadInput(f"--port is {options.port}. Give 0 to 65535.")
    if options.max_connections < 1:
        raise BadInput(f"--max-connections is {options.max_connections}. Give 1 or more.")
    if not 1 <= options.api_servers <= _MOST_API_SERVERS:
        raise BadInput(f"--api-servers is {options.api_servers}. Give 1 to {_MOST_API_SERVERS}.")
