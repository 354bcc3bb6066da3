"""Corrections of a ring's times to its reader's clock (`clock_skew`).

A ring states pairs of both clocks in its header and in every keyframe (`Clock`). Their difference
deviates from the reader's in another time namespace, but also if the wall clock was set or the
machine slept between the two readings. For a running process the heartbeat decides: the clock by
which it is recent. For an ended process the other rings of its engine decide, by their pairs of the
same age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from inferscope.clock_skew import Offsets, differ, skew_between_ns
from inferscope.errors import UnreadableFile
from inferscope.records import Clock, Record, UnknownRecord, decode
from inferscope.ring.reader import Frame, RingReader

_RECENT_NS = 5_000_000_000
"""Largest age in nanoseconds of a running process's heartbeat; probes beat every 100 ms."""
_LARGEST_NS = 1 << 61
"""Largest plausible skew in nanoseconds: beyond decades, the records are damaged."""
_COPY_BYTES, _NUM_COPIES = 1 << 18, 8
"""Bytes and number of copies to read until a keyframe's `Clock`, which follows its requests."""
_MOST_ROUNDS = 3
"""Rounds per copy: a filler and a frame larger than a copy take one each."""


def offsets_of(reader: RingReader) -> Offsets:
    """Return a ring's offsets at its creation and in its newest keyframe."""
    me, last = reader.identity, _last_clock(reader)
    first_ns = me.start_real_ns - me.start_ns
    if last is None:
        return Offsets(first_ns, first_ns, me.start_real_ns, me.start_real_ns)
    return Offsets(first_ns, last.real_ns - last.at_ns, me.start_real_ns, last.real_ns)


class Here(NamedTuple):
    """The clocks of the reading process."""

    boot_id: str
    now_ns: int
    offset_ns: int
    """Wall clock minus monotonic clock, in nanoseconds."""


def read_here(
    boot_id: str,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
    real_ns: Callable[[], int] = time.time_ns,
) -> Here:
    """Read both clocks a few times and return the tightest pair."""
    readings = []
    for _ in range(3):
        before_ns, wall_ns, after_ns = monotonic_ns(), real_ns(), monotonic_ns()
        readings.append((after_ns - before_ns, after_ns, wall_ns - before_ns))
    _, now_ns, offset_ns = min(readings)
    return Here(boot_id, now_ns, offset_ns)


def running_skew_ns(reader: RingReader, here: Here) -> int | None:
    """Return the nanoseconds to add to a running process's times to get the reader's clock.

    Returns:
        0 if the clocks are the same; None if the process has ended, or is on another kernel.
        For an ended process with future times, only the difference of the clocks is known.
    """
    identity, here_ns = reader.identity, here.offset_ns
    if identity.boot_id != here.boot_id:
        return None
    if not differ(identity.start_real_ns - identity.start_ns, here_ns):
        return 0
    offsets = offsets_of(reader)
    if not differ(offsets.last_ns, here_ns):
        return 0  # the wall clock was set since the start
    skew_ns = _possible(offsets.best_ns - here_ns)
    age_ns = here.now_ns - reader.heartbeat_ns()
    if min(abs(age_ns), abs(age_ns - skew_ns)) >= _RECENT_NS:
        is_to_come = (
            differ(offsets.last_mono_ns, here.now_ns) and offsets.last_mono_ns > here.now_ns
        )
        return skew_ns if is_to_come else None
    return skew_ns if abs(age_ns - skew_ns) < abs(age_ns) else 0


def ended_skew_ns(reader: RingReader, others: Iterable[RingReader]) -> int:
    """Return the nanoseconds to add to an ended process's times, from its engine's rings.

    Args:
        reader: the ring of the process.
        others: rings of its engine, with `skew_ns` set; the first usable one on its kernel counts.

    Returns:
        The correction, 0 if no ring determines it.
    """
    me = reader.identity
    for other in others:
        if other is reader or other.identity.boot_id != me.boot_id:
            continue
        theirs = other.identity
        if not differ(me.start_real_ns - me.start_ns, theirs.start_real_ns - theirs.start_ns):
            return other.skew_ns
        skew_ns = skew_between_ns(offsets_of(reader), offsets_of(other))
        if skew_ns is not None:
            return _possible(skew_ns + other.skew_ns)
    return 0


def _possible(skew_ns: int) -> int:
    return skew_ns if abs(skew_ns) < _LARGEST_NS else 0


def _last_clock(reader: RingReader) -> Clock | None:
    """Return the `Clock` of a ring's last keyframe, None if it cannot be read."""
    try:
        again = RingReader(reader.path)
    except UnreadableFile:  # the file was removed meanwhile
        return None
    try:
        again.skip_to_last_keyframe()
        for _ in range(_NUM_COPIES):
            frames = again.read(_COPY_BYTES, most_rounds=_MOST_ROUNDS)
            if not frames:
                return None  # a search of all of a damaged ring would take minutes
            for frame in frames:
                if not isinstance(frame, Frame) or frame.code != Clock.CODE:
                    continue
                try:
                    clock: Record = decode(frame.code, frame.payload)
                except UnknownRecord:
                    continue
                if isinstance(clock, Clock) and clock.device_ns is None:
                    return clock
        return None
    finally:
        again.close()
