"""Cost of a scrape: three engines with a thousand live requests, while their records are folded.

A child folds made-up records of busy engines at the pace at which they would be written, looks once
a second and serves the page, as `inferscope collect` does. This process scrapes it over HTTP, as
Prometheus does: OpenMetrics, compressed, one after another.

    python benchmarks/scrape_cost.py --out benchmarks/results/scrape_cost.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from collector_speed import busy_engine
from inferscope_prometheus import PrometheusExporter
from inferscope_prometheus.families import families
from inferscope_prometheus.page import page

from inferscope.cli.collect import SWITCH_S
from inferscope.fold.fold import READER, Collector
from inferscope.fold.view import snapshot
from inferscope.records import Record, RingOpened, Tick

TARGET_MS = 25.0
STEPS_S = 105
SECOND_NS = 1_000_000_000
PACE_NS = 100_000_000
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"


def serve(num_engines: int, batch: int, seconds_s: float) -> None:
    """Fold records in real time and serve the page, until they end."""
    sys.setswitchinterval(SWITCH_S)
    items: list[tuple[int, int, Record]] = []
    for engine in range(1, num_engines + 1):
        records = busy_engine(round(seconds_s * STEPS_S), batch, seed=engine)
        items += [(record.t_ns, engine, record) for record in records]
    items.sort(key=lambda one: one[:2])
    exporter = PrometheusExporter({"port": 0, "price_per_gpu_hour": 2.0})
    exporter.open()
    collector = Collector(exporter)
    for engine in range(1, num_engines + 1):
        opened = RingOpened(1, engine, f"engine-{engine}", "core", 0, 1, "host", "boot", 1, 1)
        collector.fold(READER, opened)
    began_ns = time.monotonic_ns() - items[0][0]
    tick_ns = look_ns = num_looks = 0
    for t_ns, engine, record in items:
        if t_ns >= tick_ns:
            tick_ns = t_ns + PACE_NS
            time.sleep(max(0.0, (began_ns + t_ns - time.monotonic_ns()) / 1e9))
            collector.fold(READER, Tick(t_ns, time.time_ns()))
        collector.fold(engine, record)
        if t_ns < look_ns:
            continue
        look_ns = t_ns + SECOND_NS
        exporter.on_snapshot(
            snapshot(collector, window_ns=10 * SECOND_NS, mode="live", max_requests=0)
        )
        num_looks += 1
        if num_looks == 5:
            live = sum(len(each.lives.table.by_id) for each in collector.engines.values())
            began_s = time.thread_time()
            page(families(exporter._published.now.samples), is_open=True)
            cpu_ms = (time.thread_time() - began_s) * 1e3
            sys.stdout.write(f"{exporter.describe().split()[1]} {live} {cpu_ms}\n")
            sys.stdout.flush()
    exporter.close()


def scrape(url: str) -> tuple[float, float, int]:
    """Return the milliseconds of one scrape, and the bytes and lines of its page."""
    asked = urllib.request.Request(url, headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
    began_s = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=30) as answer:
        body = answer.read()
    took_ms = (time.perf_counter() - began_s) * 1e3
    return took_ms, len(body), gzip.decompress(body).count(b"\n")


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--engines", type=int, default=3)
    arguments.add_argument("--batch", type=int, default=334)
    arguments.add_argument("--scrapes", type=int, default=100)
    arguments.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    if options.serve:
        serve(options.engines, options.batch, options.serve)
        return
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", "30", "--engines", str(options.engines),
         "--batch", str(options.batch)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        url, num_live, cpu_ms = child.stdout.readline().split()
        scrapes = []
        for _ in range(options.scrapes):
            scrapes.append(scrape(url))
            time.sleep(0.1)
    finally:
        child.kill()
        child.wait()
    took_ms = sorted(each[0] for each in scrapes)
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "engines": options.engines,
        "live_requests": int(num_live),
        "scrapes": len(scrapes),
        "ms": {
            "median": round(took_ms[len(took_ms) // 2], 2),
            "p95": round(took_ms[int(0.95 * len(took_ms))], 2),
            "max": round(took_ms[-1], 2),
        },
        "cpu_ms_of_the_page": round(float(cpu_ms), 2),
        "target_ms": TARGET_MS,
        "lines": scrapes[-1][2],
        "bytes_compressed": scrapes[-1][1],
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
