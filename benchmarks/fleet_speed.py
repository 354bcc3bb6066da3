"""Cost of a collector for all engines of a host, with all exporters enabled.

Engines that `fleet.py` makes up write real rings in real time. Beside them `inferscope collect`
runs as anybody would start it: Prometheus's page, scraped every five seconds; OTLP's metrics, and
traces of all breaches and of a share of the rest, to a receiver that counts them; Parquet, all
tables; objectives; pins. Its processor time and memory are the kernel's numbers, after a warm-up.
What the engines finished is compared with what came out at each exporter, and every counter of
drops is read. JSON Lines and Perfetto are formats of `inferscope export` and `record`: no collector
writes them. With `--shards N` that many collectors share the engines; their cores and their memory
are summed.

    python benchmarks/fleet_speed.py --out benchmarks/results/fleet_speed.json
    python benchmarks/fleet_speed.py --engines 100 --shards 2 --keep-share 1   # all are traces
    python benchmarks/fleet_speed.py --engines 10 --seconds 60 --only prometheus
    python benchmarks/fleet_speed.py --engines 10 --profile fleet.pstats
    python benchmarks/fleet_speed.py --sidecar --out benchmarks/results/sidecar_cost.json

The engines and the receiver run here, at a lower priority than the collector; what they take is
reported beside it. A machine on which they do not fit beside it measures nothing:
`engines_late_ms`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fleet import Fleet
from probe_cost import machine

from inferscope.daemon.shard import Shard

TARGETS = {(False, 8): (0.25, 200.0), (True, 1): (0.1, 150.0)}
"""Largest cores and resident MB of a collector: for a host, and as a sidecar."""
SIDECAR = {"engines": 1, "only": "prometheus,otlp"}
SCRAPE_S = 5.0
SETTLE_S = 4.0
"""Seconds from the last record until all exports are complete."""
END_S = 30.0
"""Seconds for a collector's shutdown: it reads and exports the remaining records."""
EXPORTERS = ("prometheus", "otlp", "parquet", "slo", "pins")
_MEMORY = Path("/dev/shm")
_TICKS_HZ = os.sysconf("SC_CLK_TCK")
STEPS = "inferscope_step_duration_seconds_count"
_ONE_A_TRACE = b"gen_ai.operation.name"
_SLO = """slos:
  - {metric: ttft, threshold: 500ms, objective: 99%, window: 30d}
  - {metric: tbt, threshold: 200ms, objective: 99%, window: 30d}
  - {metric: tpot, threshold: 100ms, objective: 99%, window: 30d}
  - {metric: e2e, threshold: 60s, objective: 99%, window: 30d}
  - {metric: availability, objective: 99.9%, window: 30d}
  - {metric: goodput, objective: 95%, window: 30d}
"""


# --- a receiver of OTLP, in a process of its own ------------------------------------------------


def receive() -> None:
    """Count traces and posts of metrics until stdin ends; then print the counts."""
    counts = {"traces": 0, "posts": 0, "metrics_posts": 0, "bytes": 0}

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            counts["bytes"] += len(body)
            if self.path.endswith("/traces"):
                counts["posts"] += 1
                counts["traces"] += gzip.decompress(body).count(_ONE_A_TRACE)
            else:
                counts["metrics_posts"] += 1
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the server's log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        server.shutdown()
    print(json.dumps(counts | {"cpu_s": round(time.process_time(), 1)}), flush=True)


# --- the collector --------------------------------------------------------------------------------


def configuration(
    folder: Path,
    only: tuple[str, ...],
    otlp_port: int,
    port: int,
    *,
    rings: Path,
    keep_share: float,
) -> Path:
    """Write the collector's configuration; JSON is YAML."""
    (folder / "slo.yaml").write_text(_SLO, encoding="utf-8")
    exporters: dict[str, Any] = {
        "prometheus": {"port": port, "price_per_gpu_hour": 2.0},
        "otlp": {
            "endpoint": f"http://127.0.0.1:{otlp_port}/v1/traces",
            "metrics_interval_s": 15,
            "keep_share": keep_share,
            "ttft_ms": 500,
            "tbt_ms": 200,
        },
        "parquet": {"folder": str(folder / "parquet"), "rotate_s": 60, "host": "benchmark"},
    }
    settings: dict[str, Any] = {
        "rings": str(rings),
        "exporters": {name: exporters[name] for name in exporters if name in only},
    }
    if "slo" in only:
        settings["slo"] = "slo.yaml"
    if "pins" not in only:
        settings["pins"] = "off"
    path = folder / "collect.yaml"
    path.write_text(json.dumps(settings, indent=1).replace('"off"', "off"), encoding="utf-8")
    return path


class Watch(threading.Thread):
    """Sampler of processes, once a second: processor time by thread, and summed memory."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._is_over = threading.Event()
        self.rows: list[tuple[float, float, float, float]] = []
        """Time, seconds of all threads, seconds of the first thread, resident MB."""

    def run(self) -> None:
        """Sample until stopped."""
        with suppress(OSError, StopIteration):  # one has ended
            while not self._is_over.wait(1.0):
                all_s = sum(cpu_s(f"/proc/{pid}/stat") for pid in self._pids)
                main_s = sum(cpu_s(f"/proc/{pid}/task/{pid}/stat") for pid in self._pids)
                self.rows.append((time.monotonic(), all_s, main_s, memory_mb(self._pids, "VmRSS")))

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self.join()

    def found(self, since_s: float, until_s: float) -> dict[str, float]:
        """Return the cost within a window."""
        rows = [row for row in self.rows if since_s <= row[0] <= until_s]
        if len(rows) < 3:
            raise SystemExit("nothing was measured: give more --seconds than --warm-up, by some.")
        passed_s = rows[-1][0] - rows[0][0]
        late = rows[len(rows) // 2 :]
        at_s = [row[0] for row in late]
        middle_s, middle_mb = sum(at_s) / len(late), sum(row[3] for row in late) / len(late)
        square = sum((each - middle_s) ** 2 for each in at_s)
        slope = sum((row[0] - middle_s) * (row[3] - middle_mb) for row in late) / square
        return {
            "window_s": round(passed_s, 1),
            "cores": round((rows[-1][1] - rows[0][1]) / passed_s, 3),
            "cores_of_first_thread": round((rows[-1][2] - rows[0][2]) / passed_s, 3),
            "rss_mb": round(rows[-1][3], 1),
            "rss_mb_per_minute_second_half": round(slope * 60, 2),
        }


def cpu_s(path: str) -> float:
    """Return the processor time in a `stat` of /proc."""
    fields = Path(path).read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_HZ


def memory_mb(pids: list[int], name: str) -> float:
    """Return a line of processes' memory, summed: VmRSS now, VmHWM the most of each."""
    total_kb = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        total_kb += next(int(line.split()[1]) for line in lines if line.startswith(name))
    return total_kb / 1024


def scrape(url: str) -> tuple[float, str]:
    """Return a scrape's duration in ms, and its page."""
    asked = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    began_s = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=30) as answer:
        body = answer.read()
    took_ms = (time.perf_counter() - began_s) * 1e3
    return took_ms, gzip.decompress(body).decode()


def total(page: str, name: str) -> float:
    """Return the sum of a family's samples."""
    found = re.findall(rf"^{name}(?:\{{[^\n]*\}})? (\S+)", page, re.MULTILINE)
    return sum(map(float, found))


def dropped(page: str) -> dict[str, float]:
    """Return the losses by stage and reason, if any."""
    found: dict[str, float] = {}
    for labels, num in re.findall(
        r"^inferscope_records_dropped_total\{([^\n]*)\} (\S+)", page, re.MULTILINE
    ):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        key = f"{named['stage']} {named['reason']}"
        found[key] = found.get(key, 0) + float(num)
    return found


class Scraper(threading.Thread):
    """Scraper like Prometheus that measures how far the pages lag behind the engines."""

    def __init__(self, urls: list[str], fleet: Fleet, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._urls, self._fleet, self._pids = urls, fleet, pids
        self._is_over = threading.Event()
        self.took_ms: list[float] = []
        self.behind: list[float] = []
        """Finished requests that the pages did not show yet."""
        self.page = ""
        """Durations of all scrapes, in order."""
        self._seen: list[tuple[float, float, float]] = []
        """Time, the collectors' processor time so far, and the number of steps shown."""

    def run(self) -> None:
        """Scrape until stopped."""
        while not self._is_over.wait(SCRAPE_S):
            self.once()

    def once(self) -> None:
        """Scrape."""
        finished = self._fleet.counts()["requests"]
        try:
            scraped = [scrape(url) for url in self._urls]
        except OSError as error:
            sys.stderr.write(f"a scrape failed: {error}\n")
            self.took_ms.append(30_000.0)
            return
        self.took_ms += [took_ms for took_ms, _ in scraped]
        self.page = "\n".join(page for _, page in scraped)
        self.behind.append(finished - total(self.page, "inferscope_requests_total"))
        spent_s = sum(cpu_s(f"/proc/{pid}/stat") for pid in self._pids)
        self._seen.append((time.monotonic(), spent_s, total(self.page, STEPS)))

    def us_per_step(self, since_s: float) -> float | None:
        """Return µs of processor time per step shown since then."""
        seen = [each for each in self._seen if each[0] >= since_s]
        if len(seen) < 2 or seen[-1][2] == seen[0][2]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][2] - seen[0][2]) * 1e6

    def stop(self) -> None:
        """Stop scraping."""
        self._is_over.set()
        self.join()


def written(folder: Path) -> dict[str, int]:
    """Return the rows of each table of Parquet."""
    from pyarrow import parquet

    return {
        table.name: sum(parquet.read_metadata(p).num_rows for p in table.rglob("*.parquet"))
        for table in sorted(folder.iterdir())
    }


def requests_of(exported: dict[str, Any]) -> list[float]:
    """Return the number of requests from each exporter that exports all of them."""
    found = {"parquet": "requests", "prometheus": "requests"}
    if exported.get("otlp", {}).get("keep_share") == 1:
        found["otlp"] = "traces"
    return [exported[name][word] for name, word in found.items() if name in exported]


def free_ports(num: int) -> int:
    """Return the first of `num` consecutive free ports."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + num):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return int(first)


# --- the run --------------------------------------------------------------------------------------


def begin(options: argparse.Namespace, config: Path, shard: Shard) -> subprocess.Popen[bytes]:
    """Start a collector."""
    words = ["-m", "inferscope", "collect", "--config", str(config), "--counters", "off"]
    words += ["--shard", str(shard)]
    if options.profile:
        words = ["-m", "cProfile", "-o", str(shard.file(options.profile)), *words]
    return subprocess.Popen([sys.executable, *words])


def wait_for(urls: list[str]) -> None:
    """Wait until collectors have scanned for the first time."""
    late_s = time.monotonic() + END_S
    for url in urls:
        page = ""
        while "inferscope_collector_info" not in page:
            if time.monotonic() > late_s:
                raise SystemExit(f"no collector serves {url}.")
            with suppress(OSError):
                _, page = scrape(url)
            time.sleep(0.2)


def end(collectors: list[subprocess.Popen[bytes]]) -> bool:
    """Stop collectors with SIGTERM; return whether they exited in time."""
    for collector in collectors:
        collector.send_signal(signal.SIGTERM)
    late_s = time.monotonic() + END_S
    for collector in collectors:
        with suppress(subprocess.TimeoutExpired):  # it is too far behind
            if collector.wait(max(0.0, late_s - time.monotonic())):
                raise SystemExit("a collector failed.")
    return all(collector.poll() is not None for collector in collectors)


def measure(options: argparse.Namespace, folder: Path, rings: Path) -> dict[str, Any]:
    """Run fleet, receiver and collectors; return the results."""
    receiver = subprocess.Popen(
        [sys.executable, __file__, "--receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert receiver.stdout is not None
    otlp_port = int(receiver.stdout.readline())
    port = free_ports(options.shards)
    config = configuration(
        folder, options.only, otlp_port, port, rings=rings, keep_share=options.keep_share
    )
    shards = [Shard(number, options.shards) for number in range(1, options.shards + 1)]
    collectors = [begin(options, config, shard) for shard in shards]
    pids = [collector.pid for collector in collectors]
    # The collectors are what is measured: engines and receiver wait for them.
    for pid in (os.getpid(), receiver.pid):
        os.setpriority(os.PRIO_PROCESS, pid, options.nice)
    watch = Watch(pids)
    try:
        time.sleep(3.0)
        urls = [f"http://127.0.0.1:{port + at}/metrics" for at in range(options.shards)]
        if "prometheus" in options.only:
            wait_for(urls)  # what an engine does before its collector is there is not counted
        empty_mb = memory_mb(pids, "VmRSS")
        fleet = Fleet(
            rings, options.engines, num_scores=options.scores, batch=options.batch,
            rate_hz=options.rate, ring_bytes=options.ring_mb << 20,
        )  # fmt: skip
        watch.start()
        scraper = Scraper(urls, fleet, pids)
        if "prometheus" in options.only:
            scraper.start()
        began_s, spent_s = time.monotonic(), time.thread_time()
        fleet.play(time.monotonic_ns() + round(options.seconds * 1e9))
        ended_s, spent_s = time.monotonic(), time.thread_time() - spent_s
        seen = watch.found(began_s + options.warm_up, ended_s)
        us_per_step = scraper.us_per_step(began_s + options.warm_up)
        counts = fleet.counts()
        fleet.live_on(SETTLE_S)
        if "prometheus" in options.only:
            scraper.stop()
            scraper.once()
        watch.stop()
        peak_mb = memory_mb(pids, "VmHWM")
        fleet.close()
        has_ended = end(collectors)
    finally:
        for collector in collectors:
            if collector.poll() is None:
                collector.kill()
                collector.wait()
        got, _ = receiver.communicate(b"")
    rate_hz = counts["steps"] / (ended_s - began_s)
    exported: dict[str, Any] = {}
    if "otlp" in options.only:
        exported["otlp"] = {"keep_share": options.keep_share} | json.loads(got)
    if "parquet" in options.only:
        exported["parquet"] = written(folder / "parquet")
    if "prometheus" in options.only:
        page = scraper.page
        exported["prometheus"] = {
            "requests": total(page, "inferscope_requests_total"),
            "steps": total(page, STEPS),
        }
    finished_hz = counts["requests"] / (ended_s - began_s)
    took_ms, late_ns = sorted(scraper.took_ms), sorted(fleet.late_ns)
    return {
        "engines": options.engines,
        "engines_of_shards": [sum(map(shard.has, fleet.names)) for shard in shards],
        "steps_s": round(rate_hz, 1),
        "batch": options.batch,
        "requests_s": round(finished_hz, 1),
        "seconds": options.seconds,
        "exporters": list(options.only),
        "collector": seen
        | {
            "us_per_step": None if us_per_step is None else round(us_per_step, 1),
            "rss_peak_mb": round(peak_mb, 1),
            "rss_without_engines_mb": round(empty_mb, 1),
        },
        "behind_s": [round(num / finished_hz, 2) for num in scraper.behind[:-1]],
        "written": counts,
        "exported": exported,
        "dropped": dropped(scraper.page) if scraper.page else None,
        "scrape_ms": {"median": round(took_ms[len(took_ms) // 2]), "max": round(took_ms[-1])}
        if took_ms
        else None,
        "ended_in_time": has_ended,
        "engines_cores": round(spent_s / (ended_s - began_s), 3),
        "engines_late_ms": {
            "p99": round(late_ns[int(0.99 * len(late_ns))] / 1e6, 1),
            "max": round(late_ns[-1] / 1e6, 1),
        },
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rate", type=float, default=50.0, help="steps per second of each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--keep-share", type=float, default=0.05,
        help="of the requests that broke no promise, how many become traces (default 0.05)",
    )  # fmt: skip
    parser.add_argument("--shards", type=int, default=1, help="collectors that share the engines")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds that do not count")
    parser.add_argument("--scores", type=int, default=10, help="different ones; engines share them")
    parser.add_argument("--ring-mb", type=int, default=16)
    parser.add_argument("--nice", type=int, default=5, help="of engines and receiver")
    parser.add_argument(
        "--sidecar", action="store_true",
        help="one engine, Prometheus and OTLP, and the target of a collector in its pod",
    )  # fmt: skip
    parser.add_argument("--only", default=",".join(EXPORTERS), help=f"some of {EXPORTERS}")
    parser.add_argument("--profile", type=Path, help="collectors' first threads, by cProfile")
    parser.add_argument("--folder", type=Path, help="for files; a temporary one")
    parser.add_argument(
        "--rings", type=Path, default=_MEMORY if _MEMORY.is_dir() else None,
        help="for rings; where there is one a file system in memory, as run directories are",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sidecar:
        vars(options).update(SIDECAR)
    if options.receive:
        receive()
        return
    options.only = tuple(options.only.split(","))
    about = machine()
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        tempfile.TemporaryDirectory(dir=options.rings) as rings,
    ):
        found = measure(options, Path(folder), Path(rings))
    took = found["collector"]
    most_cores, most_mb = TARGETS.get((options.sidecar, options.engines), (math.inf, math.inf))
    is_met = took["cores"] <= most_cores and took["rss_peak_mb"] <= most_mb
    is_met &= found["ended_in_time"] and not any((found["dropped"] or {}).values())
    is_met &= all(num >= found["written"]["requests"] for num in requests_of(found["exported"]))
    result = {"machine": about} | found
    result["target"] = f"{most_cores} cores, {most_mb:g} MB, no drops: " + (
        "met" if is_met else "missed"
    )
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
