"""Cost of objectives in a collector: per finished request, per bad one, per Tick with many.

    python benchmarks/slo_cost.py [--json FILE]

Microseconds, the median of the rounds. A request has all six objectives; a bad one misses its
first token's and is explained against two hundred peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from inferscope.attribution.ledger import WAITING
from inferscope.fold.final_records import FinalRequest
from inferscope.fold.requests import RequestTable
from inferscope.slo import Objective, Objectives
from inferscope.slo.judge import Judge
from inferscope.slo.tally import ObjectiveCounter

_MS = 1_000_000
_ROUNDS = 7
_NUM = 1000
_OBJECTIVES = Objectives(
    (
        Objective("ttft", "ttft", 500_000_000, 0.99, 86400 * 10**9),
        Objective("tbt", "tbt", 200_000_000, 0.99, 86400 * 10**9),
        Objective("tpot", "tpot", 100_000_000, 0.99, 86400 * 10**9),
        Objective("e2e", "e2e", 60_000_000_000, 0.99, 86400 * 10**9),
        Objective("availability", "availability", None, 0.999, 86400 * 10**9),
        Objective("goodput", "goodput", None, 0.99, 86400 * 10**9),
    )
)


def finished(number: int, *, ttft_ms: int, num_tokens: int = 200) -> FinalRequest:
    """Return a request of typical length."""
    first_ns, gap_ns = ttft_ms * _MS, 20 * _MS
    times = array("q", [first_ns + at * gap_ns for at in range(num_tokens)])
    queue_ns, decode_ns = first_ns - 80 * _MS, times[-1] - first_ns
    before = {"queue": queue_ns, "prefill_own": 60 * _MS, "prefill_interference": 20 * _MS}
    after = {"decode_own": decode_ns // 2, "decode_co_batched": decode_ns - decode_ns // 2}
    return FinalRequest(
        engine_id="e", request_id=f"r{number}", external_id=None, trace="", attributes={},
        prompt_tokens=512, cached_tokens=0, output_tokens=num_tokens, arrived_ns=0, queued_ns=0,
        admitted_ns=queue_ns, first_token_ns=first_ns, last_token_ns=times[-1],
        delivered_ns=times[-1], arrived_at="http", delivered_at="http", finish="stop",
        joined_late=False, num_preemptions=0, ledger_ns=before | after, ttft_ledger_ns=before,
        token_times_ns=times, tokens_per_event=(1,) * num_tokens, prefill_ns=0, decode_ns=0,
        prefill_flops=None, decode_flops=None, is_alone=False, fit_id="", clock="device",
    )  # fmt: skip


def judge() -> Judge:
    """Return a judge with peers to compare with."""
    made = Judge(_OBJECTIVES, ObjectiveCounter(lambda objective, is_good: None))
    made.set_model("model", started_ns=None)
    for number in range(200):
        made.request(finished(number, ttft_ms=100 + number % 50), f"r{number}", now_ns=1)
    return made


def median_us(run: Callable[[], None], num: int) -> float:
    """Return the duration of one of `num` items in the median round."""
    rounds = []
    for _ in range(_ROUNDS):
        began_ns = time.perf_counter_ns()
        run()
        rounds.append((time.perf_counter_ns() - began_ns) / num / 1e3)
    return statistics.median(rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    good, bad = finished(0, ttft_ms=120), finished(0, ttft_ms=900)
    made = judge()

    def many(request: FinalRequest, num: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(num):
                made.request(request, "r", now_ns=1)

        return run

    table = RequestTable()
    for number in range(_NUM):
        table.add(f"r{number}", number * _MS, is_front_end=True, state=WAITING)
    in_flight = table.by_id

    def tick(now_ns: int) -> Callable[[], None]:
        def run() -> None:
            made.tick(
                now_ns,
                in_flight,
                has_pending_outcome=lambda request, until_ns: False,
                ledger_ns=lambda request: {},
            )

        return run

    late_ns = _NUM * _MS + 3000 * _MS
    tick(late_ns)()  # each is decided once
    found = {
        "good_us": median_us(many(good, _NUM), _NUM),
        "bad_us": median_us(many(bad, _NUM // 10), _NUM // 10),
        "tick_of_1000_us": median_us(tick(_NUM * _MS), 1),
        "tick_of_1000_late_us": median_us(tick(late_ns), 1),
    }
    for name, spent_us in found.items():
        print(f"{name:<22}{spent_us:10.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
