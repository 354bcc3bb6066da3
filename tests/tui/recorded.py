"""A recording as the screen shows it, and as it is exported: both from one fold.

Its requests are judged by the objectives of `samples/slo.yaml`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from inferscope_jsonl import JsonlExporter

from inferscope.fold.snapshots import EngineView
from inferscope.insight import JudgedSource, LevelsWatch
from inferscope.insight.findings import RunSummarizer
from inferscope.readers import open_source
from inferscope.records import Record
from inferscope.slo import read_objectives

SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"
OBJECTIVES = read_objectives(SAMPLE.with_name("slo.yaml"))
WHOLE_NS = 320 * 10**9


class Recorded(NamedTuple):
    """The only engine of a recording at its end."""

    view: EngineView
    records: tuple[Record, ...]
    lines: tuple[dict[str, Any], ...]

    def exported(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the exported lines of a kind."""
        return (line for line in self.lines if line["kind"] == kind)


@cache
def recorded(path: Path = SAMPLE) -> Recorded:
    """Fold a recording once, for all tests of a process."""
    out, records = io.BytesIO(), list[Record]()
    exporter = JsonlExporter(out)

    def listen(ring: int, record: Record) -> None:
        exporter.on_record(ring, record)
        levels.on_record(ring, record)
        summarizer.on_record(ring, record)
        records.append(record)

    levels, summarizer = LevelsWatch(OBJECTIVES, origin="slo.yaml"), RunSummarizer()
    source = open_source(path, sinks=(exporter, levels, summarizer), listen=listen)
    (view,) = JudgedSource(source, summarizer, levels).snapshot(WHOLE_NS).engines
    exporter.close(source.collector.devices(), source.collector.totals())
    source.close()
    return Recorded(view, tuple(records), tuple(map(json.loads, out.getvalue().splitlines())))
