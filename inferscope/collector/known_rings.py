"""Which ring files were read already, so that each is read once and none is missed.

A file is known by path and inode. File systems use the inode of a deleted file again at once, and a
restarted process may have the same id: so a file that was changed after its reader was closed
counts as new if its header states another process. A folder may be out of sight for a while
(unmounted, moved): what is missing stays known for an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from inferscope.ring.layout import Identity

MISSING_NS = 3600 * 1_000_000_000
"""Time after which a missing file is forgotten: engines that restart for months leave thousands."""
File = tuple[Path, int]
"""Path and inode."""


class _Known(msgspec.Struct):
    seen_ns: int
    changed_ns: int
    identity: Identity | None = None
    """None where it could not be read, or not any more."""


class KnownRings:
    """The ring files that were found by now."""

    def __init__(self) -> None:
        self._by_file: dict[File, _Known] = {}

    def unread(
        self, paths: Iterable[Path], now_ns: int, *, is_in_use: Callable[[Path, Identity], bool]
    ) -> list[File]:
        """Return the files that are new, that may have been replaced, or could not be read.

        Args:
            paths: all that there are now.
            now_ns: the time.
            is_in_use: returns whether a file needs no check, because it is open, say.
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
        """Note the process that a file belongs to; return whether that is another one now."""
        known = self._by_file[file]
        before, known.identity = known.identity, identity
        return identity != before

    def fail(self, path: Path) -> None:
        """Note that a file can be read no more: it is tried again."""
        self.fail_all((path,))

    def fail_all(self, paths: Collection[Path]) -> None:
        """Return these files as unread again."""
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
