"""How near a device comes to its peaks: MFU of prefill, which computes, MBU of decode, which reads.

    MFU 46/61%   the model's FLOPs per second of prefill, of the maker's peak and of the measured
    MBU 62/74%   the memory's bytes per second of decode, as samples tell them, likewise

A peak that is not known is drawn `-`; a utilisation without a rate or a peak is left out.
"""

from __future__ import annotations

from inferscope.collector.snapshot import EngineView
from inferscope.tui.plots import UNKNOWN

OF_WHAT = "of spec/measured"
_NAMES = ("spec", "measured")


def format_peaks(view: EngineView) -> str:
    """Return the utilisations that are known, of the maker's and of the measured peak; or none."""
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
    """Return the known utilisations with what they are shares of; empty if none is known."""
    words = format_peaks(view)
    return f"{words} {OF_WHAT}" if words else ""


def _of(rate: float | None, peaks: dict[str, float]) -> str:
    known = [peaks.get(name) if rate is not None else None for name in _NAMES]
    words = [UNKNOWN if peak is None else f"{100 * (rate or 0.0) / peak:.0f}" for peak in known]
    return "/".join(words) + "%" if any(known) else ""
