"""A recording as the screen sees it, and as JSON Lines export it."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from inferscope_jsonl import JsonlExporter

from inferscope.fold import FOR_SCREEN, Snapshot
from inferscope.readers import open_replay

DEMO = Path(__file__).parents[1] / "samples" / "demo.isr"
_HOUR_NS = 3_600_000_000_000


@cache
def recorded() -> tuple[Snapshot, list[dict[str, Any]]]:
    """Return the last snapshot of the demo's recording with its steps, and its exported rows."""
    out = io.BytesIO()
    sink = JsonlExporter(out)
    source = open_replay(DEMO, sinks=(sink,), listen=sink.on_record, keep=FOR_SCREEN)
    source.has_steps = True
    look = source.snapshot(_HOUR_NS)
    sink.close(source.collector.devices(), source.collector.totals())
    source.close()
    return look, [json.loads(line) for line in out.getvalue().splitlines()]
