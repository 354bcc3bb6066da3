"""What counters say of an engine, frozen: by phase since the fold began, and over the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inferscope.collector.accounts import (
    BUSY,
    ENERGY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
    WRITE,
    Settled,
)
from inferscope.collector.counted import MOST_BLUR, NAMES
from inferscope.collector.snapshot import CountersView, PhaseUse

if TYPE_CHECKING:
    from inferscope.collector.engine import EngineFold

_PHASES = ("prefill", "decode")


def counters_view(engine: EngineFold, window_ns: int) -> CountersView:
    """Freeze an engine's counters.

    Args:
        engine: whose they are.
        window_ns: how far back its use of the device is told.
    """
    counters = engine.lives.counters
    found = counters.found
    totals = {
        name: {
            phase: round(float(counters.totals[at, counted])) for at, phase in enumerate(_PHASES)
        }
        for counted, name in NAMES.items()
        if counters.of_totals[:, counted].any()
    }
    if ENERGY in found.sources and "energy_uj" in totals:
        totals["energy_uj"]["idle"] = round(found.idle_uj)
    methods = {
        name: "measured"
        if counters.blurred[:, counted].sum() <= MOST_BLUR * counters.totals[:, counted].sum()
        else "apportioned"
        for counted, name in NAMES.items()
        if name in totals
    }
    fits = {"sm_active_ns": found.sm, "energy_uj": found.energy}
    return CountersView(
        reason=counters.reason(),
        totals=totals,
        methods=methods,
        sources={NAMES[counted]: source for counted, source in found.sources.items()},
        errors={name: fit.error() for name, fit in fits.items() if name in totals},
        up=tuple(sorted(counters.heard(engine.now_ns))),
        use=_use(engine, window_ns),
        gauges=counters.gauges_now(engine.now_ns),
        memory_peaks=engine.book.memory_peaks,
        clock_error_ns=max(
            (ring.clock.error_ns for ring in engine.rings.values() if ring.clock.error_ns),
            default=None,
        ),
        stamp_error_ns=counters.stamp_error_ns,
        num_unplaced=counters.num_unplaced,
    )


def _use(engine: EngineFold, window_ns: int) -> dict[str, PhaseUse]:
    """Return how the phases used the device over the window; nothing where nothing is known."""
    since_ns = engine.now_ns - window_ns
    recent = [each for end_ns, each in engine.lives.counters.recent if end_ns >= since_ns]
    if not recent:
        return {}
    sums = np.array(recent).sum(axis=0).reshape(len(Settled._fields), len(_PHASES), NUM_COUNTED)
    values, known, cover, _ = sums
    use = {}
    for at, phase in enumerate(_PHASES):

        def rate(counted: int, phase: int = at) -> float | None:
            """Return units per nanosecond of the phase's own time, as far as samples cover it."""
            total = cover[phase, counted]
            covered_ns = known[phase, counted] / total * cover[phase, SM_ACTIVE] if total else 0
            return float(values[phase, counted] / covered_ns) if covered_ns > 0 else None

        def scaled(counted: int, factor: float) -> float | None:
            found = rate(counted)
            return None if found is None else found * factor

        use[phase] = PhaseUse(
            rate(SM_ACTIVE), rate(BUSY), scaled(READ, 1e9), scaled(WRITE, 1e9), scaled(ENERGY, 1e3)
        )
    return use
