"""Column form of counter samples: windows of one source, as the join reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import LONGEST_SHORT_NS
from inferscope.records import COLUMNS, CounterSample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SOURCES = ("pm", "gpm", "dcgm", "nvml")
"""Sources of joined samples, best first: of two with the same value only the better is used."""
_JOINED = frozenset(("sm_active_share", "busy_share", "dram_share", "dram_read_bytes", "energy_uj"))

_END_OF_TIME_NS = 1 << 62


class Window(NamedTuple):
    """Sample windows of one source: [samples] each."""

    source: str
    from_ns: Ints
    to_ns: Ints
    values: dict[str, Floats]

    @property
    def end_ns(self) -> int:
        """Return the end of the last window."""
        return self.to_ns.item(-1)


SampleWindows = Window | CounterSample
"""Short windows of a sample, or the sample itself, which is one long window."""


def read(record: CounterSample) -> SampleWindows | None:
    """Return the windows of a sample with values to join, None for other or damaged ones."""
    if record.starts_ns:
        window = as_recorded(record)
        return None if window is None else in_order(window)
    if record.source not in SOURCES or _JOINED.isdisjoint(record.values):
        return None
    return record if 0 <= record.start_ns < record.end_ns < _END_OF_TIME_NS else None


def as_recorded(record: CounterSample) -> Window | None:
    """Return the windows of a sample in the order of its columns, whatever their times.

    Return None if it is unreadable, or has no value to join.
    """
    if record.source not in SOURCES or _JOINED.isdisjoint(record.values):
        return None
    if not record.starts_ns:
        return _alone(record)
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


def in_order(window: Window) -> Window | None:
    """Sort windows by time and drop empty ones; return None if none is left."""
    order = np.argsort(window.from_ns, kind="stable")
    return only(window, order[window.to_ns[order] > window.from_ns[order]])


def only(window: Window, which: Ints | NDArray[np.bool_]) -> Window | None:
    """Return some of the windows, by index or mask; None if there are none."""
    from_ns = window.from_ns[which]
    if not len(from_ns):
        return None
    values = {word: column[which] for word, column in window.values.items()}
    return Window(window.source, from_ns, window.to_ns[which], values)


def group_alike(
    samples: list[tuple[SampleWindows, float]],
) -> list[tuple[list[SampleWindows], float]]:
    """Group the samples of one source with the same values: a group costs little more than one.

    Args:
        samples: samples, each with the share of the device that other processes used then.
    """
    found: dict[tuple[object, ...], tuple[list[SampleWindows], float]] = {}
    for each, foreign_share in samples:
        key = (each.source, *each.values, foreign_share)
        if key in found:
            found[key][0].append(each)
        else:
            found[key] = ([each], foreign_share)
    return list(found.values())


def split_windows(given: Sequence[SampleWindows]) -> list[CounterSample]:
    """Return one sample per window of samples of one source with the same values."""
    samples = []
    for each in given:
        if isinstance(each, CounterSample):
            samples.append(each)
            continue
        columns = [column.tolist() for column in each.values.values()]
        for start_ns, end_ns, *values in zip(
            each.from_ns.tolist(), each.to_ns.tolist(), *columns, strict=True
        ):
            of = dict(zip(each.values, values, strict=True))
            samples.append(CounterSample(end_ns, "", start_ns, end_ns, each.source, of))
    return samples


def concat(samples: Sequence[SampleWindows]) -> Window:
    """Return the windows of samples of one source with the same values, as columns."""
    windows = [_alone(each) if isinstance(each, CounterSample) else each for each in samples]
    if len(windows) == 1:
        return windows[0]
    return Window(
        windows[0].source,
        np.concatenate([window.from_ns for window in windows]),
        np.concatenate([window.to_ns for window in windows]),
        {
            word: np.concatenate([window.values[word] for window in windows])
            for word in windows[0].values
        },
    )


def are_short(samples: list[SampleWindows]) -> bool:
    """Return whether every window of the samples is shorter than most steps."""
    return all(
        each.end_ns - each.start_ns <= LONGEST_SHORT_NS
        if isinstance(each, CounterSample)
        else int((each.to_ns - each.from_ns).max()) <= LONGEST_SHORT_NS
        for each in samples
    )


def num_windows_of(samples: list[SampleWindows]) -> int:
    """Return the number of windows in the samples."""
    return sum(1 if isinstance(each, CounterSample) else len(each.from_ns) for each in samples)


def _alone(record: CounterSample) -> Window:
    values = {word: np.array([value]) for word, value in record.values.items()}
    span = np.array([[record.start_ns], [record.end_ns]], dtype=np.int64)
    return Window(record.source, span[0], span[1], values)
