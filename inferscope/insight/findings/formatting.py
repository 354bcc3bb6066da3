"""Formatting of numbers in findings."""

from __future__ import annotations


def duration(ns: float) -> str:
    """Return a duration with two or three digits, in a fitting unit."""
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= unit_ns * 0.9995:
            amount = ns / unit_ns
            return f"{amount:.0f} {unit}" if amount >= 99.95 else f"{amount:.3g} {unit}"
    return f"{ns:.0f} ns"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f}%" if share >= 0.0995 or not share else f"{100 * share:.1f}%"


def times(factor: float) -> str:
    """Return a factor."""
    return f"{factor:.0f}x" if factor >= 9.95 else f"{factor:.2g}x"
