"""Immutable view of an engine's counters: by phase since the fold began, and over the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inferscope.fold.join.counter_shares import (
    BUSY,
    ENERGY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
    WRITE,
    SettledBucket,
)
from inferscope.fold.join.request_counters import MOST_BLUR, NAMES
from inferscope.fold.snapshots import CountersView, DeviceCounters, PhaseUse
from inferscope.records import driver_uuid

if TYPE_CHECKING:
    from inferscope.fold.engine import EngineFold

Floats = NDArray[np.float64]

_PHASES = ("prefill", "decode")


def counters_view(engine: EngineFold, window_ns: int) -> CountersView:
    """Return a view of an engine's counters.

    Args:
        engine: the engine.
        window_ns: length of the window for its device use.
    """
    counters = engine.lives.counters
    found, values, blurred = counters.found, counters.totals, counters.blurred
    totals = _totals(values, counters.covered_totals, sum(counters.idle_uj.values()))
    methods = {
        name: "measured"
        if blurred[:, counted].sum() <= MOST_BLUR * values[:, counted].sum()
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
        up=tuple(sorted(counters.live_sources(engine.now_ns))),
        use=_use(engine, window_ns),
        devices=_devices(engine),
        host=counters.host_use_now(engine.now_ns),
        memory_peaks_bytes_s=engine.book.memory_peaks,
        compute_peaks_flops_s=engine.book.compute_peaks,
        clock_error_ns=max(
            (ring.clock.error_ns for ring in engine.rings.values() if ring.clock.error_ns),
            default=None,
        ),
        stamp_error_ns=counters.stamp_error_ns,
        num_unplaced=counters.num_unplaced,
    )


def _totals(values: Floats, known: Floats, idle_uj: float) -> dict[str, dict[str, int]]:
    """Return the counted values by name and phase.

    Args:
        values: [phases, counted].
        known: [phases, counted], time or bytes that the values cover.
        idle_uj: energy not assigned to a step, in microjoules.
    """
    totals = {
        name: {phase: round(float(values[at, counted])) for at, phase in enumerate(_PHASES)}
        for counted, name in NAMES.items()
        if known[:, counted].any()
    }
    if NAMES[ENERGY] in totals:
        totals[NAMES[ENERGY]]["idle"] = round(idle_uj)
    return totals


def _devices(engine: EngineFold) -> dict[str, DeviceCounters]:
    """Return the counters of each sampled device, by driver UUID."""
    counters = engine.lives.counters
    infos = {uuid: counters.info_of(uuid) for uuid in counters.gauges}
    boards = {uuid: info.device_uuid for uuid, info in infos.items() if info is not None}
    found = {}
    for uuid, board in boards.items():
        info = infos[uuid]
        assert info is not None
        is_apart = list(boards.values()).count(board) == 1
        found[driver_uuid(board if is_apart else info.mig_uuid or board)] = DeviceCounters(
            info.device,
            _totals(*counters.of_device(uuid), counters.idle_uj.get(uuid, 0.0)),
            counters.gauges_of(uuid, engine.now_ns),
        )
    return found


def _use(engine: EngineFold, window_ns: int) -> dict[str, PhaseUse]:
    """Return the device use of each phase over the window, empty without samples."""
    since_ns = engine.now_ns - window_ns
    recent = [each for end_ns, each in engine.lives.counters.recent if end_ns >= since_ns]
    if not recent:
        return {}
    sums = (
        np.array(recent).sum(axis=0).reshape(len(SettledBucket._fields), len(_PHASES), NUM_COUNTED)
    )
    values, known, cover, _ = sums
    use = {}
    for at, phase in enumerate(_PHASES):

        def rate(counted: int, phase: int = at) -> float | None:
            """Return units per nanosecond of the phase's own time that samples cover."""
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
