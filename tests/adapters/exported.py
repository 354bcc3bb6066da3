"""Export of a folder of rings, and sums over it."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from inferscope_jsonl import JsonlExporter

from inferscope.readers.source import catch_up, open_source

Row = dict[str, Any]


class Exported:
    """The export of all rings under a folder, taken apart."""

    def __init__(self, folder: Path) -> None:
        out = io.BytesIO()
        exporter = JsonlExporter(out)
        source = open_source(folder, sinks=(exporter,))
        try:
            catch_up(source)
        finally:
            source.close()
        exporter.close(source.collector.devices(), source.collector.totals())
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        self.steps = [row for row in rows if row["kind"] == "step"]
        self.requests = {row["request"]: row for row in rows if row["kind"] == "request"}
        (self.run,) = [row for row in rows if row["kind"] == "run"]
        self.tokens: dict[str, Counter[str]] = defaultdict(Counter)
        """Return tokens by request and phase; those computed again count as `recomputed`."""
        for step in self.steps:
            for share in step["shares"]:
                phase = "recomputed" if share["recomputed"] else share["phase"]
                self.tokens[share["request"]][phase] += share["tokens"]

    def names(self, prefix: str) -> list[str]:
        """Return the requests of one call, in the order of its sequences."""
        return sorted(name for name in self.requests if name.split("/")[0] == prefix)

    def check_sums(self) -> None:
        """Hold the laws of the export: ledgers and steps close, and nothing is lost."""
        assert self.run["lost"] == self.run["late"] == self.run["unjoined"] == 0
        for step in self.steps:
            parts = sum(share["ns"] for share in step["shares"])
            assert parts + step["padding_ns"] + step["unattributed_ns"] == step["measured_ns"]
        for row in self.requests.values():
            assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]
            assert min(row["ledger_ns"].values(), default=0) >= 0
            assert sum(row["tokens_per_event"]) == row["output_tokens"]

    def surplus(self, name: str) -> int:
        """Return the tokens computed beyond prompt + generated - 1; proposals left out."""
        row, tokens = self.requests[name], self.tokens[name]
        computed = tokens["prefill"] + tokens["decode"]
        return computed - (row["prompt_tokens"] - row["cached_tokens"] + row["output_tokens"] - 1)
