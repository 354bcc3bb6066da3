"""Steps and looks made up for the files' sake: when they were is all that matters."""

from __future__ import annotations

import numpy as np

from inferscope.fold.final_records import FinalStep
from inferscope.fold.snapshots import Snapshot

HOUR_S = 3600
T0_S = 1_800_000_000 // HOUR_S * HOUR_S
"""The wall time at which an hour begins, as a test's monotonic clock begins, too."""
SECOND_NS = 1_000_000_000


def step(number: int, at_s: float, *, num_slices: int = 2) -> FinalStep:
    """Return a step of `num_slices` slices of 1 µs each."""
    at_ns = round(at_s * SECOND_NS)
    return FinalStep(
        engine_id="engine",
        dp_rank=0,
        rank=0,
        step=number,
        start_ns=at_ns,
        end_ns=at_ns + 1000 * num_slices,
        measured_ns=1000 * num_slices,
        clock="host",
        mode="eager",
        is_cold=False,
        fit_id="",
        request_ids=tuple(f"r{i}" for i in range(num_slices)),
        phases=np.array([i % 4 for i in range(num_slices)], dtype=np.uint8),
        tokens=np.ones(num_slices, dtype=np.int64),
        contexts=np.arange(num_slices, dtype=np.int64),
        flags=np.zeros(num_slices, dtype=np.uint8),
        shares_ns=np.full(num_slices, 1000, dtype=np.int64),
        padding_ns=0,
        unattributed_ns=0,
        model_residual=0.0,
    )


def look(at_s: float, *, set_by_s: float = 0.0) -> Snapshot:
    """Return a snapshot at a time, with a wall clock that may have been set."""
    mono_ns = round(at_s * SECOND_NS)
    return Snapshot(mono_ns, mono_ns + round((T0_S + set_by_s) * SECOND_NS), "live", (), "")
