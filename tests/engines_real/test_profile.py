"""`inferscope profile PID` on real engines: their operations by phase, and answers that go on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscope.insight.kernels import BETWEEN
from inferscope.ring.discovery import find_engines
from tests.engines_real import test_transformers as transformers
from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.vllm_server import needs_vllm, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
_SECONDS = 2
_PATIENCE_S = 240.0


def profile(folder: Path, pid: int) -> dict[str, Any]:
    """Profile as a user would, by the PID of the started command; return the output."""
    out = folder / "profile.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "inferscope", "profile", str(pid)),
            *("--seconds", str(_SECONDS), "--json", "--out", str(out)),
        ],
        env={**os.environ, "INFERSCOPE_DIR": str(folder / "rings")},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    events = json.loads(out.read_bytes())["traceEvents"]
    document["steps"] = {e["name"] for e in events if e.get("pid") == "inferscope"}
    return document


def hold_to_the_laws(folder: Path, document: dict[str, Any], *, kinds: set[str]) -> None:
    """Check that the model's operations lie in the phases that were asked for."""
    by_phase: dict[str, float] = {}
    products = set()
    for row in document["rows"]:
        by_phase[row["phase"]] = by_phase.get(row["phase"], 0.0) + row["self_ns"]
        if any(word in row["name"] for word in ("mm", "linear", "matmul")):
            products.add(row["phase"])
    cost = {name: document[name] for name in ("slowdown", "stall_ns", "steps")}
    sys.stdout.write(f"profile: {by_phase}, {cost}\n")
    assert kinds <= products
    assert kinds <= document["steps"]
    # What a model does, it does in its steps; transformers samples between them.
    assert by_phase.get(BETWEEN, 0.0) < 0.3 * sum(by_phase.values())
    left = [path.name for path in folder.glob("rings/**/*") if "profile" in path.name]
    assert left == [], "the request and the answer are taken away"


def streams(name: str, num: int, *, tokens: int) -> list[Ask]:
    """Make requests whose decoding goes on for long."""
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return [
        Ask(f"{name}-{at}", {**body, "prompt": list(range(10, 110 + at)), "stream": True})
        for at in range(num)
    ]


@contextlib.contextmanager
def under_load(ask: Callable[[int], None]) -> Iterator[None]:
    """Ask, round by round, for as long as the context lasts."""
    is_over = threading.Event()

    def work() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            ask(number)

    asking = threading.Thread(target=work)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join(_PATIENCE_S)
    assert not asking.is_alive()


@needs_vllm
@pytest.mark.conformance("vLLM", "`inferscope profile PID`")
def test_vllm_worker_operations_are_listed_by_phase(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        ask_all(server.url, streams("before", 2, tokens=60), at_once=2)
        asks: list[Ask] = []

        def ask(number: int) -> None:
            asks.extend(streams(f"within-{number}", 3, tokens=400))
            ask_all(server.url, asks[-3:], at_once=3)

        with under_load(ask):
            document = profile(tmp_path, server.process.pid)
        after = streams("after", 2, tokens=60)
        ask_all(server.url, after, at_once=2)
        (worker,) = (r.identity.pid for r in server.engine.rings if r.identity.role == "worker")
        assert document["pid"] == worker
    assert all(ask.status == 200 and ask.text for ask in [*asks, *after])
    hold_to_the_laws(tmp_path, document, kinds={"decode"})


@pytest.mark.conformance("transformers", "`inferscope profile PID`")
@pytest.mark.parametrize("options", [transformers.BATCHING, ()], ids=["batching", "generate"])
def test_transformers_server_operations_are_listed_by_phase(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    if reason := transformers.reason():
        pytest.skip(reason)
    with transformers.serving(tmp_path, *options) as port:
        transformers.Ask("first", 5, 60).send(port)
        asks: list[transformers.Ask] = []

        def ask(number: int) -> None:
            new = [transformers.Ask(f"within-{number}-{at}", 5 + 9 * at, 300) for at in range(3)]
            asks.extend(new)
            transformers.ask_all(port, new)

        (engine,) = find_engines(tmp_path / "rings")
        with under_load(ask):
            document = profile(tmp_path, engine.pids[0])
        last = transformers.Ask("last", 5, 20)
        last.send(port)
    assert all(ask.status == 200 and ask.usage for ask in [*asks, last])
    hold_to_the_laws(tmp_path, document, kinds={"decode"})
