"""Registry of the ring files read so far, so that each is read once and none is missed.

A file is identified by path and inode. File systems reuse the inode of a deleted file at once, and
a restarted process may have the same ID: so a file that changed after its reader was closed counts
as new if its header names another process. A directory may be missing for a while (unmounted,
moved): a missing file stays registered for an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from inferscope.ring import Identity

MISSING_NS = 3600 * 1_000_000_000
"""Time after which a missing file is forgotten: months of engine restarts leave thousands."""
File = tuple[Path, int]
"""Path and inode."""


class _Known(msgspec.Struct):
    seen_ns: int
    changed_ns: int
    identity: Identity | None = None
    """Identity in the header; None if the file could not be read or must be read again."""


class KnownRings:
    """Registry of the ring files found so far."""

    def __init__(self) -> None:
        self._by_file: dict[File, _Known] = {}

    def unread(
        self, paths: Iterable[Path], now_ns: int, *, is_in_use: Callable[[Path, Identity], bool]
    ) -> list[File]:
        """Return the files that are new, may have been replaced, or could not be read.

        Args:
            paths: all files that exist now.
            now_ns: current time.
            is_in_use: predicate for files that need no check, for example because they are open.
        """
        found = []
        for path in paths:
            try:
                status = path.stat()
            except OSError:  # removed meanwhile
                continue
            file, changed_ns = (path, status.st_ino), status.st_ctime_ns
            known = self._by_file.get(file)
            if known is None:
                self._by_file[file] = _Known(now_ns, changed_ns)
                found.append(file)
                continue
            identity = known.identity
            if identity is None:
                found.append(file)
            elif known.changed_ns != changed_ns:
                known.changed_ns = changed_ns
                if not is_in_use(path, identity):
                    found.append(file)
            known.seen_ns = now_ns
        return found

    def is_new(self, file: File, identity: Identity) -> bool:
        """Record the process that a file belongs to; return whether the process has changed."""
        known = self._by_file[file]
        before, known.identity = known.identity, identity
        return identity != before

    def fail(self, path: Path) -> None:
        """Mark a file as unreadable, so that it is tried again."""
        self.fail_all((path,))

    def fail_all(self, paths: Collection[Path]) -> None:
        """Mark files as unread, so that they are tried again."""
        for file, known in self._by_file.items():
            if file[0] in paths:
                known.identity = None

    def forget(self, now_ns: int) -> set[Path]:
        """Forget the files that have been missing for an hour; return their paths."""
        gone = [
            file for file, known in self._by_file.items() if now_ns - known.seen_ns > MISSING_NS
        ]
        for file in gone:
            del self._by_file[file]
        return {path for path, _ in gone}
