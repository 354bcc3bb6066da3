"""At each version of an engine: one server, and an independent account of what it computes.

The account is kept by `step_spy`, within the engine and below our hooks. What is unsupported must
be what `inferscope doctor` reads from the engine's source before anything is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inferscope.adapters.needs.check import Lack, engines_of
from tests.engines_real import (
    environments,
    sglang_server,
    step_spy,
    test_transformers,
    vllm_server,
)
from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.commands import import_at_start, inferscope
from tests.engines_real.conformance import Claim, Show
from tests.engines_real.vllm_laws import of_kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM = 12
Rows = list[tuple[str, str, int, int]]
"""Rows of a step, sorted: request, phase, first position, tokens."""

SPIED = "tokens and phases of every step = a spy's in the engine"
CANCELS = "clients that hang up are cancels"
NAMED = "`inferscope doctor` names what is unsupported"
FEATURES = (
    *("`inferscope run` in front of the server", "HTTP receipt and last byte are the edges"),
    *("the client's id (`X-Request-Id`)", "tokens of slices = the API's `usage`"),
    *("every step joined and conserved, every ledger closed", "chunked and mixed prefill"),
    *("prefix cache", CANCELS, SPIED, NAMED),
)
ENGINES = {"vllm": "vLLM", "sgl": "SGLang", "tf": "transformers"}


def _claiming(specification: str) -> Any:
    kind, folder = specification.split("@")[0], environments.folder_of(specification)
    marks = [pytest.mark.conformance(ENGINES[kind], each, folder=folder) for each in FEATURES]
    return pytest.param(specification, marks=marks, id=specification)


class Served(NamedTuple):
    """A server while it runs."""

    url: str
    rings: Path
    log: Path


@contextlib.contextmanager
def serving(kind: str, python: Path, folder: Path, record: Path, spied: Path) -> Iterator[Served]:
    """Serve, observed and spied on, until the context ends."""
    hooks = folder / "spy"
    import_at_start(step_spy, hooks)
    path = os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "SPY_FILE": str(spied)}
    rings, log = folder / "rings", folder / "server.log"
    if kind == "vllm":
        vllm = python.with_name("vllm")
        with vllm_server.serving(folder, vllm=vllm, record=record, **variables) as server:
            yield Served(server.url, rings, log)
            assert vllm_server.stop(server) == 0
    elif kind == "sgl":
        sglang_server.require(python)
        options = ("--max-total-tokens", "20000")
        with sglang_server.serving(
            folder, *options, python=python, record=record, **variables
        ) as running:
            yield Served(running.url, rings, log)
            assert running.stop() in (0, -15, 137)  # up to 0.5.19 it ends itself by SIGKILL
    else:
        options = test_transformers.BATCHING
        with test_transformers.serving(
            folder, *options, python=python, record=record, **variables
        ) as port:
            yield Served(f"http://127.0.0.1:{port}", rings, log)


def asks(kind: str) -> list[Ask]:
    """Return a dozen streams, prompts of up to two chunks among them, and one that is left."""
    shared = list(range(10, 266))  # two blocks of vLLM's on a CPU
    made = []
    for number in range(NUM):
        most = 1000 if number == NUM - 1 else 8 + number
        body: dict[str, Any] = {
            "max_tokens": most,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if kind == "tf":
            words = "one two three " * (10 + 20 * (number % 6))
            body |= {
                "model": str(vllm_server.CHECKPOINT),
                "messages": [{"role": "user", "content": words}],
            }
        else:
            own = [300 + number] * (40 + 60 * number)
            prompt = shared + own if number % 3 == 0 else own
            body |= {"model": "tiny", "prompt": prompt, "ignore_eos": True}
        if kind == "sgl":
            body["rid"] = f"ask-{number}"
        made.append(Ask(f"ask-{number}", body, 5 if number == NUM - 1 else None))
    return made


def exported(record: Path, out: Path) -> list[dict[str, Any]]:
    """Return the lines of a recording's export."""
    inferscope(out.parent / "rings", "export", str(record), "-o", str(out))
    return [json.loads(line) for line in out.read_text().splitlines()]


def spied_steps(spied: Path, prompts: dict[str, int]) -> list[Rows]:
    """Return what the spy saw of these requests, with the phase that a position is in."""
    steps = []
    for line in spied.read_text().splitlines():
        rows = [
            (name, "prefill" if at < prompts[name] else "decode", at, num)
            for name, at, num in json.loads(line)
            if name in prompts
        ]
        if rows:
            steps.append(sorted(rows))
    return steps


def recorded_steps(lines: list[dict[str, Any]], prompts: dict[str, int]) -> list[Rows]:
    """Return the same of an export."""
    steps = []
    for step in sorted(of_kind(lines, "step"), key=lambda step: int(step["start_ns"])):
        rows = [
            (share["request"], share["phase"], share["context"], share["tokens"])
            for share in step["shares"]
            if share["request"] in prompts
        ]
        if rows:
            steps.append(sorted(rows))
    return steps


def hold_to_the_laws(lines: list[dict[str, Any]], asked: list[Ask]) -> dict[str, dict[str, Any]]:
    """Hold an export against the clients' account; return the requests by their clients' names."""
    (run,) = of_kind(lines, "run")
    assert (run["lost"], run["late"], run["unjoined"]) == (0, 0, 0)
    for step in of_kind(lines, "step"):
        spent = sum(share["ns"] for share in step["shares"])
        assert spent + step["padding_ns"] + step["unattributed_ns"] == step["measured_ns"]
    names = {ask.name for ask in asked}
    rows = {}
    for row in of_kind(lines, "request"):
        assert row["ledger_missing"] is None
        assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]
        if row["ttft_ledger_ns"] is not None:
            assert sum(row["ttft_ledger_ns"].values()) == row["first_token_ns"] - row["arrived_ns"]
        (name,) = {row["external_id"], row["request"]} & names or {""}
        rows[name] = row
    for ask in asked:
        row = rows[ask.name]
        assert row["arrived_at"] == "http"
        assert not row["joined_late"]
        assert ask.sent_ns <= row["arrived_ns"]
        if ask.give_up_after is not None:
            continue
        assert row["delivered_at"] == "http"
        assert row["finish"] in ("length", "stop")
        assert row["prompt_tokens"] == ask.usage["prompt_tokens"]
        assert row["output_tokens"] == ask.usage["completion_tokens"]
    return rows


def is_computed_on(seen: list[Rows], ask: Ask, request: str, prompt_tokens: int) -> bool:
    """Return whether the engine computed a request to its end, though its client had hung up."""
    ends = [at + num for rows in seen for name, _, at, num in rows if name == request]
    return max(ends) >= prompt_tokens + ask.body["max_tokens"] - 1


def is_mixed(rows: Rows) -> bool:
    """Return whether a step holds both phases."""
    return len({phase for _, phase, _, _ in rows}) > 1


def is_chunk(rows: Rows, prompts: dict[str, int]) -> bool:
    """Return whether a step holds a part of a prompt that is not its last."""
    return any(at + num < prompts[name] for name, phase, at, num in rows if phase == "prefill")


def lacks_at(python: Path, engine: str) -> tuple[Lack, ...]:
    """Return what an environment's engine lacks by the static check."""
    package = {"vLLM": "vllm", "SGLang": "sglang"}.get(engine, engine)
    (found,) = (each for each in engines_of(str(python)) if each.engine.package == package)
    assert found.is_observed
    return found.lacks


def is_of(line: str, lack: Lack) -> bool:
    """Return whether a line that the probe reported is of a feature that the check named."""
    return line.startswith(f"{lack.feature.name}: ") or any(why in line for why in lack.missing)


def wait_until_idle(rings: Path, timeout_s: float = 60) -> None:
    """Wait until no request runs: SGLang notices 2 s late that a client has hung up."""
    until_s = time.monotonic() + timeout_s
    while any(engine["num_running"] for engine in attached(rings)):
        assert time.monotonic() < until_s, "a request still runs"


def attached(rings: Path) -> list[dict[str, Any]]:
    """Return the engines of one look at the rings."""
    return list(json.loads(inferscope(rings, "attach", "--once", "--json"))["engines"])


@pytest.mark.parametrize("specification", [_claiming(each) for each in environments.VERSIONS])
def test_what_is_recorded_is_what_the_engine_computes(
    tmp_path: Path, specification: str, show: Show
) -> None:
    kind, python = specification.split("@")[0], environments.python_of(specification)
    record, spied, asked = tmp_path / "run.isr", tmp_path / "spied.jsonl", asks(kind)
    path = "/v1/chat/completions" if kind == "tf" else "/v1/completions"
    with serving(kind, python, tmp_path, record, spied) as server:
        if kind == "tf":  # loads the model
            ask_all(
                server.url, [Ask("first", {**asked[0].body, "max_tokens": 2})], at_once=1, path=path
            )
        ask_all(server.url, asked, at_once=6, path=path)
        wait_until_idle(server.rings)
        log = server.log.read_text()
    lines = exported(record, tmp_path / "run.jsonl")
    rows = hold_to_the_laws(lines, asked)
    prompts = {row["request"]: row["prompt_tokens"] for name, row in rows.items() if name}
    seen, recorded = spied_steps(spied, prompts), recorded_steps(lines, prompts)
    assert seen
    assert recorded == seen
    assert any(is_mixed(step) for step in seen)
    assert any(is_chunk(step, prompts) for step in seen)
    assert any(row["cached_tokens"] for row in rows.values())
    (left,) = (ask for ask in asked if ask.give_up_after is not None)
    row, folder = rows[left.name], environments.folder_of(specification)
    if is_computed_on(seen, left, row["request"], row["prompt_tokens"]):
        assert row["finish"] == "length"
        note = "this version computes the answer to its end"
        show(Claim(ENGINES[kind], CANCELS, "partial", note, folder))
    else:
        assert row["finish"] == "client_cancel"
    lacks = lacks_at(python, ENGINES[kind])
    messages = [
        line.split("unsupported: ", 1)[1] for line in log.splitlines() if "unsupported: " in line
    ]
    assert all(any(is_of(what, lack) for lack in lacks) for what in messages), messages
    if lacks:
        names = "; ".join(lack.feature.name for lack in lacks)
        show(Claim(ENGINES[kind], NAMED, "partial", f"without {names}", folder))
    print(f"\n{specification}: {len(seen)} steps agree; unsupported: {messages}")  # noqa: T201
