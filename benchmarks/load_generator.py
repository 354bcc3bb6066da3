"""Highest request rate of the load generator before it falls behind, independent of a server.

    python benchmarks/load_generator.py [--out FILE]

The server is the least that speaks the protocol: one process of raw asyncio that answers each
request at once with all its chunks, one write each, and computes nothing. The generator runs in
this process, on one core, as `inferscope load` does. Each step offers a rate for a few seconds; the
limit is the highest rate at which `sent - scheduled` stays below 5 ms at p99. Once with short
answers, which tells requests a second, and once with long ones, which tells chunks a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from itertools import islice
from pathlib import Path

import aiohttp

from inferscope.load.arrivals import poisson
from inferscope.load.http import HttpClient, HttpOptions, open_session
from inferscope.load.lengths import parse_lengths
from inferscope.load.open_loop import OpenLoop
from inferscope.load.planning import of_lengths, plan, stream
from inferscope.load.prompts import WordPrompts
from inferscope.load.summary import LATE_P99_MS, LoadStats, LoadSummary

CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":%d}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SHAPES = {"short answers": (4, (100, 200, 400, 800, 1200, 1600, 2400)),
          "long answers": (128, (10, 25, 50, 100, 150, 200, 300))}  # fmt: skip
CHUNK_GAP_S = 0.01
TRIES = 3
"""Number of tries per rate. A rate is missed only if all are late, as other load may delay one."""


def framed(data: bytes) -> bytes:
    """Return data as one chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server(asyncio.Protocol):
    """Server protocol that answers each request with as many chunks as it requests tokens."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        """Answer the request once it is complete."""
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if end and len(body) >= int(length or 0):
            self.received = b""
            num = int(body.partition(b'"max_tokens":')[2].split(b",")[0])
            self.transport.write(HEAD)
            self.send_chunk(num, num)

    def send_chunk(self, num: int, left: int) -> None:
        """Write a chunk now and schedule the next one a decode step later."""
        if left:
            self.transport.write(framed(CHUNK))
            asyncio.get_running_loop().call_later(CHUNK_GAP_S, self.send_chunk, num, left - 1)
        else:
            self.transport.write(framed(LAST % num) + b"0\r\n\r\n")


async def serve() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


async def offer(
    session: aiohttp.ClientSession, url: str, rate_s: float, num_tokens: int, seconds: float
) -> tuple[LoadSummary, float]:
    """Offer a rate for some seconds; return the outcome and the share of a core that it took."""
    words = WordPrompts(stream(0, "prompts"), tokens_per_word=1.0)
    compose = of_lengths(
        0, words, prompt=parse_lengths("64"), output=parse_lengths(str(num_tokens))
    )
    asks = plan(0, poisson(stream(0, "arrivals"), rate_s), compose)
    tally = LoadStats()
    client = HttpClient(session, HttpOptions(url=url, model="none"))
    load = OpenLoop(client, islice(asks, round(rate_s * seconds)), tally.add)
    began, began_cpu = time.monotonic(), time.process_time()
    await load.run(None)
    return tally.summary(), (time.process_time() - began_cpu) / (time.monotonic() - began)


async def climb(seconds: float) -> list[dict[str, object]]:
    """Raise the rate until the generator is late, for each shape of answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    url = f"http://127.0.0.1:{(await process.stdout.readline()).decode().strip()}"
    rows: list[dict[str, object]] = []
    async with open_session() as session:
        await offer(session, url, 50, 4, 1.0)  # warm
        for name, (num_tokens, rates) in SHAPES.items():
            for rate_s in rates:
                for _ in range(TRIES):
                    summary, core = await offer(session, url, rate_s, num_tokens, seconds)
                    assert summary.finished == summary.scheduled, summary.failed
                    if not summary.fell_behind:
                        break
                row = {
                    "shape": name,
                    "offered_requests_s": rate_s,
                    "requests_s": round(summary.requests_s, 1),
                    "chunks_s": round(summary.output_tok_s),
                    "late_p50_ms": _ms(summary.late.p50_ns),
                    "late_p99_ms": _ms(summary.late.p99_ns),
                    "tbt_p50_ms": _ms(summary.tbt.p50_ns),
                    "core_share": round(core, 3),
                    "kept_up": not summary.fell_behind,
                }
                print(*row.values(), sep="\t", file=sys.stderr)
                rows.append(row)
                if summary.fell_behind:
                    break
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    return rows


def _ms(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / 1e6, 3)


def main() -> None:
    """Measure, print and write JSON."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=4.0)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    rows = asyncio.run(climb(options.seconds))
    result = {
        "bound_late_p99_ms": LATE_P99_MS,
        "most": {
            name: max((row for row in rows if row["shape"] == name and row["kept_up"]),
                      key=lambda row: float(str(row["offered_requests_s"])), default=None)
            for name in SHAPES
        },
        "steps": rows,
        "machine": {
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
