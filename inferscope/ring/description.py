"""The engine description in the last keyframe of its rings, read without a fold."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from inferscope.errors import UnreadableFile
from inferscope.records import EngineInfo, Keyframe, UnknownRecord, decode
from inferscope.ring.reader import Frame, RingReader

_NUM_READS = 2
"""Reads after a keyframe: the published head may lie between it and the description."""


def description_of_rings(paths: Iterable[Path]) -> EngineInfo | None:
    """Return the first engine description found in the rings, None if they hold none.

    Every keyframe restates it. A ring whose only keyframe is overwritten yields none.
    """
    for path in paths:
        with suppress(UnreadableFile, OSError):
            reader = RingReader(path)
            try:
                info = _last_description(reader)
            finally:
                reader.close()
            if info is not None:
                return info
    return None


def _last_description(reader: RingReader) -> EngineInfo | None:
    reader.skip_to_last_keyframe()
    info, begun_ns = _next_description(reader)
    if info is None and begun_ns is not None:
        # The process may have ended inside its last keyframe. The one before is complete.
        reader.seek(begun_ns - 1)
        info, _ = _next_description(reader)
    return info


def _next_description(reader: RingReader) -> tuple[EngineInfo | None, int | None]:
    """Return the next description, and when the keyframe before it began, as far as they exist."""
    begun_ns = None
    for _ in range(_NUM_READS):
        for frame in reader.read():
            if isinstance(frame, Frame) and frame.code in (Keyframe.CODE, EngineInfo.CODE):
                with suppress(UnknownRecord):
                    record = decode(frame.code, frame.payload)
                    if isinstance(record, EngineInfo):
                        return record, begun_ns
                    begun_ns = begun_ns or record.t_ns
    return None, begun_ns
