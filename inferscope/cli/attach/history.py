"""Opening of history for `attach --since` and `--at`: the source, its time range, its errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from inferscope.cli.engine_list import write_list
from inferscope.cli.targets import Choose, engine_of, extent_of, path_of, rings_of
from inferscope.cli.time_args import Moment
from inferscope.errors import BadInput, NotFound
from inferscope.fold import FOR_SCREEN
from inferscope.readers import HistorySource, Open, RingSource, open_source
from inferscope.ring import EngineRings, Extent, extent_of_recording, extent_of_rings, find_engines
from inferscope.text import WINDOWS_NS
from inferscope.text.plots import clock, duration

_BEFORE_NS = 60_000_000_000
"""History read before the time of `--at`, if `--since` is not given."""
_PATIENCE_S = 300.0


class _Candidate(NamedTuple):
    """Source with history: a file, or an engine's rings."""

    name: str
    open_with: Open
    extent: Extent
    """Time range of the records."""
    now: Extent
    """The same range, but with the end that durations such as `-5m` count from."""


def open_history(
    target: str | None,
    *,
    since: Moment | None,
    at: Moment | None,
    window_ns: int | None,
    has_steps: bool = False,
    choose: Choose | None = None,
) -> tuple[HistorySource, int]:
    """Open the history of a target, and read it up to its newest record.

    Args:
        target: target as given on the command line.
        since: start of the history to show.
        at: time at which the history opens.
        window_ns: window of distributions and rates; None selects one that fits.
        has_steps: whether the snapshot at `at` includes recent steps.
        choose: function that picks one of several running engines; without it they are an error.

    Returns:
        The source, and the window in nanoseconds.

    Raises:
        NotFound: the target does not exist, or has no records of that time.
        BadInput: `at` lies outside of the target's time range.
    """
    path = path_of(target)
    found = _file(path) if path is not None else _engine(target, since or at, choose)
    first_ns, last_ns = found.extent
    at_ns = None if at is None else at.real_ns(found.now)
    if at_ns is not None and not first_ns <= at_ns <= last_ns:
        assert at is not None
        raise BadInput(
            f"--at is {at.text}, which is {clock(at_ns)}; {found.name} has records from"
            f" {clock(first_ns)} to {clock(last_ns)}. Give a time between these."
        )
    if since is not None:
        since_ns = since.real_ns(found.now)
        if since_ns > last_ns:
            ago = duration(found.now.last_real_ns - last_ns)
            raise NotFound(
                f"{found.name} ended at {clock(last_ns)}, {ago} ago: it has no records after"
                f" {clock(since_ns)}. Give an earlier --since."
            )
    else:
        assert at_ns is not None
        since_ns = at_ns - _BEFORE_NS
    since_ns = max(since_ns, first_ns)
    if window_ns is None:
        fitting = [window for window in WINDOWS_NS if window >= last_ns - since_ns]
        window_ns = min(fitting, default=max(WINDOWS_NS)) if at is None else WINDOWS_NS[1]
    source = HistorySource(
        found.open_with, since_ns=since_ns, until_ns=last_ns, at_ns=at_ns, window_ns=window_ns
    )
    source.has_steps = has_steps
    try:
        source.catch_up(patience_s=_PATIENCE_S)
    except BaseException:
        source.close()
        raise
    return source, window_ns


def _file(path: Path) -> _Candidate:
    open_source(path).close()  # raises for an unreadable file
    if path.is_dir():
        extent = extent_of_rings(path.glob("**/*.ring"))
    elif path.suffix == ".ring":
        extent = extent_of_rings([path])
    else:
        extent = extent_of_recording(path)
    if extent is None:
        raise NotFound(f"{path} holds no records.")
    return _Candidate(
        str(path),
        lambda sinks, listen: open_source(path, sinks=sinks, listen=listen, keep=FOR_SCREEN),
        extent,
        extent,
    )


def _engine(target: str | None, moment: Moment | None, choose: Choose | None) -> _Candidate:
    if target is None:
        return _only_one(moment, choose)
    return _rings(engine_of(target, choose=choose))


def _rings(engine: EngineRings) -> _Candidate:
    extent = extent_of(engine)
    if extent is None:
        raise NotFound(f"the rings of {engine.engine_id} hold no records.")
    return _Candidate(
        engine.engine_id,
        lambda sinks, listen: RingSource(
            rings_of(engine),
            name=engine.engine_id,
            sinks=sinks,
            listen=listen,
            keep=FOR_SCREEN,
        ),
        extent,
        # Durations count from now, even if the engine ended long ago.
        extent._replace(last_real_ns=max(extent.last_real_ns, time.time_ns())),
    )


def _only_one(moment: Moment | None, choose: Choose | None) -> _Candidate:
    """Return the only running engine; if none runs, the only one with records after a moment.

    Raises:
        NotFound: there is no such engine, or more than one.
    """
    engines = find_engines()
    now_ns = time.monotonic_ns()
    if moment is None or not engines or any(engine.is_alive(now_ns) for engine in engines):
        return _rings(engine_of(None, choose=choose))
    ended = [_rings(engine) for engine in engines if extent_of(engine) is not None]
    matching = [one for one in ended if one.extent.last_real_ns >= moment.real_ns(one.now)]
    if len(matching) == 1:
        return matching[0]
    write_list(engines)
    if matching:
        raise NotFound(f"{len(matching)} engines have records of that time. Name one by its ID.")
    raise NotFound(
        f"no engine is running, and none has records after {moment.text}. Give an earlier time."
    )
