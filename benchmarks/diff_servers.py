"""False alarms of `diff` on pairs of equal loads on two equal servers, in real time.

Two servers of the same command run at once. Each pair sends them the same requests, in segments
that alternate, B A A B B A …: other processes disturb both sides alike, and no server is under load
while the other is. A pair is a false alarm if any headline differs, as in `diff_truth.py`. Segments
have prompts of their own, so a prefix cache finds nothing but the chat template.

    python benchmarks/diff_servers.py --pairs 40 --out diff_servers.json -- \
        vllm serve MODEL --max-num-batched-tokens 256 --port {port}

The recordings stay beside --out as OUT.a.isr and OUT.b.isr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_right
from contextlib import ExitStack, suppress
from pathlib import Path

from diff_truth import LEVEL, compared, differing, machine, score

from inferscope.errors import BadInput
from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.compare import Columns, ColumnsBuilder, check_enough
from inferscope.readers import catch_up, open_source

_FIRST_SEED = 7000
_SEGMENT_S = 3.0
_READY_S, _END_S = 300.0, 60.0


class Server:
    """One of the two servers, observed and recorded."""

    def __init__(self, command: list[str], folder: Path) -> None:
        """Start it.

        Args:
            command: with `{port}` in the place of its port.
            folder: for its rings, its log and its recording.
        """
        folder.mkdir(mode=0o700)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.record = folder / "run.isr"
        words = [word.replace("{port}", str(self._port)) for word in command]
        run = [sys.executable, "-m", "inferscope", "run", "--record", str(self.record), "--"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*run, *words], stdout=self._log, stderr=self._log, start_new_session=True,
            env={**os.environ, "INFERSCOPE_DIR": str(folder / "rings")},
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self._port}"

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it has ended, or does not answer.
        """
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                return
            time.sleep(0.5)
        raise RuntimeError(f"no answer of {self.url}; see {self._log.name}")

    def load(self, name: str, *, seed: int, rate: float) -> bool:
        """Send one segment; return whether its requests left late.

        Raises:
            CalledProcessError: no request finished.
        """
        words = (
            "load", self.url, "--rate", str(rate), "--duration", str(_SEGMENT_S), "--seed",
            str(seed), "--run-name", name, "--prompt-tokens", "32..256", "--output-tokens", "8..48",
            "--json",
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "inferscope", *words], check=True, capture_output=True, text=True
        )
        return bool(json.loads(done.stdout)["summary"]["fell_behind"])

    def stop(self) -> None:
        """Stop it, and wait until its recording is complete."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


class PairColumns:
    """Sink that keeps the requests of each pair apart, by when they arrived."""

    def __init__(self, starts_ns: list[int]) -> None:
        """Take the time at which each pair began."""
        self._starts_ns = starts_ns
        self._builders = [ColumnsBuilder() for _ in starts_ns]

    def on_step(self, step: FinalStep) -> None:
        """Keep a step with the requests of its pair."""
        at = bisect_right(self._starts_ns, step.start_ns) - 1
        if at >= 0:
            self._builders[at].on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request of a pair."""
        at = bisect_right(self._starts_ns, request.arrived_ns) - 1
        if at >= 0 and request.external_id:
            self._builders[at].add(request)

    def columns(self) -> list[Columns | None]:
        """Return the requests of each pair, None where they are too few to compare."""
        return [enough(builder.columns()) for builder in self._builders]


def enough(found: Columns) -> Columns | None:
    """Return requests if they are enough for a comparison, else None."""
    try:
        check_enough(found, "a pair")
    except BadInput:
        return None
    return found


def columns_of(record: Path, starts_ns: list[int]) -> list[Columns | None]:
    """Return the requests of a server's recording by pair."""
    sink = PairColumns(starts_ns)
    source = open_source(record, sinks=(sink,))
    catch_up(source)
    source.close()
    source.collector.end()
    return sink.columns()


def main() -> int:
    """Send all pairs, compare them and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--segments", type=int, default=4, help="per side of a pair, of 3 s each")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="after --; {port} is replaced")
    options = parser.parse_args()
    began_s, starts_ns, num_late = time.monotonic(), list[int](), 0
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = []
        for folder in (Path(name, "a"), Path(name, "b")):
            servers.append(Server(options.command, folder))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait()
            server.load("warm", seed=1, rate=options.rate)
        for pair in range(options.pairs):
            starts_ns.append(time.monotonic_ns())
            for segment in range(options.segments):
                seed = 1000 * (_FIRST_SEED + pair) + segment
                for side in (0, 1) if segment % 2 else (1, 0):
                    words = f"{pair}-{segment}"
                    num_late += servers[side].load(words, seed=seed, rate=options.rate)
            print(f"pair {pair}: {time.monotonic() - began_s:.0f} s", flush=True)
        stack.close()
        records = []
        for server, letter in zip(servers, "ab", strict=True):
            records.append(options.out.with_suffix(f".{letter}.isr"))
            shutil.copy(server.record, records[-1])
    sides = [columns_of(record, starts_ns) for record in records]
    comparisons = []
    for pair, (a, b) in enumerate(zip(*sides, strict=True)):
        if a is None or b is None:
            print(pair, "too few requests")
            continue
        comparisons.append({"same": compared(a, b)})
        print(pair, differing(comparisons[-1]["same"]))
    result = {
        "command": options.command,
        "machine": machine(),
        "level": LEVEL,
        "seconds": _SEGMENT_S * options.segments,
        "rate": options.rate,
        "num_unusable_pairs": options.pairs - len(comparisons),
        "num_late_segments": num_late,
        "num_segments": 2 * options.pairs * options.segments,
        "took_s": round(time.monotonic() - began_s),
        "pairs": score(comparisons),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
