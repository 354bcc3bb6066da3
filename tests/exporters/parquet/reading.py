"""Parquet files as lines of the contract."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

OLDER = Path(__file__).parents[2] / "golden" / "parquet-1"
"""Files of a short demo, written when `slices` had no column `synthetic` yet."""
_MAPS = ("ledger_ns", "ttft_ledger_ns", "provenance")
_ADDED = (
    "host",
    "model",
    "trace_id",
    "tenant",
    "priority",
    "endpoint",
    "arrived_utc",
    "delivered_utc",
    "started_utc",
)
"""Columns that the lines do not have."""


def table(folder: Path, name: str) -> pa.Table:
    """Return a table's files as one, oldest first, without the columns of their folders."""
    files = sorted(folder.glob(f"{name}/date=*/hour=*/*.parquet"))
    return pa.concat_tables([pq.ParquetFile(file).read() for file in files])


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the JSON Lines that these files were made with, but for their order."""
    shares: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in table(folder, "slices").to_pylist():
        share = {name: row[name] for name in ("request", "phase", "tokens", "context")}
        shares[_key(row)].append(share | {"recomputed": row["recomputed"], "ns": row["ns"]})
    steps = [
        {"kind": "step", **_normalized(row), "shares": shares.pop(_key(row), [])}
        for row in table(folder, "steps").to_pylist()
    ]
    assert not shares, "slices of no step"
    requests = []
    for row in table(folder, "requests").to_pylist():
        normalized = _normalized(row)
        requests.append(
            {"kind": "request", **normalized, **{name: dict(normalized[name]) for name in _MAPS}}
        )
    return steps + requests


def _normalized(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _ADDED}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["engine"], row["dp_rank"], row["rank"], row["step"]
