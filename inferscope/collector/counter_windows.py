"""Samples as the join takes them: windows of one source, in columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.records import COLUMNS, CounterSample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SOURCES = ("pm", "gpm", "dcgm", "nvml")
"""Best first: of two that tell the same only the better is taken."""
_JOINED = frozenset(("sm_active_share", "busy_share", "dram_share", "dram_read_bytes", "energy_uj"))


class Window(NamedTuple):
    """Samples of one record: [samples] each."""

    source: str
    from_ns: Ints
    to_ns: Ints
    values: dict[str, Floats]


def read(record: CounterSample) -> Window | None:
    """Return the short windows of a sample, itself where it has none; None if it is unreadable."""
    told = as_told(record)
    return None if told is None else in_order(told)


def as_told(record: CounterSample) -> Window | None:
    """Return what `read` does in the order in which the source told it, whatever its times."""
    if record.source not in SOURCES or not _JOINED & record.values.keys():
        return None
    if not record.starts_ns:
        values = {word: np.array([value]) for word, value in record.values.items()}
        span = np.array([[record.start_ns], [record.end_ns]], dtype=np.int64)
        return Window(record.source, span[0], span[1], values)
    try:
        from_ns = np.frombuffer(record.starts_ns, dtype=COLUMNS["starts_ns"]).astype(np.int64)
        to_ns = np.frombuffer(record.ends_ns, dtype=COLUMNS["ends_ns"]).astype(np.int64)
        columns = {
            word: np.frombuffer(raw, dtype=COLUMNS["series"]).astype(np.float64)
            for word, raw in record.series.items()
        }
    except ValueError:
        return None
    if any(len(column) != len(from_ns) for column in (to_ns, *columns.values())):
        return None
    return Window(record.source, from_ns, to_ns, columns)


def in_order(told: Window) -> Window | None:
    """Put windows in the order of time, without those of no length; None if none is left."""
    order = np.argsort(told.from_ns, kind="stable")
    return only(told, order[told.to_ns[order] > told.from_ns[order]])


def only(told: Window, which: Ints | NDArray[np.bool_]) -> Window | None:
    """Return some of the windows, by place or mask; None for none."""
    from_ns = told.from_ns[which]
    if not len(from_ns):
        return None
    values = {word: column[which] for word, column in told.values.items()}
    return Window(told.source, from_ns, told.to_ns[which], values)


def together(windows: list[Window]) -> Iterable[Window]:
    """Put windows of one source that tell the same into one: they cost little more than one."""
    alike: dict[tuple[str, ...], list[Window]] = {}
    for window in windows:
        alike.setdefault((window.source, *window.values), []).append(window)
    for (source, *words), found in alike.items():
        yield Window(
            source,
            np.concatenate([window.from_ns for window in found]),
            np.concatenate([window.to_ns for window in found]),
            {word: np.concatenate([window.values[word] for window in found]) for word in words},
        )
