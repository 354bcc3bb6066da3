"""Effect of misbehaving readers and clients on the engine's steps, which must be none.

    stopped reader      a recorder that follows the ring is SIGSTOPped, against one that runs
    killed collector    `inferscope collect` dies by SIGKILL, against one that runs
    full disk           its pins fall on a disk that takes no more, against one that takes them
    deaf client         half of a server's streams are never read, against all being read

Stretches with and without the misfortune alternate in random order; from all pairs the ratio of the
99th percentiles of the step times, with a bootstrap interval. The engine has one core, the rest
another. The benchmark passes if the interval contains 1 or lies below it.

    python benchmarks/reader_harm.py --pairs 20 --out reader_harm.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pairs import Pair, interval, p99, p99_ratio
from probe_cost import machine
from probe_overhead import Decoding

from inferscope.engine import Engine, EngineOptions, load_engine
from inferscope.probe import EngineInfo, Probe
from inferscope.records import StepSpan, decode
from inferscope.ring.reader import Frame, RingReader

BATCH = 16
_READY_S = 30.0
_SETTLE_S = 1.5
"""Seconds in which a just started collector reads history."""
_NO_LIMIT = resource.RLIM_INFINITY


def command(*arguments: str) -> list[str]:
    """Return one of our command lines, to run on the last core."""
    return [sys.executable, "-m", "inferscope", *arguments]


def set_aside(pid: int) -> None:
    """Pin a process to the last core."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(pid, {(os.cpu_count() or 1) - 1})


def start(*arguments: str, until: str) -> subprocess.Popen[str]:
    """Start a command and wait until it reports on stderr that it is ready."""
    process = subprocess.Popen(
        command(*arguments), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    set_aside(process.pid)
    assert process.stderr is not None
    deadline_s = time.monotonic() + _READY_S
    for line in process.stderr:
        if until in line:
            return process
        assert time.monotonic() < deadline_s, f"{arguments[0]} does not start: {line}"
    raise AssertionError(f"{arguments[0]} has ended")


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process, stopped or not."""
    process.kill()
    process.wait()


@contextmanager
def stopped_reader(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Yield functions that stop a recorder or resume it."""
    with (folder / "said.txt").open("wb") as output:
        process = subprocess.Popen(
            command("record", str(os.getpid()), "-o", str(folder / "run.isr")), stderr=output
        )
    set_aside(process.pid)
    time.sleep(2.0)
    yield lambda is_on: process.send_signal(signal.SIGSTOP if is_on else signal.SIGCONT)
    end(process)


@contextmanager
def killed_collector(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Yield functions that kill a collector or start another one."""
    file = folder / "collect.yaml"
    file.write_text("exporters: {prometheus: {port: 0}}\npins: off\n", encoding="utf-8")
    running: list[subprocess.Popen[str]] = []

    def switch(is_on: bool) -> None:
        if is_on and running:
            end(running.pop())
        elif not is_on and not running:
            running.append(start("collect", "--config", str(file), until="collecting"))
            time.sleep(_SETTLE_S)

    switch(False)
    yield switch
    switch(True)


@contextmanager
def full_disk(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Yield functions that let a collector pin with or without free space."""
    file = folder / "collect.yaml"
    pins = f"pins: {{folder: {folder}/pins, before_s: 5, after_s: 0.1, on: [signal]}}"
    file.write_text(f"exporters: {{prometheus: {{port: 0}}}}\n{pins}\n", encoding="utf-8")
    process = start("collect", "--config", str(file), until="collecting")

    def switch(is_on: bool) -> None:
        limit = 4096 if is_on else _NO_LIMIT
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, _NO_LIMIT))
        process.send_signal(signal.SIGUSR1)

    yield switch
    end(process)


MISFORTUNES = {
    "stopped reader": stopped_reader,
    "killed collector": killed_collector,
    "full disk": full_disk,
}


def against_readers(engine: Engine, probe: Probe, name: str, *, pairs: int, steps: int) -> Any:
    """Yield pairs of stretches of an engine in this process."""
    draw = random.Random(name)
    with tempfile.TemporaryDirectory() as folder, MISFORTUNES[name](Path(folder)) as switch:
        for _ in range(pairs):
            decoding = Decoding(engine, probe, BATCH, most_steps=2 * steps + 16)
            took = {}
            for is_on in draw.sample([True, False], 2):
                switch(is_on)
                took[is_on] = decoding.run(probe, steps)
            decoding.close()
            # As many steps of each: what is not slowed down comes to longer contexts in its time.
            num = min(len(taken) for taken in took.values())
            yield Pair(took[True][:num], took[False][:num])


# --- a server whose clients do not read -----------------------------------------------------------


class Stream:
    """One streaming request on a socket of its own."""

    def __init__(self, port: int, num_tokens: int) -> None:
        """Send the request without reading the response."""
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect(("127.0.0.1", port))
        asked = {"prompt": "x = ", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def read(self) -> bool:
        """Read the available bytes; return False at the end."""
        try:
            return b"[DONE]" not in self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True


def step_times(port: int, ring: Path, *, num_deaf: int, seconds: float) -> list[int]:
    """Stream to a full batch of clients, some of which do not read; return the steps' ns."""
    streams = [Stream(port, 1500) for _ in range(BATCH // 2)]
    time.sleep(0.3)
    began_ns = time.monotonic_ns()
    hearing = streams[num_deaf:]
    while time.monotonic_ns() - began_ns < seconds * 1e9 and all(s.read() for s in hearing):
        time.sleep(0.005)
    ended_ns = time.monotonic_ns()
    for stream in streams:
        stream.socket.close()
    time.sleep(0.5)
    reader = RingReader(ring)
    frames: list[Frame] = []
    while read := reader.read():
        frames += [frame for frame in read if isinstance(frame, Frame)]
    reader.close()
    spans = [decode(frame.code, frame.payload) for frame in frames if frame.code == StepSpan.CODE]
    return [
        span.ready_ns - span.launch_start_ns
        for span in spans
        if isinstance(span, StepSpan)
        and began_ns < span.launch_start_ns
        and span.ready_ns < ended_ns
    ]


def against_clients(rings: Path, *, pairs: int, seconds: float) -> Iterator[Pair]:
    """Yield pairs of stretches of a server."""
    draw = random.Random(0)
    log = rings / "serve.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command("serve", "builtin", "--port", "0", "--max-running", str(BATCH)),
            env={**os.environ, "INFERSCOPE_ENGINE_ID": "served"},
            stderr=output,
        )
    try:
        deadline_s = time.monotonic() + _READY_S
        while not (found := re.search(r"127\.0\.0\.1:(\d+);", log.read_text(encoding="utf-8"))):
            assert time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.1)
        (ring,) = (rings / "served").glob("core-*.ring")
        for _ in range(pairs):
            took = {}
            for is_on in draw.sample([True, False], 2):
                num_deaf = BATCH // 4 if is_on else 0
                took[is_on] = step_times(
                    int(found.group(1)), ring, num_deaf=num_deaf, seconds=seconds
                )
            # As many steps of each: what is not slowed down comes to longer contexts in its time.
            num = min(len(taken) for taken in took.values())
            yield Pair(took[True][:num], took[False][:num])
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def row(name: str, pairs: list[Pair]) -> dict[str, Any]:
    """Return the results of the pairs."""
    middle, low, high = interval(pairs, p99_ratio)
    return {
        "misfortune": name,
        "steps": sum(len(pair.on) for pair in pairs),
        "p99_ms": p99([ns for pair in pairs for ns in pair.off]) / 1e6,
        "p99_change": [middle, low, high],
        "no_harm_seen": low <= 0,
    }


def main() -> int:
    """Measure, print a table and write JSON; return 1 if steps are slowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120, help="per stretch")
    parser.add_argument("--seconds", type=float, default=1.5, help="per stretch of the server")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    about = machine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        os.environ["INFERSCOPE_ENGINE_ID"] = "measured"
        engine = load_engine(
            "builtin",
            EngineOptions(
                max_running=BATCH, token_budget=64, num_blocks=BATCH * 32, dtype="float32",
                prefix_cache=False,
            ),
        )  # fmt: skip
        probe = Probe.open(EngineInfo(0, "bench", model="builtin"))
        if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(0, set(range((os.cpu_count() or 1) - 1)))
        for name in MISFORTUNES:
            pairs = against_readers(engine, probe, name, pairs=options.pairs, steps=options.steps)
            rows.append(row(name, list(pairs)))
        probe.close()
        served = against_clients(Path(folder), pairs=options.pairs, seconds=options.seconds)
        rows.append(row("deaf client", list(served)))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'misfortune':<18}{'steps':>7}{'p99 ms':>8}  p99 with it: change [95 %]")
    for each in rows:
        middle, low, high = each["p99_change"]
        verdict = "no harm seen" if each["no_harm_seen"] else "HARM"
        print(
            f"{each['misfortune']:<18}{each['steps']:>7}{each['p99_ms']:>8.2f}  "
            f"{middle:+.1%} [{low:+.1%} {high:+.1%}]  {verdict}"
        )
    if options.out is not None:
        result = {"machine": about, "pairs": options.pairs, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(each["no_harm_seen"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
