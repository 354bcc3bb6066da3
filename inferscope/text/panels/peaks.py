"""Utilization of the device's peak rates: MFU of prefill (compute), MBU of decode (memory).

    MFU 46/61%   the model's FLOPs per second of prefill, of the vendor's and the measured peak
    MBU 62/74%   sampled memory bytes per second of decode, likewise

An unknown peak is drawn as `-`; a utilization without a rate or a peak is left out.
"""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.plots import UNKNOWN

OF_WHAT = "of spec/measured"
_NAMES = ("spec", "measured")


def format_peaks(view: EngineView) -> str:
    """Return the known utilizations of the vendor's and the measured peak; empty if none."""
    counters = view.counters
    decode = counters.use.get("decode")
    moved = None
    if decode is not None and None not in (decode.read_bytes_s, decode.write_bytes_s):
        moved = (decode.read_bytes_s or 0.0) + (decode.write_bytes_s or 0.0)
    known = (
        ("MFU", _of(view.prefill_flops_s, counters.compute_peaks_flops_s)),
        ("MBU", _of(moved, counters.memory_peaks_bytes_s)),
    )
    return "  ".join(f"{name} {shares}" for name, shares in known if shares)


def peak_note(view: EngineView) -> str:
    """Return the known utilizations with the names of the peaks; empty if none."""
    parts = format_peaks(view)
    return f"{parts} {OF_WHAT}" if parts else ""


def _of(rate: float | None, peaks: dict[str, float]) -> str:
    known = [peaks.get(name) if rate is not None else None for name in _NAMES]
    parts = [UNKNOWN if peak is None else f"{100 * (rate or 0.0) / peak:.0f}" for peak in known]
    return "/".join(parts) + "%" if any(known) else ""
