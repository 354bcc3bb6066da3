"""Correction of record times from a process whose monotonic clock differs from the reader's.

Durations, offsets of a device's clock and wall times are not changed.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from inferscope.records import (
    COLUMNS,
    CacheLookup,
    Clock,
    CounterSample,
    Emitted,
    Keyframe,
    Live,
    ProbeHealth,
    Record,
    RequestEvent,
    StepPlan,
    StepSame,
    StepSpan,
    Transfer,
)

TIMES: dict[type[Record], tuple[str, ...]] = {
    Keyframe: ("paused_ns",),
    StepPlan: ("start_ns", "end_ns"),
    StepSame: ("start_ns",),
    StepSpan: ("launch_start_ns", "launch_end_ns", "ready_ns"),
    Emitted: ("at_ns",),
    RequestEvent: ("at_ns",),
    Live: ("arrived_ns",),
    Clock: ("host_ns",),
    ProbeHealth: ("complete_through_ns",),
    CounterSample: ("start_ns", "end_ns", "starts_ns", "ends_ns"),
    Transfer: ("start_ns", "end_ns"),
    CacheLookup: ("evicted_ns",),
}
"""Fields on the monotonic clock besides `t_ns`: numbers, None without a time, and columns."""


def shifted(record: Record, skew_ns: int) -> Record:
    """Return a record with all its times shifted by `skew_ns`."""
    changes: dict[str, object] = {"t_ns": record.t_ns + skew_ns}
    for name in TIMES.get(type(record), ()):
        value = getattr(record, name)
        if isinstance(value, bytes):
            if len(value) % 8 == 0:  # else a damaged column, which the fold counts
                column = np.frombuffer(value, dtype=COLUMNS[name]) + np.int64(skew_ns)
                changes[name] = column.tobytes()
        elif value is not None:
            changes[name] = value + skew_ns
    if isinstance(record, CounterSample) and record.real_offset_ns is not None:
        changes["real_offset_ns"] = record.real_offset_ns - skew_ns
    return replace(record, **changes)
