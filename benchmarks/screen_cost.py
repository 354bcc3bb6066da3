"""Cost of the live screen: 2,000 live requests at 4 Hz on a real pseudo-terminal.

The screen runs in a child process on a pty, so that diffing, escape sequences and writing count
too. Its snapshots are built beforehand: only the screen is measured. The parent presses `u` at
random moments (it changes every row) and waits for the heading that only that key changes.

    python benchmarks/screen_cost.py --out screen_cost.json
    python benchmarks/screen_cost.py --screens 3    the timeline, with 130 new steps a second

On other screens than the first it presses `w`, and waits for the window in the header.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import select
import struct
import sys
import termios
import time
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from probe_cost import machine

from inferscope.fold.snapshots import (
    CountersView,
    EngineView,
    Health,
    KindSums,
    Quantiles,
    RankSplit,
    RequestRow,
    Series,
    Snapshot,
    StepView,
)
from inferscope.records import BINDINGS

MS = 1_000_000
SECOND = 1_000_000_000
WARM_UP_S = 1.5
STEP_NS = 7_500_000
STEPS_A_TICK, NUM_STEPS, BATCH = 33, 2048, 64
WINDOWS = (b"win 5 min", b"win 10 s", b"win 60 s")
"""Windows in the header, in the order of the key."""
SCREENS = ("1", "3", "4", "5", "6")
TARGET_SHARE = 0.10
TARGET_KEY_MS = 50.0


def _row(i: int, tick: int) -> RequestRow:
    tokens = 20 + i % 400 + tick * 30
    ledger = {
        "queue": 4 * MS, "prefill_own": 40 * MS, "decode_own": tokens * MS // 5,
        "decode_co_batched": tokens * 6 * MS, "decode_interference": tokens * MS // 2,
        "cpu_gap": tokens * MS,
    }  # fmt: skip
    return RequestRow(
        request_id=f"request-{i:08x}", external_id=None, state="decode", finish=None,
        arrived_ns=0, age_ns=sum(ledger.values()), prompt_tokens=100 + i, cached_tokens=i % 64,
        output_tokens=tokens, ttft_ns=44 * MS + i * 1000, tbt_mean_ns=7.7 * MS + i * 100,
        tbt_p99_ns=20.0 * MS + (i * 7919 + tick * 104_729) % 30_000_000, e2e_ns=None,
        prefill_ns=40 * MS, decode_ns=tokens * MS // 5, interference_share=0.1 + i % 10 / 100,
        num_preemptions=0, ledger_ns=ledger, ttft_ledger_ns={"queue": 4 * MS}, joined_late=False,
    )  # fmt: skip


def _step(number: int, num_requests: int) -> StepView:
    """Return a step of 7.5 ms; every eighth one has a chunk of 512 prompt tokens."""
    start_ns, num = number * STEP_NS, min(num_requests, BATCH)
    has_chunk = number % 8 == 0
    shares = tuple((STEP_NS - 900_000) // num for _ in range(num))
    spent_ns = sum(shares)
    prefill_ns = shares[0] if has_chunk else 0
    return StepView(
        dp_rank=0, step=number, kind="mixed" if has_chunk else "decode", start_ns=start_ns,
        end_ns=start_ns + spent_ns, host_gap_ns=900_000, clock="host", mode="eager",
        is_cold=False, num_requests=num, prefill_tokens=512 if has_chunk else 0,
        decode_tokens=num - has_chunk,
        ranks=(RankSplit(0, start_ns, start_ns + spent_ns, spent_ns, prefill_ns,
                         spent_ns - prefill_ns, 0, 0),),
        flops=10**12, read_bytes=2 * 10**10, write_bytes=10**8, residual=0.02, binding="none",
        plan_start_ns=start_ns - 300_000, plan_end_ns=start_ns - 200_000, num_waiting=3,
        num_running=num, num_preempted=0, blocks_used=500 + number % 90, blocks_total=1000,
        blocks_added=1, request_ids=tuple(f"request-{i:08x}" for i in range(num)),
        phases=(("prefill" if has_chunk else "decode"), *["decode"] * (num - 1)),
        tokens=((512 if has_chunk else 1), *[1] * (num - 1)), contexts=(900,) * num,
        shares_ns=(shares,),
    )  # fmt: skip


def _with_steps(view: EngineView, tick: int, steps: list[StepView]) -> EngineView:
    """Return a view with the steps up to a tick, and their sums by kind."""
    seconds = tuple(
        KindSums(17 + (i + tick) % 5, 130 * MS, 130 * MS, 10**13, 10**11, 10**10, 6 * 10**10,
                 3 * 10**10, 9000, 4000, 500)
        for i in range(60)
    )  # fmt: skip
    shown = tuple(steps[tick * STEPS_A_TICK : tick * STEPS_A_TICK + NUM_STEPS])
    return replace(
        view,
        steps=shown,
        folded_ns=shown[-1].end_ns,
        kinds=dict.fromkeys(("prefill", "decode", "mixed"), seconds),
        weight_bytes=10**10,
        counters=CountersView(
            memory_peaks_bytes_s={"measured": 4e12}, compute_peaks_flops_s={"measured": 7e14}
        ),
    )


def _snapshot(tick: int, num_requests: int) -> Snapshot:
    some = Quantiles(1000, 8.0 * MS, (7.0 + tick / 10) * MS, 16.0 * MS, 33.0 * MS, 60.0 * MS)
    wave = tuple(1000.0 + 37 * ((i + tick // 4) % 20) for i in range(60))
    shares = tuple(value / 3000 for value in wave)
    view = EngineView(
        engine_id="bench", engine="bench", version="1", model="a-model", device="cpu", pids=(1,),
        is_alive=True, is_synthetic=True, clock="host", window_ns=60 * SECOND,
        device_ns={"prefill": 9 * SECOND, "decode": (40 + tick % 9) * SECOND,
                   "idle_host_gap": 5 * SECOND},
        device_total_ns={}, wall_total_ns=60 * SECOND, ttft=some, tbt=some, e2e=some, queue=some,
        step=some, host_gap=some,
        ledger_ns={"queue": SECOND, "decode_own": 9 * SECOND, "cpu_gap": (3 + tick) * SECOND},
        prefill_tok_s=900.0 + tick, decode_tok_s=4000.0 + tick, prefill_busy_tok_s=None,
        decode_busy_tok_s=None, num_running=num_requests, num_waiting=tick % 5, num_held=0,
        num_finished=tick, finished_s=10.0, num_preemptions=0, blocks_used=500 + tick,
        blocks_cached=100, blocks_total=1000, block_tokens=16, max_running=4096,
        token_budget=2048, cached_share=0.4, mixed_share=0.2, binding="none",
        model_residual=0.01, model_source="fit",
        series=Series(
            prefill_tok_s=wave, decode_tok_s=wave, prefill_share=shares, decode_share=shares,
            ttft_p95_ns=(44 * MS,) * 60, tbt_p99_ns=(16 * MS,) * 60, running=(1,) * 60,
            waiting=(0,) * 60, kv_share=shares, blocks_used=(500 + tick,) * 60,
            blocks_cached=(100,) * 60, blocks_total=(1000,) * 60, preempted=(tick % 3,) * 60,
            waiting_by=dict.fromkeys(BINDINGS, wave), cached_tokens=(300,) * 60,
            prompt_tokens=(900,) * 60,
        ),
        requests=tuple(_row(i, tick) for i in range(num_requests)), num_requests=num_requests,
        health=Health("on", 0.004, 1, 0, 0, 0, 0, ""),
    )  # fmt: skip
    return Snapshot(0, 0, "live", (view,), "", "benchmark")


class _Prepared:
    """Source that replays prepared snapshots in a loop with advancing times."""

    title = "benchmark"

    def __init__(self, num_requests: int, refresh_hz: float) -> None:
        steps = [_step(number, num_requests) for number in range(NUM_STEPS + 8 * STEPS_A_TICK)]
        self._snapshots = [_snapshot(tick, num_requests) for tick in range(8)]
        self._snapshots = [
            replace(made, engines=(_with_steps(made.engines[0], tick, steps),))
            for tick, made in enumerate(self._snapshots)
        ]
        self._step_ns = int(SECOND / refresh_hz)
        self._num_given = 0

    def snapshot(self, window_ns: int) -> Snapshot | None:
        self._num_given += 1
        mono_ns = self._num_given * self._step_ns
        made = self._snapshots[self._num_given % len(self._snapshots)]
        return replace(made, mono_ns=mono_ns, real_ns=1_790_000_000 * SECOND + mono_ns)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _child(
    num_requests: int, refresh_hz: float, seconds_s: float, report_fd: int, screen: str
) -> None:
    from inferscope.tui.app import InferScopeApp

    marks: list[float] = []

    class Measured(InferScopeApp):
        def on_mount(self) -> None:
            self.set_timer(WARM_UP_S / 2, lambda: self.action_tab(screen))
            self.set_timer(WARM_UP_S, self._mark)
            self.set_timer(WARM_UP_S + seconds_s, self._report)

        def _mark(self) -> None:
            marks[:] = [time.process_time(), time.monotonic()]
            os.write(report_fd, b"\n")

        def _report(self) -> None:
            cpu_s, wall_s = time.process_time() - marks[0], time.monotonic() - marks[1]
            os.write(report_fd, json.dumps({"cpu_s": cpu_s, "wall_s": wall_s}).encode() + b"\n")

    Measured(_Prepared(num_requests, refresh_hz), refresh_hz=refresh_hz).run()


def measure(
    num_requests: int, refresh_hz: float, seconds_s: float, num_keys: int, screen: str = "1"
) -> dict[str, Any]:
    """Run the screen on a pty; return its share of one core, and its answers to keys."""
    report_in, report_out = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        os.close(report_in)
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.environ.pop("NO_COLOR", None)
        try:
            _child(num_requests, refresh_hz, seconds_s, report_out, screen)
        finally:
            os._exit(0)
    os.close(report_out)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    _drain(terminal, until=report_in)
    os.read(report_in, 1)
    num_bytes = _drain(terminal, until=report_in)
    measured = json.loads(os.read(report_in, 4096))
    delays_ms = sorted(_press(terminal, i, screen) for i in range(num_keys))
    os.write(terminal, b"q")
    _drain(terminal, until=None)
    os.waitpid(pid, 0)
    return {
        "screen": screen,
        "num_requests": num_requests,
        "refresh_hz": refresh_hz,
        "core_share": measured["cpu_s"] / measured["wall_s"],
        "terminal_bytes_s": num_bytes / measured["wall_s"],
        "key_p50_ms": delays_ms[len(delays_ms) // 2],
        "key_p99_ms": delays_ms[ceil(0.99 * len(delays_ms)) - 1],
    }


def _drain(terminal: int, *, until: int | None) -> int:
    """Read the screen's output until the other end writes or closes; return the bytes."""
    num_bytes = 0
    while True:
        ready, _, _ = select.select([terminal] + ([until] if until is not None else []), [], [], 60)
        if until in ready or not ready:
            return num_bytes
        try:
            read = os.read(terminal, 65536)
        except OSError:
            return num_bytes
        if not read:
            return num_bytes
        num_bytes += len(read)


def _press(terminal: int, i: int, screen: str) -> float:
    wanted, key = b"prefill %" if i % 2 == 0 else b"prefill ms", b"u"
    if screen != "1":
        wanted, key = WINDOWS[i % len(WINDOWS)], b"w"
    end_ns = time.monotonic_ns() + random.randrange(100 * MS, 400 * MS)
    while (left_ns := end_ns - time.monotonic_ns()) > 0:
        if select.select([terminal], [], [], left_ns / SECOND)[0]:
            os.read(terminal, 65536)
    pressed_ns, seen = time.monotonic_ns(), b""
    os.write(terminal, key)
    while wanted not in seen:
        if not select.select([terminal], [], [], 5)[0]:
            raise TimeoutError("the screen did not answer a key within 5 s")
        seen += os.read(terminal, 65536)
    return (time.monotonic_ns() - pressed_ns) / MS


def main() -> int:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument(
        "--screens",
        nargs="+",
        default=SCREENS,
        choices=SCREENS,
        metavar="KEY",
        help="keys of the screens to measure (default: all but fleet and detail)",
    )
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    arguments = parser.parse_args()
    runs = [(screen, 4.0, arguments.keys) for screen in arguments.screens]
    runs += [("1", 10.0, 20)] if "1" in arguments.screens else []
    rows = [
        measure(arguments.requests, refresh_hz, arguments.seconds, num_keys, screen)
        for screen, refresh_hz, num_keys in runs
    ]
    heads = "".join(f"{name:>12}" for name in ("core", "key p50 ms", "key p99 ms", "kB/s"))
    print(f"{'screen':>6}{'requests':>10}{'Hz':>5}{heads}")
    for row in rows:
        print(
            f"{row['screen']:>6}{row['num_requests']:>10.0f}{row['refresh_hz']:>5.0f}"
            f"{row['core_share']:>12.1%}{row['key_p50_ms']:>12.1f}{row['key_p99_ms']:>12.1f}"
            f"{row['terminal_bytes_s'] / 1000:>12.1f}"
        )
    if arguments.out is not None:
        targets = {"core_share": TARGET_SHARE, "key_p99_ms": TARGET_KEY_MS}
        about = {"machine": machine(), "rows": rows, "targets_at_4_hz": targets}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    is_met = all(
        row["core_share"] <= TARGET_SHARE and row["key_p99_ms"] <= TARGET_KEY_MS
        for row in rows
        if row["refresh_hz"] == 4.0
    )
    print(f"target at 4 Hz (core <= 10%, key p99 <= 50 ms): {'met' if is_met else 'missed'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
