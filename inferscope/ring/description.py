"""The engine description in the last keyframe of its rings, read without a fold."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from inferscope.errors import UnreadableFile
from inferscope.records import EngineInfo, UnknownRecord, decode
from inferscope.ring.reader import Frame, RingReader


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
    for frame in reader.read():
        if isinstance(frame, Frame) and frame.code == EngineInfo.CODE:
            with suppress(UnknownRecord):
                record = decode(frame.code, frame.payload)
                if isinstance(record, EngineInfo):
                    return record
    return None
