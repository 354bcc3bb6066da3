"""Serve a model on an OpenAI-compatible API with the reference engine and the probe on.

One process runs the engine, and one or more processes serve HTTP; the engine never waits for them.
`inferscope attach` shows the server while it runs and afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from inferscope.cli.arg_types import above_zero, utf8
from inferscope.cli.counters import add_counters_option, start_sampler
from inferscope.cli.engine_options import add_engine_options, engine_options
from inferscope.cli.status_line import write_status
from inferscope.engine import EngineOptions
from inferscope.engine.server import ServeSettings, Supervisor, listen
from inferscope.errors import BadInput
from inferscope.probe import engine_id

_NEEDED = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn", "httptools", "zmq")
_MAX_API_SERVERS = 64
_INTERRUPTED = 130
_ANYWHERE = ("0.0.0.0", "::", "")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    defaults = EngineOptions()
    parser.add_argument(
        "model",
        type=utf8,
        metavar="MODEL",
        help="builtin, random:SHAPE or a checkpoint folder",
    )
    web = parser.add_argument_group("API")
    web.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    web.add_argument(
        "--port", type=int, default=8000, help="port; 0 selects a free one (default: %(default)s)"
    )
    web.add_argument(
        "--api-servers",
        type=int,
        default=1,
        metavar="N",
        help="number of HTTP processes (default: %(default)s)",
    )
    web.add_argument(
        "--served-model-name",
        type=utf8,
        metavar="NAME",
        help="model name for clients (default: MODEL)",
    )
    web.add_argument(
        "--drain", type=above_zero, default=5.0, metavar="SECONDS",
        help="maximum time to finish open requests when stopping (default: %(default)s)",
    )  # fmt: skip
    web.add_argument(
        "--client-timeout", type=above_zero, default=30.0, metavar="SECONDS",
        help="maximum time for a client to read its stream, or to send the headers or a MiB of "
        "the body (default: %(default)s)",
    )  # fmt: skip
    web.add_argument(
        "--max-connections", type=int, default=2048, metavar="N",
        help="maximum client connections per API server (default: %(default)s)",
    )  # fmt: skip
    engine = parser.add_argument_group("engine")
    add_engine_options(engine, defaults)
    engine.add_argument(
        "--seed", type=int, default=defaults.seed, metavar="N",
        help="seed of random weights and of requests without a seed (default: %(default)s)",
    )  # fmt: skip
    engine.add_argument(
        "--worker", action="store_true", help="run the model in a process of its own"
    )
    engine.add_argument(
        "--disaggregate",
        action="store_true",
        help="prefill in one engine process and decode in another; KV goes over shared memory",
    )
    engine.add_argument(
        "--role",
        choices=("prefill", "decode"),
        help="start one of the two engines; only the decode engine has an API",
    )
    engine.add_argument(
        "--kv-dir",
        type=Path,
        metavar="DIR",
        help="directory in which --role engines of one host find each other; the prefill engine "
        "starts first",
    )
    add_counters_option(parser.add_argument_group("counters"))
    parser.epilog = """examples:
  inferscope serve builtin
  inferscope serve random:small-100m --port 0 --api-servers 2 --max-running 32
"""


def run(options: argparse.Namespace) -> int:
    """Run the server until it is stopped."""
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
        is_disaggregated=options.disaggregate,
        kv_folder=options.kv_dir,
        options=replace(engine_options(options, seed=options.seed), role=options.role or "both"),
    )
    name = engine_id()  # before the children start: they inherit it
    listening = None if options.role == "prefill" else listen(options.host, options.port)
    start_sampler(options.counters)

    def on_ready() -> None:
        if listening is None:
            write_status(
                f"prefill engine of {settings.served_name} is ready; start the decode engine with "
                f"--role decode --kv-dir {options.kv_dir}; watch: inferscope attach {name}"
            )
            return
        port = listening.getsockname()[1]
        host = "127.0.0.1" if options.host in _ANYWHERE else options.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        ask = f'{{"model": "{settings.served_name}", "prompt": "def main", "max_tokens": 32}}'
        write_status(
            f"serving {settings.served_name} on {url}; "
            f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{ask}'; "
            f"watch: inferscope attach {name}"
        )

    has_served = asyncio.run(Supervisor(settings, listening, write_status).run(on_ready))
    return 0 if has_served else _INTERRUPTED


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65535:
        raise BadInput(f"--port is {options.port}. Give 0 to 65535.")
    if options.max_connections < 1:
        raise BadInput(f"--max-connections is {options.max_connections}. Give 1 or more.")
    if not 1 <= options.api_servers <= _MAX_API_SERVERS:
        raise BadInput(f"--api-servers is {options.api_servers}. Give 1 to {_MAX_API_SERVERS}.")
    _check_roles(options)


def _is_listening(path: Path) -> bool:
    """Return whether a process listens on a local socket."""
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.connect(str(path))
        return True
    return False


def _check_roles(options: argparse.Namespace) -> None:
    """Refuse options of disaggregated serving that exclude or miss each other."""
    if options.disaggregate and options.role:
        raise BadInput("--disaggregate starts both roles. Leave out --role.")
    if (options.role is None) != (options.kv_dir is None):
        raise BadInput(
            "--role and --kv-dir belong together. Give both, or --disaggregate for both engines."
        )
    if options.worker and (options.disaggregate or options.role):
        raise BadInput(
            "--worker holds the KV in another process, which does not share it. Leave it out."
        )
    if options.overlap and (options.disaggregate or options.role):
        raise BadInput(
            "with --overlap a step is launched before the KV of the one before is complete, so it "
            "cannot be handed over. Leave it out."
        )
    num_ranks = options.tensor_parallel * options.pipeline_parallel
    if num_ranks > 1 and (options.disaggregate or options.role):
        raise BadInput(
            f"the KV of {num_ranks} ranks is in as many processes, which do not hand it over. "
            "Leave out --tensor-parallel and --pipeline-parallel."
        )
    if options.speculative == "draft" and (options.disaggregate or options.role):
        raise BadInput(
            "the KV of a draft model is not handed over. Use --speculative ngram, or leave it out."
        )
    if options.role == "decode" and not _is_listening(options.kv_dir / "prefill" / "core"):
        raise BadInput(
            f"--kv-dir {options.kv_dir} has no prefill engine. Start it first: "
            f"inferscope serve {options.model} --role prefill --kv-dir {options.kv_dir}"
        )
