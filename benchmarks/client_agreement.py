"""TTFT and E2E of InferScope against the load generator's own clock.

    inferscope demo --headless --out FOLDER
    python benchmarks/client_agreement.py FOLDER

The client's clock starts before ours and stops after it, so client minus ours is never negative;
how large it is tells how much of a client's wait the probe cannot see. Bound: 5 ms at p99.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

BOUND_MS = 5.0


def main() -> int:
    """Compare and print; exit with 1 if the bound is missed."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    exported = map(json.loads, (options.folder / "demo.jsonl").open(encoding="utf-8"))
    ours = {row["external_id"]: row for row in exported if row["kind"] == "request"}
    differences: dict[str, list[float]] = {"ttft_ms": [], "e2e_ms": []}
    for line in (options.folder / "client.jsonl").open(encoding="utf-8"):
        client = json.loads(line)
        request = ours.get(client["name"])
        if request is None or client["first_token_ns"] is None:
            continue
        for name, edge in (("ttft_ms", "first_token_ns"), ("e2e_ms", "last_token_ns")):
            seen_ns = client[edge] - client["sent_ns"]
            differences[name].append((seen_ns - request[edge] + request["arrived_ns"]) / 1e6)
    result = {
        name: {
            "requests": len(values),
            "min": round(min(values), 3),
            "p50": round(sorted(values)[len(values) // 2], 3),
            "p99": round(sorted(values)[int(0.99 * len(values))], 3),
            "max": round(max(values), 3),
        }
        for name, values in differences.items()
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    is_fine = all(row["min"] >= 0 and row["p99"] <= BOUND_MS for row in result.values())
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
