"""Cost of serving streams: the engine's step period with a front end against without.

One engine, one loop. In short stretches, in random order within each pair, the same full batch
decodes for streaming HTTP clients, through an API server in another process, or without clients.
The loop's period (from one step's start to the next one's, sending included) is taken while
exactly the whole batch decodes. The step loop has one core, all else another. Beside it, the time
spent in sending, measured within the loop: it stays true where the machine has other work.

The rule (ENGINE.md): at 2,000 chunks a second or more the median period grows by less than 2 %.

    python benchmarks/sse_cost.py --pairs 30 --out sse_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
from pairs import interval

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.core import Deliver, Output
from inferscope.engine.load import describe
from inferscope.engine.server.api import ApiSettings
from inferscope.engine.server.core import Core
from inferscope.engine.server.parent import STOP
from inferscope.probe import Probe

MODEL = "random:hidden=256,layers=6,heads=4,kv_heads=2,ffn=768,vocab=1024"
"""Model whose steps of 16 take some 7 ms. The cost of sending is independent of the step: with the
built-in model, in steps of 3 to 4 ms and at twice the chunks, it is 2 to 3 %."""
LARGEST_OVERHEAD = 0.02
FEWEST_CHUNKS_S = 2000
_WARM_STEPS = 20
_APART_S = 0.003
CLIENT = """
import asyncio, json, sys

async def stream(port, num_tokens):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x = ", "max_tokens": num_tokens, "ignore_eos": True,
                       "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
                 b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    num = 0
    while data := await reader.read(65536):
        num += data.count(b"data: ")
    writer.close()
    return num - 1

async def round(port, batch, num_tokens):
    return sum(await asyncio.gather(*(stream(port, num_tokens) for _ in range(batch))))

for line in sys.stdin:
    print(asyncio.run(round(*map(int, line.split()))), flush=True)
"""


class Periods:
    """Timer within an engine's loop while only a whole batch decodes."""

    def __init__(self, engine: Engine, batch: int, *, core: int) -> None:
        self._engine = engine
        self._core = core
        self._batch = batch
        self._step = engine.step
        self._start = engine.start
        self._before_ns = 0
        self._is_placed = False
        self.taken_ns: list[int] = []
        self.sending_ns: list[int] = []
        engine.step = self.step  # type: ignore[method-assign]
        engine.start = self.start  # type: ignore[method-assign]

    def start(self, deliver: Deliver) -> None:
        """Start the loop with timed sending."""

        def timed(outputs: list[Output]) -> None:
            if not self._is_placed:  # this is the loop's thread: it has a core of its own
                self._is_placed = True
                os.sched_setaffinity(0, {self._core})
            began_ns = time.perf_counter_ns()
            deliver(outputs)
            if len(outputs) == self._batch:
                self.sending_ns.append(time.perf_counter_ns() - began_ns)

        self._start(timed)

    def step(self) -> list[Output]:
        """Store the start of a step, and run it."""
        now_ns = time.perf_counter_ns()
        scheduler = self._engine.scheduler
        is_whole = len(scheduler.running) == self._batch and not scheduler.waiting
        is_whole = is_whole and all(request.todo == 1 for request in scheduler.running)
        if is_whole and self._before_ns:
            self.taken_ns.append(now_ns - self._before_ns)
        self._before_ns = now_ns if is_whole else 0
        return self._step()

    def take(self) -> list[int]:
        """Return the measurements since the last call, without the first steps."""
        taken, self.taken_ns = self.taken_ns, []
        return taken[_WARM_STEPS:]


def without_clients(engine: Engine, batch: int, num_tokens: int) -> None:
    """Decode the batch without a front end."""
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True, temperature=1.0)
    for _ in range(batch):
        engine.submit([5, 6, 7, 8], sampling)
        # As clients' requests come: never all in one step. Contexts of one length need no mask in
        # attention, which made this side 3 % faster for no merit of its own.
        time.sleep(_APART_S)
    while engine.has_work:
        time.sleep(0.01)


def for_clients(client: subprocess.Popen[str], port: int, batch: int, num_tokens: int) -> int:
    """Decode the batch for streaming clients; return the number of chunks that they received."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{port} {batch} {num_tokens}\n")
    client.stdin.flush()
    return int(client.stdout.readline())


def compare(
    engine: Engine,
    periods: Periods,
    client: subprocess.Popen[str],
    port: int,
    *,
    batch: int,
    pairs: int,
    steps: int,
) -> dict[str, Any]:
    """Run the pairs."""
    draw = random.Random(batch)
    num_tokens = steps + _WARM_STEPS
    ratios, alone_ns, chunks_s = [], [], []
    sending_ns: list[int] = []
    num_chunks = 0
    for pair in range(pairs + 1):
        median_ns: dict[bool, float] = {}
        for is_served in draw.sample([True, False], 2):
            periods.sending_ns.clear()
            if is_served:
                # Fewer than tokens where a front end that lags puts two into one.
                num_chunks = for_clients(client, port, batch, num_tokens)
                sending_ns += periods.sending_ns
            else:
                without_clients(engine, batch, num_tokens)
            median_ns[is_served] = statistics.median(periods.take())
        if pair:  # the first one warms everything up
            ratios.append(median_ns[True] / median_ns[False])
            alone_ns.append(median_ns[False])
            chunks_s.append(num_chunks / num_tokens * 1e9 / median_ns[True])
    overhead = interval(ratios, statistics.median)
    rate = statistics.median(chunks_s)
    return {
        "batch": batch,
        "period_ms": statistics.median(alone_ns) / 1e6,
        "chunks_s": rate,
        "sending_us": statistics.median(sending_ns) / 1e3,
        "overhead": overhead,
        "passes": rate >= FEWEST_CHUNKS_S and overhead[2] <= LARGEST_OVERHEAD,
    }


def main() -> int:
    """Measure, print a table and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200, help="per stretch")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    cores = sorted(os.sched_getaffinity(0))
    # First, so that all threads and children inherit it, ZeroMQ's too: the loop has its core alone.
    os.sched_setaffinity(0, {cores[-1]})
    words: SimpleQueue[str] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as web:
        os.environ |= {"INFERSCOPE_DIR": folder, "TOKENIZERS_PARALLELISM": "false"}
        engine = load_engine(
            options.model,
            EngineOptions(max_running=options.batch, token_budget=512, dtype=options.dtype),
        )
        info = describe(engine, name=options.model)
        engine.probe = Probe.open(info)
        periods = Periods(engine, options.batch, core=cores[0])
        core = Core(engine, info, Path(folder))
        serving = threading.Thread(target=core.serve, args=(words,))
        serving.start()
        told = ApiSettings(
            name="api-0", rank=0, handle=web.fileno(), folder=folder, model=options.model,
            served_name=options.model, drain_s=1.0, client_timeout_s=30.0,
        )  # fmt: skip
        server = subprocess.Popen(
            [sys.executable, "-m", "inferscope.engine.server.api", msgspec.json.encode(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[web.fileno()],
        )  # fmt: skip
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            assert b"Ready" in server.stdout.readline()
            port = web.getsockname()[1]
            row = compare(
                engine, periods, client, port,
                batch=options.batch, pairs=options.pairs, steps=options.steps,
            )  # fmt: skip
        finally:
            for process in (client, server):
                process.kill()
                process.wait()
            words.put(STOP)
            serving.join()
            engine.probe.close()
    middle, low, high = row["overhead"]
    print(
        f"{options.model}, batch {options.batch}, {options.pairs} pairs of {options.steps} steps, "
        f"{len(cores)} cores, load {load_before:.2f} before\n"
        f"period {row['period_ms']:.2f} ms alone; {row['chunks_s']:.0f} chunks/s; sending "
        f"{row['sending_us']:.0f} µs a step; with clients "
        f"{middle:+.2%} [{low:+.2%} {high:+.2%}]\n"
        f"rule (>= {FEWEST_CHUNKS_S} chunks/s, upper end <= 2 %): "
        f"{'passed' if row['passes'] else 'FAILED'}"
    )
    if options.out is not None:
        result = {"load_before": load_before, **vars(options), **row}
        text = json.dumps(result, indent=1, default=str)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if row["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
