"""Comparison of one engine with two, prefill and decode apart, as clients of `serve` see them.

One server after the other, each with the load of its round, in the order A B, B A, …: as `demo
--compare` does, but over HTTP, since `demo` serves in one engine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from inferscope.cli.demo.compare import fold_runs
from inferscope.cli.demo.serving import capacity
from inferscope.engine import EngineOptions, load_engine, load_tokenizer
from inferscope.fold import FinalRequest
from inferscope.insight.compare import compare
from inferscope.text import ComparisonDocument, verdict_sentence

_ENGINE = EngineOptions(token_budget=64, max_running=16)
"""Options of both sides, those of the demo: a prompt's chunk makes a step several times longer."""
_MODEL = "builtin"
_ROUNDS, _REQUESTS, _WARM_UP = 8, 20, 4
_MEASURED = "measured"
_LOAD = 0.7
"""Share of one engine's capacity."""
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
_LEG = re.compile(r"prefill-\d+-")
"""Begin of the ID of a request in the prefill engine, before its ID in the decode engine."""


def served_comparison(a: str, b: str) -> ComparisonDocument:
    """Return the comparison of two sets of options of `serve`."""
    engine = load_engine(_MODEL, _ENGINE)
    per_second, left_share = capacity(_MODEL, engine, load_tokenizer(_MODEL), 0)
    engine.close()
    rate_s = _LOAD * per_second * left_share
    runs: dict[str, list[list[FinalRequest]]] = {a: [], b: []}
    for seed in range(_ROUNDS):
        for words in (a, b) if seed % 2 == 0 else (b, a):
            print(f"round {seed + 1} of {_ROUNDS}: serve {words}", file=sys.stderr)
            runs[words].append(_run(words.split(), seed, rate_s))
    comparison = compare(runs[a], runs[b])
    shown_a, shown_b = a or "the defaults", b or "the defaults"
    return ComparisonDocument(
        a=shown_a,
        b=shown_b,
        model=_MODEL,
        seed=0,
        num_requests=_REQUESTS,
        requests_s=rate_s,
        num_rounds=_ROUNDS,
        comparison=comparison,
        verdict=verdict_sentence(comparison.headlines, a=shown_a, b=shown_b),
    )


def _run(words: list[str], seed: int, rate_s: float) -> list[FinalRequest]:
    """Serve one load; return its requests."""
    engine_id = f"lab-{os.getpid()}-{seed}"
    with _server(words, engine_id) as url:
        _load(url, "warm-up", seed=1000 + seed, rate_s=rate_s, num=_WARM_UP)
        _load(url, _MEASURED, seed=seed, rate_s=rate_s, num=_REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        requests, legs = fold_runs([engine_id, f"{engine_id}-prefill"], Path(folder) / "run.isr")
    leg_of = {_LEG.sub("", leg.request_id): leg for leg in legs}
    return [
        whole(request, leg_of.get(request.request_id))
        for request in requests
        if (request.external_id or "").startswith(_MEASURED)
    ]


def whole(request: FinalRequest, leg: FinalRequest | None) -> FinalRequest:
    """Return a request with what its prefill engine computed for it and found in its cache.

    To the decode engine all received tokens are cached.
    """
    if leg is None:
        return request
    return replace(
        request,
        prefill_ns=request.prefill_ns + leg.prefill_ns,
        decode_ns=request.decode_ns + leg.decode_ns,
        cached_tokens=leg.cached_tokens,
    )


@contextmanager
def _server(words: list[str], engine_id: str) -> Iterator[str]:
    """Start a server; yield its URL, and stop it."""
    command = [
        sys.executable, "-m", "inferscope", "serve", _MODEL, "--port", "0", *words,
        "--token-budget", f"{_ENGINE.token_budget}", "--max-running", f"{_ENGINE.max_running}",
    ]  # fmt: skip
    env = {**os.environ, "INFERSCOPE_ENGINE_ID": engine_id}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := _ADDRESS.search(line):
                yield found.group()
                break
        else:
            raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _load(url: str, name: str, *, seed: int, rate_s: float, num: int) -> None:
    command = [
        sys.executable, "-m", "inferscope", "load", url, "--seed", str(seed), "--rate", f"{rate_s}",
        "--requests", str(num), "--ignore-eos", "--run-name", name,
    ]  # fmt: skip
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
