"""Independent check of a JSON Lines export against its conservation laws.

python -m tests.export_contract FILE.jsonl [--min-requests N] [--min-mixed SHARE]

It imports the standard library alone: a law that the exporter and this file got from the same code
would hold of any export. It prints up to six breaches and one line of totals, and exits 1 on a
breach, on too few requests or mixed steps, or on too much unattributed time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CAUSES = {
    *("upstream", "frontend", "encode", "queue", "queue_idle", "kv_load", "draft", "rank_wait"),
    *("prefill_own", "prefill_co_batched", "prefill_interference"),
    *("decode_own", "decode_co_batched", "decode_interference"),
    *("slowdown", "cold_start", "cpu_gap", "not_scheduled", "preempted", "recompute"),
    *("kv_transfer", "paused", "engine_lost", "output", "delivery"),
}
"""Closed list of the causes that a ledger may name."""
CACHE_CLASSES = {
    *("hit", "off", "cleared", "evicted", "pending", "rounding", "rule"),
    *("namespace", "changed", "new", "unknown"),
}
"""Closed list of the classes of a prompt's tokens."""
MAX_UNATTRIBUTED_SHARE = 0.02
MAX_EVEN_SHARE = 0.1
"""Largest share of steps that may be divided by token counts alone, which ignores their cost."""
_MAX_SHOWN = 6


@dataclass
class Totals:
    """What one export holds, and the laws that it breaks."""

    breaches: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_mixed: int = 0
    num_even: int = 0
    num_requests: int = 0
    measured_ns: int = 0
    unattributed_ns: int = 0

    def is_kept(self, *, min_requests: int, min_mixed: float) -> bool:
        """Return whether the export breaks no law and holds enough to show it."""
        return (
            not self.breaches
            and self.num_requests >= min_requests
            and self.num_mixed >= min_mixed * self.num_steps
            and self.unattributed_ns <= MAX_UNATTRIBUTED_SHARE * self.measured_ns
            and self.num_even <= MAX_EVEN_SHARE * self.num_steps
        )

    def __str__(self) -> str:
        mixed = self.num_mixed / max(1, self.num_steps)
        unattributed = self.unattributed_ns / max(1, self.measured_ns)
        return (
            f"{self.num_steps} steps ({mixed:.0%} mixed, {self.num_even} divided by tokens alone), "
            f"{self.num_requests} requests, {unattributed:.1%} unattributed, "
            f"{len(self.breaches)} breaches"
        )


def check(rows: Iterable[Row]) -> Totals:
    """Return the totals of an export, with each breach of a law."""
    totals = Totals()
    spent_ns: dict[tuple[str, str, str], int] = defaultdict(int)
    computed_tokens: dict[tuple[str, str], int] = defaultdict(int)
    requests: list[Row] = []
    for row in rows:
        if row["kind"] == "step":
            totals.breaches += _step_breaches(row)
            _add_step(totals, row)
            for share in row["shares"]:
                key = row["engine"], share["request"]
                spent_ns[(*key, _phase(share))] += share["ns"]
                # A draft model's tokens are proposals: only the model's own count as computed.
                computed_tokens[key] += share["tokens"] if share["phase"] != "draft" else 0
        elif row["kind"] == "request":
            requests.append(row)
        elif row["kind"] == "device" and sum(row["ns_by"].values()) != row["wall_ns"]:
            totals.breaches.append(f"device {row['device']}: ns_by does not sum to wall_ns")
    totals.num_requests = len(requests)
    for row in requests:
        # A request that began before the records has an incomplete ledger, and says so.
        if not row["joined_late"]:
            key = row["engine"], row["request"]
            spent = {phase: spent_ns[(*key, phase)] for phase in ("prefill", "decode")}
            found = _request_breaches(row, spent, computed_tokens[key])
            totals.breaches += [f"request {row['request']}: {breach}" for breach in found]
    return totals


def _step_breaches(row: Row) -> Iterator[str]:
    parts = [share["ns"] for share in row["shares"]]
    parts += row["padding_ns"], row["unattributed_ns"]
    if sum(parts) != row["measured_ns"]:
        yield f"step {row['step']}: parts sum to {sum(parts)}, not to {row['measured_ns']}"
    if min(parts) < 0:
        yield f"step {row['step']}: a part is negative"


def _add_step(totals: Totals, row: Row) -> None:
    shares = row["shares"]
    totals.num_steps += 1
    totals.measured_ns += row["measured_ns"]
    totals.unattributed_ns += row["unattributed_ns"]
    totals.num_mixed += len({_phase(share) for share in shares}) > 1
    per_token = {round(share["ns"] / max(1, share["tokens"]), -2) for share in shares}
    totals.num_even += len(shares) > 3 and len(per_token) == 1


def _request_breaches(row: Row, spent: dict[str, int], computed_tokens: int) -> Iterator[str]:
    if row["ledger_ns"] is None:
        if not row["ledger_missing"]:
            yield "no ledger, and no reason"
        return
    ledger = row["ledger_ns"]
    if unknown := sorted(set(ledger) - CAUSES):
        yield f"unknown causes {unknown}"
    yield from _ledger_breaches("ledger", ledger, row["delivered_ns"] - row["arrived_ns"])
    if row["first_token_ns"] is not None:
        ttft_ns = row["first_token_ns"] - row["arrived_ns"]
        yield from _ledger_breaches("TTFT ledger", row["ttft_ledger_ns"], ttft_ns)
        if sum(row["tokens_per_event"]) != row["output_tokens"]:
            yield f"emitted {sum(row['tokens_per_event'])} of {row['output_tokens']} tokens"
    for phase, ns in spent.items():
        if row["compute_ns"].get(phase, 0) != ns:
            yield f"{phase} compute is {row['compute_ns'].get(phase, 0)}, its steps' shares {ns}"
    if row.get("cache") is not None:
        yield from _cache_breaches(row)
    if row["finish"] not in ("stop", "length"):  # a rejected one's prompt may be unknown
        return
    # The last token is sampled and never fed back, so it is not computed.
    least = row["prompt_tokens"] - (row["cached_tokens"] or 0) + row["output_tokens"] - 1
    if computed_tokens < least:
        yield f"computed {computed_tokens} tokens of at least {least}"


def _cache_breaches(row: Row) -> Iterator[str]:
    """Yield the laws that the division of a prompt by its use of the cache breaks."""
    cache = row["cache"]
    if unknown := sorted(set(cache["tokens"]) - CACHE_CLASSES):
        yield f"unknown classes {unknown}"
    if sum(cache["tokens"].values()) != row["prompt_tokens"]:
        yield f"cache classes sum to {sum(cache['tokens'].values())}, not to the prompt"
    if cache["gpu_ns"] is not None:
        priced = sum(cache["gpu_ns"].values()) + cache["recomputed_ns"]
        if priced != row["compute_ns"]["prefill"]:
            yield f"cache classes cost {priced}, the prefill {row['compute_ns']['prefill']}"
    if cache["ttft_ns"] is not None:
        waited = sum(cache["ttft_ns"].values())
        if waited != row["ttft_ledger_ns"].get("prefill_own", 0):
            yield f"cache classes took {waited} before the first token, unlike prefill_own"
    for part in (cache["tokens"], cache["gpu_ns"] or {}, cache["ttft_ns"] or {}):
        if min(part.values(), default=0) < 0:
            yield "a class of the cache is negative"


def _ledger_breaches(name: str, ledger: dict[str, int], total_ns: int) -> Iterator[str]:
    if sum(ledger.values()) != total_ns:
        yield f"{name} sums to {sum(ledger.values())}, not to {total_ns}"
    if min(ledger.values(), default=0) < 0:
        yield f"{name} has a negative row"


def _phase(share: Row) -> str:
    """Return the phase that a share counts for: verification and drafts are decode."""
    return "prefill" if share["phase"] == "prefill" else "decode"


def main() -> int:
    """Check a file and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.export_contract")
    parser.add_argument("file", type=Path)
    parser.add_argument("--min-requests", type=int, default=10, help="(default: 10)")
    parser.add_argument("--min-mixed", type=float, default=0.2, help="share of steps (default 0.2)")
    options = parser.parse_args()
    with options.file.open(encoding="utf-8") as lines:
        totals = check(json.loads(line) for line in lines if line.strip())
    for line in [*totals.breaches[:_MAX_SHOWN], str(totals)]:
        sys.stdout.write(f"{line}\n")
    is_kept = totals.is_kept(min_requests=options.min_requests, min_mixed=options.min_mixed)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
