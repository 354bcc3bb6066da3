"""Opening the past: which source, from when to when, and what to say where it holds nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from inferscope.cli.engine_list import write_list
from inferscope.cli.moments import Moment
from inferscope.cli.targets import Choose, engine_of, extent_of, path_of, rings_of
from inferscope.collector.history import HistorySource, Open
from inferscope.collector.source import RingSource, open_source
from inferscope.errors import BadInput, NotFound
from inferscope.ring.discovery import EngineRings, find_engines
from inferscope.ring.extent import Extent, extent_of_recording, extent_of_rings
from inferscope.tui.plots import clock, duration
from inferscope.tui.scene import WINDOWS_NS

_BEFORE_NS = 60_000_000_000
"""Kept ahead of a moment that is asked for alone: what led to it."""
_PATIENCE_S = 300.0


class _Held(NamedTuple):
    """Something that can be opened on its past."""

    name: str
    open_with: Open
    extent: Extent
    """Of its records."""
    now: Extent
    """The same, but it ends at what `-5m` is counted from."""


def open_past(
    target: str | None,
    *,
    since: Moment | None,
    at: Moment | None,
    window_ns: int | None,
    choose: Choose | None = None,
) -> tuple[HistorySource, int]:
    """Open what the user named, and read it up to its present.

    Args:
        target: as on the command line.
        since: from when on to show it.
        at: the moment to open on.
        window_ns: of distributions and rates; None takes what fits.
        choose: asks which of several engines is meant; without it they are an error.

    Returns:
        The source, and the window.

    Raises:
        NotFound: nothing is there, or nothing of that time.
        BadInput: the moment lies outside of what is there.
    """
    path = path_of(target)
    held = _file(path) if path is not None else _engine(target, since or at, choose)
    first_ns, last_ns = held.extent
    at_ns = None if at is None else at.real_ns(held.now)
    if at_ns is not None and not first_ns <= at_ns <= last_ns:
        assert at is not None
        raise BadInput(
            f"--at is {at.text}, which is {clock(at_ns)}; {held.name} reaches from"
            f" {clock(first_ns)} to {clock(last_ns)}."
        )
    if since is not None:
        since_ns = since.real_ns(held.now)
        if since_ns > last_ns:
            ago = duration(held.now.last_real_ns - last_ns)
            raise NotFound(
                f"{held.name} ended at {clock(last_ns)}, {ago} ago: nothing of it is newer than"
                f" {clock(since_ns)}. Look further back."
            )
    else:
        assert at_ns is not None
        since_ns = at_ns - _BEFORE_NS
    since_ns = max(since_ns, first_ns)
    if window_ns is None:
        fitting = [window for window in WINDOWS_NS if window >= last_ns - since_ns]
        window_ns = min(fitting, default=max(WINDOWS_NS)) if at is None else WINDOWS_NS[1]
    source = HistorySource(
        held.open_with, since_ns=since_ns, until_ns=last_ns, at_ns=at_ns, window_ns=window_ns
    )
    try:
        source.catch_up(patience_s=_PATIENCE_S)
    except BaseException:
        source.close()
        raise
    return source, window_ns


def _file(path: Path) -> _Held:
    open_source(path).close()  # says what is wrong with it
    if path.is_dir():
        extent = extent_of_rings(path.glob("**/*.ring"))
    elif path.suffix == ".ring":
        extent = extent_of_rings([path])
    else:
        extent = extent_of_recording(path)
    if extent is None:
        raise NotFound(f"{path} holds no records.")
    return _Held(
        str(path),
        lambda sinks, listen: open_source(path, sinks=sinks, listen=listen),
        extent,
        extent,
    )


def _engine(target: str | None, moment: Moment | None, choose: Choose | None) -> _Held:
    if target is None:
        return _only_one(moment, choose)
    return _rings(engine_of(target, choose=choose))


def _rings(engine: EngineRings) -> _Held:
    extent = extent_of(engine)
    if extent is None:
        raise NotFound(f"the rings of {engine.engine_id} hold no records.")
    return _Held(
        engine.engine_id,
        lambda sinks, listen: RingSource(
            rings_of(engine), name=engine.engine_id, sinks=sinks, listen=listen
        ),
        extent,
        # Five minutes ago are five minutes before now, however long the engine has been dead.
        extent._replace(last_real_ns=max(extent.last_real_ns, time.time_ns())),
    )


def _only_one(moment: Moment | None, choose: Choose | None) -> _Held:
    """Return the only engine alive; with none alive, the only one that reaches up to a moment.

    Raises:
        NotFound: there is none, or more than one, with what to do.
    """
    engines = find_engines()
    now_ns = time.monotonic_ns()
    if moment is None or not engines or any(engine.is_alive(now_ns) for engine in engines):
        return _rings(engine_of(None, choose=choose))
    held = [_rings(engine) for engine in engines if extent_of(engine) is not None]
    reaching = [one for one in held if one.extent.last_real_ns >= moment.real_ns(one.now)]
    if len(reaching) == 1:
        return reaching[0]
    write_list(engines)
    if reaching:
        raise NotFound(f"{len(reaching)} engines of that time have left rings. Name one by its id.")
    raise NotFound(
        f"no engine is running, and none reaches up to {moment.text}. Look further back."
    )
