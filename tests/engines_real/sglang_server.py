"""A real SGLang server on the CPU, run as a user would run it, and one client of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.children import child
from tests.engines_real.commands import inferscope

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
PYTHON = PEERS / "venvs" / "sgl" / "bin" / "python"
CHECKPOINT = PEERS / "tiny-qwen2"
OPTIONS = shlex.split(
    "--served-model-name tiny --device cpu --enable-metrics --enable-cache-report "
    "--context-length 2048 --max-running-requests 16 --chunked-prefill-size 512 "
    "--mem-fraction-static 0.2 --attention-backend torch_native --sampling-backend pytorch "
    "--enable-mixed-chunk --host 127.0.0.1"
)
START_S = float(os.environ.get("INFERSCOPE_START_S", "240"))
TIMEOUT_S = 120 + 2 * START_S
"""Limit of a test, which may start two servers one after the other."""
_GRACE_S = 30.0


def require(python: Path = PYTHON) -> None:
    """Skip, with the reason, where there is no SGLang with our plug-in."""
    if not python.exists() or not (CHECKPOINT / "config.json").exists():
        pytest.skip(f"no SGLang environment in {PEERS} (INFERSCOPE_PEERS)")
    probe = subprocess.run([python, "-c", "import inferscope"], cwd="/", check=False)
    if probe.returncode:
        pytest.skip(f"inferscope is not installed there: {python} -m pip install --no-deps -e .")


def environment_of(folder: Path, python: Path = PYTHON) -> dict[str, str]:
    """Return the variables under which SGLang runs on a CPU, rings in a folder."""
    return {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "INFERSCOPE_DIR": str(folder / "rings"),
        "INFERSCOPE_RING_MB": "16",
    }


@dataclass
class Server:
    """A running server."""

    url: str
    rings: Path
    log: Path
    process: subprocess.Popen[bytes]

    def pid_of(self, role: str) -> int:
        """Return the process that writes the ring of a role."""
        (ring,) = self.rings.glob(f"*/{role}-*.ring")
        return int(ring.stem.split("-")[-1])

    @functools.cached_property
    def front_end_pid(self) -> int:
        """Return the process that serves HTTP: `inferscope run` becomes it, unless it records."""
        return self.pid_of("frontend") if self.rings.exists() else self.process.pid

    @property
    def home(self) -> Path:
        """The folder of its rings, named as the engine is."""
        (home,) = (path for path in self.rings.iterdir() if path.is_dir())
        return home

    def export(self, out: Path, source: Path | None = None) -> list[dict[str, Any]]:
        """Return the rows of the export of the rings, or of a recording."""
        self.inferscope("export", str(source or self.home), "--force", "-o", str(out))
        return [json.loads(line) for line in out.read_text().splitlines()]

    def look(self) -> dict[str, Any]:
        """Attach for one look."""
        output = self.inferscope("attach", self.home.name, "--once", "--json")
        (engine,) = json.loads(output)["engines"]
        return dict(engine)

    def inferscope(self, *words: str) -> str:
        """Run a command of ours on the rings of this server; return what it prints."""
        return inferscope(self.rings, *words)

    def stop(self) -> int:
        """Ask the server to end, and see that nothing of it is left; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    is_observed: bool = True,
    record: Path | None = None,
    python: Path = PYTHON,
    **environment: str,
) -> Iterator[Server]:
    """Serve until the context ends, by `inferscope run` unless it is not to be observed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [
        *(str(python), "-m", "sglang.launch_server", "--model-path", str(CHECKPOINT)),
        *(*OPTIONS, "--port", str(port), *options),
    ]
    if is_observed:
        ours = [] if record is None else ["--record", str(record)]
        command = [sys.executable, "-m", "inferscope", "run", *ours, "--", *command]
    variables = {**environment_of(folder, python), **environment}
    with (
        log.open("wb") as out,
        child(
            command, cwd=folder, env=variables, stdout=out, stderr=out, start_new_session=True
        ) as process,
    ):
        server = Server(f"http://127.0.0.1:{port}", folder / "rings", log, process)
        _wait_until_up(server)
        yield server


def _wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health"):
            return
        time.sleep(0.5)
    raise AssertionError(f"not up after {START_S} s:\n{server.log.read_text()[-2000:]}")


@dataclass
class Answer:
    """What the client saw of one request."""

    rid: str
    sent_ns: int
    times_ns: list[int] = field(default_factory=list)
    """When the chunks with text, or with the reason of the end, came."""
    done_ns: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    text: str = ""
    waited_ns: int = 0
    """How long the client and the front end waited for a core until the first chunk came."""

    @property
    def cached(self) -> int:
        """Return the prompt's tokens that came from the cache, by the API."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


async def ask(
    session: aiohttp.ClientSession,
    server: Server,
    rid: str,
    prompt: list[int] | list[list[int]] | str,
    max_tokens: int,
    *,
    leave_after: int = 0,
    began: asyncio.Event | None = None,
    **body: Any,
) -> Answer:
    """Ask for a completion, streamed.

    Args:
        session: of the client.
        server: that answers.
        rid: the request's id.
        prompt: as the API takes it.
        max_tokens: of the answer.
        leave_after: disconnect after this many chunks; 0 for never.
        began: is set with the first chunk.
        body: other fields of the request.
    """
    asked = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rid": rid,
        **body,
    }
    answer = Answer(rid, time.monotonic_ns())
    before_ns = _waited_ns(server)
    headers = {"X-Request-Id": f"ext-{rid}"}
    async with session.post(f"{server.url}/v1/completions", json=asked, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for now_ns, event in _events(reply):
            answer.done_ns = now_ns
            if event is None:
                break
            if event.get("usage"):
                answer.usage = event["usage"]
            if not answer.times_ns:
                answer.waited_ns = _waited_ns(server) - before_ns
                if began is not None:
                    began.set()
            for choice in event["choices"]:
                answer.times_ns.append(now_ns)
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            if leave_after and len(answer.times_ns) >= leave_after:
                break
    return answer


def _waited_ns(server: Server) -> int:
    """Return how long the event loops of client and server, main threads both, waited for cores."""
    waited_ns = 0
    for pid in (os.getpid(), server.front_end_pid):
        with contextlib.suppress(OSError):
            schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
            waited_ns += int(schedstat.split()[1])
    return waited_ns


async def _events(
    reply: aiohttp.ClientResponse,
) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
    """Yield each event and when it came; None is the end."""
    async for line in reply.content:
        now_ns = time.monotonic_ns()
        if line.startswith(b"data: "):
            content = line[6:].strip()
            yield now_ns, None if content == b"[DONE]" else json.loads(content)


@dataclass
class Work:
    """Tokens computed for one request, by an export."""

    tokens: int = 0
    recomputed: int = 0
    phases: set[str] = field(default_factory=set)


def work_by_request(rows: list[dict[str, Any]]) -> dict[str, Work]:
    """Add up the slices of each request."""
    work: dict[str, Work] = defaultdict(Work)
    for row in rows:
        for share in row["shares"] if row["kind"] == "step" else ():
            mine = work[share["request"]]
            mine.tokens += share["tokens"]
            mine.recomputed += share["tokens"] if share["recomputed"] else 0
            mine.phases.add(share["phase"])
    return work
