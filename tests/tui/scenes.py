"""A hand-built engine whose numbers close: phases sum, ledgers sum, shares follow from both.

`moving_snapshot(tick)` is the engine `tick` quarters of a second later; tick 0 is the golden one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from inferscope.fold.final_records import DeviceTime
from inferscope.fold.snapshots import (
    CountersView,
    DeviceCounters,
    EngineView,
    Health,
    LevelWindow,
    ObjectiveLevels,
    PhaseUse,
    Quantiles,
    RequestRow,
    Series,
    ServiceLevels,
    Snapshot,
    WorstRequest,
)
from inferscope.slo import Objective

MS = 1_000_000
SECOND = 1_000_000_000
REAL_NS = 1_790_000_000 * SECOND
MONO_NS = 5_000 * SECOND


def quantiles(num: int, p50_ms: float, p95_ms: float, p99_ms: float) -> Quantiles:
    return Quantiles(
        num, p50_ms * 1.1 * MS, p50_ms * MS, p95_ms * MS, p99_ms * MS, p99_ms * 1.4 * MS
    )


def request(
    name: str,
    state: str,
    *,
    prompt: int | None,
    cached: int | None,
    out: int,
    queue_ms: float = 0.4,
    prefill_own_ms: float = 0.0,
    prefill_shared_ms: float = 0.0,
    decode_own_ms: float = 0.0,
    decode_shared_ms: float = 0.0,
    interference_ms: float = 0.0,
    gap_ms: float = 0.0,
    p99_ms: float | None = None,
    finish: str | None = None,
    num_preemptions: int = 0,
    preempted_ms: float = 0.0,
    joined_late: bool = False,
    now_ns: int = MONO_NS,
) -> RequestRow:
    has_first = out > 0
    first = {
        "frontend": 1.3,
        "queue": queue_ms,
        "prefill_own": prefill_own_ms,
        "prefill_co_batched": prefill_shared_ms,
        "cpu_gap": 3.6 if has_first else 0.0,
        "output": 1.1 if has_first else 0.0,
    }
    rest = {
        "decode_own": decode_own_ms,
        "decode_co_batched": decode_shared_ms,
        "decode_interference": interference_ms,
        "cpu_gap": gap_ms,
        "preempted": preempted_ms,
        "output": 0.02 * out if has_first else 0.0,
        "delivery": 2.2 if state == "done" else 0.0,
    }
    ttft_ledger = {cause: round(ms * MS) for cause, ms in first.items() if ms}
    ledger = dict(ttft_ledger)
    for cause, ms in rest.items():
        if ms:
            ledger[cause] = ledger.get(cause, 0) + round(ms * MS)
    life_ns, ttft_ns = sum(ledger.values()), sum(ttft_ledger.values())
    return RequestRow(
        request_id=f"req-{name}",
        external_id=name,
        state=state,
        finish=finish,
        arrived_ns=now_ns - life_ns - (8 * SECOND if state == "done" else 0),
        age_ns=life_ns,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=out,
        ttft_ns=ttft_ns if has_first else None,
        tbt_mean_ns=(life_ns - ttft_ns) / (out - 1) if has_first and out > 1 else None,
        tbt_p99_ns=p99_ms * MS if p99_ms is not None else None,
        e2e_ns=life_ns if state == "done" else None,
        prefill_ns=round(prefill_own_ms * MS),
        decode_ns=round(decode_own_ms * MS),
        interference_share=round(interference_ms * MS) / life_ns if has_first else None,
        num_preemptions=num_preemptions,
        ledger_ns=ledger,
        ttft_ledger_ns=ttft_ledger,
        joined_late=joined_late,
    )


def requests(tick: int = 0) -> tuple[RequestRow, ...]:
    """The rows of the mock-up, and more of their kind to scroll through."""
    now_ns = MONO_NS + tick * SECOND // 4
    grown = min(tick * 32, 400)

    def decoding(name: str, prompt: int, cached: int, out: int, p99_ms: float) -> RequestRow:
        tokens = out + grown
        return request(
            name, "decode", prompt=prompt, cached=cached, out=tokens,
            queue_ms=0.3 + prompt / 300, prefill_own_ms=(prompt - cached) * 0.024,
            prefill_shared_ms=(prompt - cached) * 0.009, decode_own_ms=tokens * 0.198,
            decode_shared_ms=tokens * 5.69, interference_ms=tokens * (0.4 + p99_ms / 50),
            gap_ms=tokens * 0.86, p99_ms=p99_ms, now_ns=now_ns,
        )  # fmt: skip

    rows = [
        decoding("rag-018c", 8804, 4096, 122, 34.9),
        decoding("rag-0188", 7801, 2048, 260, 33.0),
        decoding("agent-c2", 5120, 4864, 97, 29.1),
        decoding("agent-c1", 4990, 4864, 148, 28.8),
        decoding("chat-7f4e", 990, 0, 322, 20.4),
        decoding("chat-7f4c", 655, 0, 341, 20.0),
        decoding("chat-7f41", 812, 0, 388, 19.8),
        decoding("chat-7f55", 402, 256, 206, 18.7),
        decoding("chat-7f58", 377, 0, 190, 18.2),
        request("rag-0191", "prefill", prompt=9120, cached=2048, out=0, queue_ms=61.0,
                prefill_own_ms=96.7, prefill_shared_ms=31.2, now_ns=now_ns),
        request("chat-7f60", "waiting", prompt=1330, cached=None, out=0, queue_ms=96.0,
                now_ns=now_ns),
        request("chat-7f61", "waiting", prompt=410, cached=None, out=0, queue_ms=41.5,
                now_ns=now_ns),
        request("rag-018a", "held", prompt=6100, cached=0, out=88, queue_ms=12.0,
                prefill_own_ms=140.0, prefill_shared_ms=20.0, decode_own_ms=17.4,
                decode_shared_ms=480.0, interference_ms=61.0, gap_ms=70.0, p99_ms=41.2,
                num_preemptions=1, preempted_ms=310.0, now_ns=now_ns),
        *[decoding(f"batch-{i:04x}", 300 + 17 * i, 0, 40 + 9 * i, 15.0 + i * 0.13)
          for i in range(21)],
        request("chat-7f3a", "done", prompt=3214, cached=1024, out=412, queue_ms=38.2,
                prefill_own_ms=58.6, prefill_shared_ms=21.4, decode_own_ms=81.4,
                decode_shared_ms=2342.7, interference_ms=386.9, gap_ms=352.1, p99_ms=21.3,
                finish="stop", now_ns=now_ns),
        request("batch-cut", "done", prompt=512, cached=0, out=33, decode_own_ms=7.0,
                prefill_own_ms=12.0, decode_shared_ms=180.0, gap_ms=28.0, p99_ms=19.0,
                finish="client_cancel", now_ns=now_ns),
        request("rag-0177", "done", prompt=9000, cached=0, out=0, queue_ms=30_000.0,
                finish="timeout", now_ns=now_ns),
    ]  # fmt: skip
    return tuple(rows)


def service_levels(rows: tuple[RequestRow, ...]) -> ServiceLevels:
    def levels(
        name: str, metric: str, limit_ms: int | None, target: float, good: int, **causes: int
    ) -> ObjectiveLevels:
        one = Objective(
            name,
            metric,
            limit_ms and limit_ms * MS,
            target,
            30 * 86_400 * SECOND,  # type: ignore[arg-type]
        )
        bad = 3_030 - good
        windows = (
            LevelWindow(300 * SECOND, good, bad),
            LevelWindow(3600 * SECOND, 12 * good + bad, 6 * bad),
        )
        return ObjectiveLevels(one, 12 * good + bad, 6 * bad, 3, windows, causes)

    late = [row for row in rows if row.external_id in ("rag-0188", "rag-018c", "chat-7f3a")]
    failed = next(row for row in rows if row.finish == "timeout")
    return ServiceLevels(
        origin="slo.yaml",
        objectives=(
            levels("ttft", "ttft", 250, 0.99, 2_963, prefill_co_batched=241, queue=120, unknown=41),
            levels("tbt", "tbt", 50, 0.999, 3_029, decode_interference=6),
            levels("e2e", "e2e", 15_000, 0.99, 3_027, queue=18),
            levels("goodput", "goodput", None, 0.98, 2_960, prefill_co_batched=241, queue=138),
        ),
        observed_ns=4_210 * SECOND,
        num_requests=607,
        num_good=594,
        num_tokens=241_800,
        num_good_tokens=236_400,
        bins={
            "ttft": (0, 0, 0, 0, 3, 210, 240, 121, 31, 2, 0, 0, 0, 0, 0, 0),
            "tbt": (0, 0, 1_900, 198_000, 31_600, 10_281, 19, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            "e2e": (0, 0, 0, 0, 0, 0, 0, 0, 4, 31, 120, 331, 118, 3, 0, 0),
        },
        worst=(
            WorstRequest(failed, "ttft", failed.age_ns, 250 * MS, "queue"),
            *(WorstRequest(row, "ttft", 2 * row.ttft_ns, 250 * MS, "prefill_co_batched")
              for row in late if row.ttft_ns is not None),
        ),
    )  # fmt: skip


def device_times(*busy_shares: float) -> tuple[DeviceTime, ...]:
    """One device per share, busy for it over a minute."""
    times = []
    for rank, share in enumerate(busy_shares):
        busy_ns = round(share * 60 * SECOND)
        spent = {
            "prefill": busy_ns // 8, "decode": busy_ns - busy_ns // 8, "padding": 0,
            "unattributed": 0, "idle_no_work": 60 * SECOND - busy_ns, "idle_host_gap": 0,
        }  # fmt: skip
        times.append(DeviceTime("e-41233-8f3a", f"GPU-5a1c#{rank}", 60 * SECOND, spent))
    return tuple(times)


def engine_view(tick: int = 0) -> EngineView:
    second = tick // 4
    wave = [math.sin((i + second) / 4.5) for i in range(60)]
    prefill = tuple(max(0.0, 3370 + 5200 * w + 700 * math.sin(i + second)) for i, w in
                    enumerate(wave))  # fmt: skip
    decode = tuple(4030 + 380 * w - 250 * (i % 7 == second % 7) for i, w in enumerate(wave))
    device = {
        "prefill": 5_400, "decode": 47_380, "padding": 360, "unattributed": 240, "foreign": 0,
        "idle_host_gap": 5_460, "idle_no_work": 1_160,
    }  # fmt: skip
    ledger = {
        "frontend": 760, "queue": 7_930, "prefill_own": 30_120, "prefill_co_batched": 11_800,
        "prefill_interference": 2_950, "decode_own": 49_300, "decode_co_batched": 1_254_000,
        "decode_interference": 207_000, "cpu_gap": 188_500, "preempted": 4_100, "output": 5_200,
        "delivery": 2_340,
    }  # fmt: skip
    rows = requests(tick)
    live = [row for row in rows if row.state != "done"]
    return EngineView(
        engine_id="e-41233-8f3a",
        engine="vLLM",
        version="0.11.2",
        model="Qwen3-8B",
        device="NVIDIA H200",
        pids=(41233,),
        is_alive=True,
        is_synthetic=False,
        clock="device",
        window_ns=60 * SECOND,
        device_ns={name: ms * MS for name, ms in device.items()},
        device_total_ns={name: ms * MS * 9 for name, ms in device.items()},
        wall_total_ns=540 * SECOND,
        ttft=quantiles(607, 61.2, 231.7, 301.5),
        tbt=quantiles(241_800, 7.4, 16.9, 33.0),
        e2e=quantiles(607, 2900.0, 5800.0, 9100.0),
        queue=quantiles(611, 0.3, 38.2, 96.0),
        step=quantiles(7_800, 7.0, 21.4, 60.0),
        host_gap=quantiles(7_799, 0.9, 1.9, 3.8),
        ledger_ns={cause: ms * MS for cause, ms in ledger.items()},
        prefill_tok_s=prefill[-1],
        decode_tok_s=decode[-1],
        prefill_busy_tok_s=37_400.0,
        decode_busy_tok_s=5_100.0,
        num_running=sum(row.state in ("prefill", "decode") for row in live),
        num_waiting=sum(row.state == "waiting" for row in live),
        num_held=sum(row.state == "held" for row in live),
        num_finished=5_463 + tick * 2,
        finished_s=10.1,
        num_preemptions=1,
        blocks_used=19_520 + (tick * 37) % 4_000,
        blocks_cached=6_100,
        blocks_total=32_000,
        block_tokens=16,
        max_running=256,
        token_budget=2_048,
        cached_share=0.431,
        mixed_share=0.187,
        binding="none",
        model_residual=0.021,
        model_source="fit",
        series=Series(
            prefill_tok_s=prefill,
            decode_tok_s=decode,
            prefill_share=tuple(0.09 + 0.05 * w for w in wave),
            decode_share=tuple(0.79 - 0.09 * w for w in wave),
            ttft_p95_ns=tuple(
                None if i in (3, 4) else (150 + 90 * w) * MS for i, w in enumerate(wave)
            ),
            tbt_p99_ns=tuple((24 + 9 * w) * MS for w in wave),
            running=tuple(round(29 + 3 * w) for w in wave),
            waiting=tuple(max(0, round(2 * w)) for w in wave),
            kv_share=tuple(0.6 + 0.05 * w for w in wave),
            blocks_used=tuple(round(32_000 * (0.6 + 0.05 * w)) for w in wave),
            blocks_cached=tuple(round(32_000 * (0.2 + 0.04 * w)) for w in wave),
            blocks_total=(32_000,) * 60,
            waiting_by={
                "none": (0.0,) * 60,
                "slots": (0.0,) * 60,
                "blocks": tuple(max(0.0, 2 * w - 1) for w in wave),
                "budget": tuple(max(0.0, min(2 * w, 1.0)) for w in wave),
            },
            preempted=tuple(int(i == 41) for i in range(60)),
            cached_tokens=tuple(round(1500 + 900 * w) for w in wave),
            prompt_tokens=tuple(round(3500 + 1500 * w) for w in wave),
            proposed_tokens=tuple(round(900 + 100 * w) for w in wave),
            accepted_tokens=tuple(round(640 + 90 * w) for w in wave),
        ),
        requests=rows,
        num_requests=len(live),
        listed_ns=60 * SECOND,
        num_finished_since=607,
        levels=service_levels(rows),
        health=Health("on", 0.004, 1_204_512, 0, 0, 0, 0, ""),
        prefill_flops_s=4.55e14,
        counters=CountersView(
            use={"decode": PhaseUse(0.35, 0.97, 2.9e12, 0.1e12, 431.0)},
            memory_peaks_bytes_s={"spec": 4.8e12, "measured": 4.05e12},
            compute_peaks_flops_s={"spec": 9.89e14, "measured": 7.4e14},
            up=("gpm", "nvml"),
            devices={
                "GPU-5a1c": DeviceCounters(
                    "NVIDIA H200",
                    gauges={
                        "busy_share": 0.89,
                        "dram_share": 0.61,
                        "memory_used_bytes": 115e9,
                        "memory_total_bytes": 141e9,
                        "power_w": 512.0,
                        "power_limit_w": 700.0,
                        "sm_clock_mhz": 1980.0,
                        "temperature_c": 61.0,
                    },
                )
            },
        ),
    )


def moving_snapshot(tick: int = 0) -> Snapshot:
    return Snapshot(
        mono_ns=MONO_NS + tick * SECOND // 4,
        real_ns=REAL_NS + tick * SECOND // 4,
        mode="live",
        engines=(engine_view(tick),),
        digest=f"{tick:016x}",
        source="/tmp/inferscope/e-41233-8f3a",
    )


def with_view(snapshot: Snapshot, **changes: object) -> Snapshot:
    view = replace(snapshot.engines[0], **changes)  # type: ignore[arg-type]
    return replace(snapshot, engines=(view,))


def with_requests(snapshot: Snapshot, rows: tuple[RequestRow, ...]) -> Snapshot:
    num_live = sum(row.state != "done" for row in rows)
    return with_view(snapshot, requests=rows, num_requests=num_live)


class MovingSource:
    """A source that goes on by a quarter of a second with every look."""

    title = "a hand-built engine"

    def __init__(self, *, is_moving: bool = True) -> None:
        self.is_moving = is_moving
        self.tick = 0
        self.windows_ns: list[int] = []
        self.is_closed = False

    def snapshot(self, window_ns: int) -> Snapshot | None:
        self.windows_ns.append(window_ns)
        snapshot = moving_snapshot(self.tick)
        if self.is_moving:
            self.tick += 1
        return snapshot

    def close(self) -> None:
        self.is_closed = True
