"""On a real `transformers serve`: every token counted, every nanosecond explained."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.exported import Exported
from tests.children import child
from tests.engines_real.folded import fold

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
PYTHON = PEERS / "venvs" / "tf" / "bin" / "python"
CHECKPOINT = PEERS / "tiny-qwen2"
_UP_S = float(os.environ.get("INFERSCOPE_START_S", "90"))
_SEND_NS = 50_000_000
BATCHING = ("--continuous-batching", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512")


def reason() -> str:
    """Return why nothing of this can be run here; empty if it can."""
    if not (PYTHON.exists() and CHECKPOINT.exists()):
        return f"no transformers or no checkpoint under {PEERS}: set INFERSCOPE_PEERS"
    done = subprocess.run([PYTHON, "-c", "import inferscope.probe"], capture_output=True, text=True)
    return "" if not done.returncode else f"{PYTHON} has no inferscope: {done.stderr[-200:]}"


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    if why := reason():
        pytest.skip(why)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MIXED = pytest.mark.conformance("transformers", "chunked and mixed prefill")


@dataclass
class Ask:
    """A request, and what became of it by the client's own clock and the server's `usage`."""

    name: str
    words: int
    max_tokens: int
    is_stream: bool = True
    give_up_after: int | None = None
    model: str = str(CHECKPOINT)
    status: int = 0
    sent_ns: int = 0
    ended_ns: int = 0
    usage: dict[str, int] = field(default_factory=dict)

    def send(self, port: int) -> None:
        """Ask, and read the answer to its end or until enough is read."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "one two three " * self.words + self.name}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.is_stream,
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.sent_ns = time.monotonic_ns()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json", "X-Request-Id": self.name},
        )
        answer = connection.getresponse()
        self.status = answer.status
        num_events = 0
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            if text.startswith("{"):
                self.usage = json.loads(text).get("usage") or self.usage
                num_events += 1
            if self.give_up_after is not None and num_events >= self.give_up_after:
                break
        connection.close()
        self.ended_ns = time.monotonic_ns()


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    python: Path = PYTHON,
    record: Path | None = None,
    **variables: str,
) -> Iterator[int]:
    """Serve, observed, until the context ends; give the port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    program = python.with_name("transformers")
    ours = [] if record is None else ["--record", str(record)]
    words = [sys.executable, "-m", "inferscope", "run", *ours, "--", str(program), "serve"]
    environment = {
        **os.environ, "INFERSCOPE_DIR": str(folder / "rings"), "INFERSCOPE_RING_MB": "16",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    with (
        (folder / "server.log").open("wb") as log,
        child(
            [*words, *options, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        ) as server,
    ):
        try:
            _wait(server, port, folder)
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)


def _wait(server: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    until_s = time.monotonic() + _UP_S
    while time.monotonic() < until_s:
        assert server.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.2)
    raise AssertionError((folder / "server.log").read_text())


def ask_all(port: int, asks: list[Ask]) -> None:
    threads = [threading.Thread(target=ask.send, args=(port,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hold_to_the_laws(exported: Exported, asks: list[Ask]) -> dict[str, dict[str, Any]]:
    exported.check_sums()
    for ask in asks:
        row = exported.requests[ask.name]
        assert row["external_id"] == ask.name
        assert not row["joined_late"]
        assert ask.sent_ns <= row["arrived_ns"]
        if ask.give_up_after is None:
            assert exported.surplus(ask.name) == 0
            assert ask.status == 200
            assert row["finish"] == "length"
            assert (row["arrived_at"], row["delivered_at"]) == ("http", "http")
            assert row["prompt_tokens"] == ask.usage["prompt_tokens"]
            assert row["output_tokens"] == ask.usage["completion_tokens"] == ask.max_tokens
            # The client may have read the last byte before the server's send returned.
            assert row["delivered_ns"] <= ask.ended_ns + _SEND_NS
        else:
            # Tokens between the client's disconnect and its detection were not delivered.
            assert exported.surplus(ask.name) >= 0
            assert row["finish"] == "client_cancel"
            assert 0 < row["output_tokens"] < ask.max_tokens
    return exported.requests


@pytest.mark.conformance("transformers", "what was asked of the sampling (`gen_ai.request.*`)")
@pytest.mark.conformance("transformers", "`inferscope run` in front of the server")
@pytest.mark.conformance("transformers", "HTTP receipt and last byte are the edges")
@pytest.mark.conformance("transformers", "the client's id (`X-Request-Id`)")
@pytest.mark.conformance("transformers", "tokens of slices = the API's `usage`")
@pytest.mark.conformance("transformers", "every step joined and conserved, every ledger closed")
@pytest.mark.conformance("transformers", "clients that hang up are cancels")
@pytest.mark.parametrize(
    "options", [pytest.param(BATCHING, marks=MIXED), ()], ids=["batching", "generate"]
)
def test_served_request_is_recorded_from_first_byte_to_last(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    asks = [
        Ask(f"ask-{number}", 10 + 90 * (number % 3), 24 + number, is_stream=number % 4 != 3)
        for number in range(8)
    ]
    asks.append(Ask("ask-gives-up", 10, 1500, give_up_after=5))
    with serving(tmp_path, *options) as port:
        first = Ask("ask-first", 5, 4, is_stream=False)
        first.send(port)
        ask_all(port, asks)
        time.sleep(1)
        last = Ask("ask-last", 5, 4)
        last.send(port)
        refused = Ask("ask-refused", 1, 4)
        refused.max_tokens = {"not": "a number"}  # type: ignore[assignment]
        refused.send(port)
        time.sleep(1)
    assert "inferscope: the probe failed" not in (tmp_path / "server.log").read_text()
    rings = next((tmp_path / "rings").iterdir())
    exported = Exported(rings)
    hold_to_the_laws(exported, [first, *asks, last])
    folded = fold(rings)
    for ask in asks:
        expected = {"stream": ask.is_stream, "max_tokens": ask.max_tokens, "temperature": 0}
        assert folded.asked(ask.name) == expected
    phases = [{share["phase"] for share in step["shares"]} for step in exported.steps]
    if options:
        assert {"prefill", "decode"} in phases, "no step was mixed: nothing is tested"


@pytest.mark.parametrize("options", [BATCHING, ()], ids=["batching", "generate"])
def test_each_of_two_served_models_is_an_engine_of_its_own(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    models = [tmp_path / name for name in ("first", "second")]
    for model in models:
        shutil.copytree(CHECKPOINT, model)
    asks = [Ask(f"ask-{at}", 10, 12, model=str(models[at % 2])) for at in range(6)]
    with serving(tmp_path, *options) as port:
        for ask in asks:  # the first two load a model each
            ask.send(port)
        if not options:
            ask_all(port, again := [replace(ask, name=f"{ask.name}-again") for ask in asks])
            asks += again
        time.sleep(1)
    assert "inferscope: " not in (tmp_path / "server.log").read_text().replace(
        "inferscope: engine ID", ""
    )
    homes = sorted((tmp_path / "rings").iterdir(), key=lambda home: len(home.name))
    assert [home.name for home in homes] == [homes[0].name, f"{homes[0].name}-2"]
    for home, model in zip(homes, models, strict=True):
        exported = Exported(home)
        rows = hold_to_the_laws(exported, [ask for ask in asks if ask.model == str(model)])
        assert len(rows) == len(asks) // 2
