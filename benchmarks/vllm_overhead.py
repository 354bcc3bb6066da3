"""Overhead on a real vLLM: `inferscope run -- vllm serve` against `vllm serve`.

Two servers of one model (70 M random weights) on the CPU, one observed, one started without us.
Bursts of streams go to them in random order, so that other load affects both alike. The unused
server is stopped (SIGSTOP) because vLLM's processes spin while they wait. Meanwhile a
reader follows the observed one's rings. From all pairs of bursts: the median ratio of the time that
the same tokens take, and from groups of ten pairs the median ratio of the 99th percentile of token
gaps as the client sees them, each with a bootstrap interval. The servers are niced: a client that
has to wait for a core sees no single tokens.

The rule (ENGINE.md): both intervals' upper ends <= 2 % on a CPU.

    python benchmarks/vllm_overhead.py PEERS --pairs 80 --out vllm_overhead.json

PEERS is a folder with an environment of vLLM (venvs/vllm) and a checkpoint (tiny-qwen2).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp
from pairs import Pair, grouped, interval, mean_ratio, tail_ratio
from probe_cost import machine

LARGEST_OVERHEAD = 0.02
_UP_S = 300.0
_AWAKE_S = 0.1
SHAPE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 2048,
}  # fmt: skip
_OPTIONS = (
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "2048"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--host", "127.0.0.1"),
    *("--enforce-eager", "--no-enable-prefix-caching", "--load-format", "dummy"),
    *("--hf-overrides", json.dumps(SHAPE)),
)
READER = """
import sys, time
from pathlib import Path
from inferscope.ring.reader import RingReader
readers = [RingReader(path) for path in Path(sys.argv[1]).glob("*/*.ring")]
while True:
    for reader in readers:
        while reader.read():
            pass
    time.sleep(0.05)
"""


class Burst(NamedTuple):
    """Measurements of the clients."""

    took_ns: int
    gaps_ns: list[int]
    """Gaps between two chunks of a stream."""


class Site(NamedTuple):
    """A server and the group of its processes."""

    url: str
    group: int


@contextmanager
def serving(peers: Path, folder: Path, *, is_observed: bool) -> Iterator[Site]:
    """Start a vLLM; stop its processes until they are needed."""
    words = [*vllm_words(peers), str(peers / "tiny-qwen2"), *_OPTIONS]
    if is_observed:
        words = [sys.executable, "-m", "inferscope", "run", "--", *words]
    with started(words, folder / f"{is_observed}.log", vllm_variables(peers)) as site:
        yield site


def vllm_words(peers: Path) -> list[str]:
    """Return the beginning of vLLM's command line."""
    return [str(peers / "venvs" / "vllm" / "bin" / "vllm"), "serve"]


def vllm_variables(peers: Path) -> dict[str, str]:
    """Return the environment of a vLLM that computes in one thread of a CPU."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{peers / 'venvs' / 'vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def started(words: list[str], log: Path, variables: Mapping[str, str]) -> Iterator[Site]:
    """Start a server on a free port; stop its processes until they are needed."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["nice", "-n", "19", *words, "--port", str(port)],
            env=variables, stdout=output, stderr=output, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(server, url, log)
        os.killpg(server.pid, signal.SIGSTOP)
        yield Site(url, server.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)
            server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _UP_S
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not come up:\n{log.read_text()[-2000:]}")


def burst(site: Site, *, batch: int, num_tokens: int, seed: int, num_prompt: int = 32) -> Burst:
    """Start a batch of streams at once on a server that serves nothing else."""
    prompts = draw_prompts(batch, num_prompt, seed)
    os.killpg(site.group, signal.SIGCONT)
    time.sleep(_AWAKE_S)
    began_ns = time.perf_counter_ns()
    times = asyncio.run(_stream_all(site.url, prompts, num_tokens))
    os.killpg(site.group, signal.SIGSTOP)
    gaps = [late - early for each in times for early, late in itertools.pairwise(each)]
    return Burst(max(each[-1] for each in times) - began_ns, gaps)


def draw_prompts(batch: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Draw prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(10, 4000) for _ in range(num_tokens)] for _ in range(batch)]


async def _stream_all(url: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    async with aiohttp.ClientSession(url) as session:
        return await asyncio.gather(*(_stream(session, prompt, num_tokens) for prompt in prompts))


async def _stream(session: aiohttp.ClientSession, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the arrival times of the chunks."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return [
            time.perf_counter_ns() async for line in answer.content if line.startswith(b"data: {")
        ]


def main() -> int:
    """Measure, print and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", type=Path)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream of a burst")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    described = machine()
    draw = random.Random(0)
    bursts: list[dict[bool, Burst]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["INFERSCOPE_DIR"] = str(folder / "rings")
        sites = {
            on: stack.enter_context(serving(options.peers, folder, is_observed=on))
            for on in (True, False)
        }
        rings = os.environ["INFERSCOPE_DIR"]
        reader = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", READER, rings])
        stack.callback(reader.wait)
        stack.callback(reader.kill)
        for number in range(-3, options.pairs):  # the first ones warm everything up
            both = {
                on: burst(sites[on], batch=options.batch, num_tokens=options.tokens, seed=number)
                for on in draw.sample([True, False], 2)
            }
            if number >= 0:
                bursts.append(both)
    whole = [Pair([both[True].took_ns], [both[False].took_ns]) for both in bursts]
    gaps = [Pair(both[True].gaps_ns, both[False].gaps_ns) for both in bursts]
    mean, tail = interval(whole, mean_ratio), interval(grouped(gaps), tail_ratio)
    passes = mean[2] <= LARGEST_OVERHEAD and tail[2] <= LARGEST_OVERHEAD
    gap_ms = statistics.median(gap for pair in gaps for gap in pair.off) / 1e6
    print(
        f"{options.pairs} pairs of {options.batch} streams of {options.tokens} tokens, "
        f"{gap_ms:.1f} ms a token unobserved\n"
        f"time per token {mean[0]:+.2%} [{mean[1]:+.2%} {mean[2]:+.2%}]\n"
        f"p99 of the gaps {tail[0]:+.2%} [{tail[1]:+.2%} {tail[2]:+.2%}]\n"
        f"rule (upper ends <= 2 %): {'passed' if passes else 'FAILED'}"
    )
    if options.out is not None:
        result = {
            "machine": described, "pairs": options.pairs, "batch": options.batch,
            "tokens": options.tokens, "gap_ms": gap_ms, "time_per_token": mean,
            "p99_gap": tail, "passes": passes,
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
