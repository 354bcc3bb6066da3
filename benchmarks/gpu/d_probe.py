"""(d) The probe on against off, at batches of 1, 64 and 256: what observing costs.

The same pairs as benchmarks/probe_overhead.py, on the device and timed by its events.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from load import open_engine
from part import Setting, main
from probe_overhead import LARGEST_CALL_SHARE, compare

from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.probe import Probe

LARGEST_OVERHEAD = 0.005
_STEP_S = {True: 0.001, False: 0.02}
_STEPS = 8
"""Per half of a pair."""
_LEAST_PAIRS = 30


def measure(setting: Setting) -> dict[str, Any]:
    """Run the pairs at each batch."""
    batches = (1, 4) if setting.is_dry else (1, 64, 256)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        engine = open_engine(setting, max_running=max(batches), token_budget=4 * max(batches))
        timer = step_timer(engine.model.device)
        probe = Probe.open(describe(engine, name=setting.model), timer=timer)
        of_pair_s = 2 * _STEPS * _STEP_S[setting.is_dry]
        pairs = max(_LEAST_PAIRS, round(setting.seconds / len(batches) / of_pair_s))
        rows = [compare(engine, probe, batch, pairs=pairs, steps=_STEPS) for batch in batches]
        is_on = probe.on
        probe.close()
    for row in rows:
        row["passes"] = (
            row["calls_share"] <= LARGEST_CALL_SHARE
            and row["throughput_overhead"][2] <= LARGEST_OVERHEAD
            and row["p99_overhead"][2] <= LARGEST_OVERHEAD
        )
    lines = [
        f"batch {row['batch']}: step {row['step_ms']:.2f} ms, calls {row['calls_us']:.1f} µs "
        f"({row['calls_share']:.2%}), mean {row['throughput_overhead'][0]:+.2%} "
        f"[{row['throughput_overhead'][1]:+.2%} {row['throughput_overhead'][2]:+.2%}], p99 "
        f"{row['p99_overhead'][0]:+.2%} up to {row['p99_overhead'][2]:+.2%}"
        for row in rows
    ]
    return {"rows": rows, "pairs": pairs, "is_on_at_the_end": is_on, "lines": lines}


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
