"""A real vLLM server on the CPU, run as a user would run it, and what it left when it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inferscope.ring.discovery import EngineRings, find_engines
from tests.children import child

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
VLLM = PEERS / "venvs" / "vllm" / "bin" / "vllm"
CHECKPOINT = PEERS / "tiny-qwen2"
_UP_S = float(os.environ.get("INFERSCOPE_START_S", "200"))
_GRACE_S = 30.0
_LAST_WORD_S = 1.0
"""vLLM kills some of its processes at once, also one that has just sent its last byte."""
_OPTIONS = [
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "2048"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--host", "127.0.0.1"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]

needs_vllm = pytest.mark.skipif(
    not (VLLM.exists() and CHECKPOINT.exists()),
    reason=f"no vLLM or no checkpoint under {PEERS}: set INFERSCOPE_PEERS",
)


@dataclass
class Server:
    """A server while it runs."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    words: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The folder of its rings, named as the engine is."""
        (home,) = (path for path in (self.folder / "rings").iterdir() if path.is_dir())
        return home

    @property
    def engine(self) -> EngineRings:
        """Its rings."""
        (engine,) = find_engines(self.folder / "rings")
        return engine

    def get(self, path: str) -> str:
        """Fetch a page."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        """Return what the server wrote."""
        return (self.folder / "server.log").read_text()


def environment(folder: Path, vllm: Path = VLLM) -> dict[str, str]:
    """Return the variables under which vLLM runs on a CPU, without a network, rings in a folder."""
    return {
        **os.environ,
        "INFERSCOPE_DIR": str(folder / "rings"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{vllm.parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextlib.contextmanager
def serving(
    folder: Path,
    *options: str,
    is_observed: bool = True,
    vllm: Path = VLLM,
    record: Path | None = None,
    **variables: str,
) -> Iterator[Server]:
    """Serve until the context ends, then stop the server and all it started."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(vllm), "serve", str(CHECKPOINT), *_OPTIONS, "--port", str(port), *options]
    if is_observed:
        ours = [] if record is None else ["--record", str(record)]
        words = [sys.executable, "-m", "inferscope", "run", *ours, "--", *words]
    with (
        (folder / "server.log").open("wb") as log,
        child(
            words,
            stdout=log,
            stderr=log,
            env={**environment(folder, vllm), **variables},
            cwd=folder,
            start_new_session=True,
        ) as process,
    ):
        server = Server(f"http://127.0.0.1:{port}", folder, process)
        try:
            _wait_until_up(server)
            yield server
        finally:
            stop(server)


def stop(server: Server) -> int:
    """Ask the server to end, and see that nothing of it is left; return its exit code."""
    process = server.process
    if process.poll() is None:
        time.sleep(_LAST_WORD_S)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def export(server: Server, source: Path | None = None) -> list[dict[str, Any]]:
    """Return the JSON lines of what the rings, or a recording, hold."""
    out = server.folder / "run.jsonl"
    source = source or server.home
    subprocess.run(
        [sys.executable, "-m", "inferscope", "export", str(source), "--force", "-o", str(out)],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def _wait_until_up(server: Server) -> None:
    until = time.monotonic() + _UP_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.5)
    pytest.fail(f"vLLM did not come up:\n{server.log()[-3000:]}")
