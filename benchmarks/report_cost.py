"""Cost of `inferscope report`: time, memory and file size by the number of requests.

Writes a recording of a busy engine (64 requests decoding, a prefill chunk in every fourth step) and
reports on it, each in a process of its own. Prints processor time, peak memory and bytes.

    python benchmarks/report_cost.py --requests 1000 20000 --out report_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from collector_speed import busy_engine
from probe_cost import machine

from inferscope.records import FINISHED, Record, RequestEvent, RingOpened, StepSpan, Tick, encode
from inferscope.ring import RecordedFrame, RecordingWriter

BATCH = 64
TICK_NS = 200_000_000


def write_recording(path: Path, num_requests: int) -> tuple[int, int]:
    """Write a recording until this many requests have finished; return requests and steps."""
    writer = RecordingWriter(path)
    opened = RingOpened(0, 1, "bench", "core", 0, 1, "host", "boot", 0, 1_790_000_000_000_000_000)
    frame(writer, 0, 0, opened, opened.t_ns)
    finished = steps = next_tick_ns = 0
    for sequence, record in enumerate(busy_engine(1 << 40, BATCH), 1):
        while record.t_ns >= next_tick_ns:
            frame(writer, 0, 0, Tick(next_tick_ns, next_tick_ns), next_tick_ns)
            next_tick_ns += TICK_NS
        frame(writer, 1, sequence, record, record.t_ns)
        steps += isinstance(record, StepSpan)
        if isinstance(record, RequestEvent) and record.kind == FINISHED:
            finished += 1
            if finished == num_requests:
                break
    writer.close()
    return finished, steps


def frame(writer: RecordingWriter, ring: int, sequence: int, record: Record, t_ns: int) -> None:
    """Append a record."""
    writer.write(RecordedFrame(ring, record.CODE, sequence, t_ns, encode(record)))


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--requests", type=int, nargs="+", default=[1_000, 20_000])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    rows = []
    for num_requests in options.requests:
        with tempfile.TemporaryDirectory() as place:
            recording, report = Path(place) / "run.isr", Path(place) / "report.html"
            finished, steps = write_recording(recording, num_requests)
            command = [sys.executable, "-m", "inferscope", "report", str(recording)]
            process = subprocess.Popen([*command, "-o", str(report)], stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"the report on {num_requests} requests failed")
            row = {
                "requests": finished,
                "steps": steps,
                "recording_mb": recording.stat().st_size / 1e6,
                "processor_s": used.ru_utime + used.ru_stime,
                "peak_mb": used.ru_maxrss / 1e3,
                "report_mb": report.stat().st_size / 1e6,
            }
        rows.append(row)
        print(
            f"{finished:,} requests, {steps:,} steps ({row['recording_mb']:.1f} MB):"
            f" {row['processor_s']:.1f} s of one core, {row['peak_mb']:.0f} MB at the peak,"
            f" report of {row['report_mb']:.2f} MB"
        )
    if options.out is not None:
        result = {"machine": machine(), "batch": BATCH, "rows": rows}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
