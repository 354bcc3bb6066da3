"""Axes of times and rates with labels in fitting units."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))


def plain_duration(value_ns: float) -> str:
    """Return a duration as a short label: `1 ms`, `250 ms`, `2.5 s`."""
    for unit_ns, unit in _UNITS:
        if value_ns >= unit_ns * 0.9995:
            return f"{value_ns / unit_ns:.3g} {unit}"
    return f"{value_ns:.0f} ns"


def log_time_axis(axes: Axes) -> None:
    """Make the x axis logarithmic in nanoseconds, with labels of times."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    steps = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(10, subs=steps, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ns, _: plain_duration(ns)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def amount(value: float) -> str:
    """Return an amount with its SI prefix: `250 M`, `1.2 T`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g}"
