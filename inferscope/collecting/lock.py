"""One collector per folder of its own, or one per shard of it: two would count everything twice.

    collect.lock              held alone by a collector of all engines, together by shards
    collect-K-of-N.lock       held alone by shard K of N

So a collector of all keeps shards out, and they keep it out. A shard that holds its own lock looks
for those of another N: of two that begin at once, one at least sees the other. The locks are the
kernel's: they go with their process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inferscope.collecting.shard import ALL, Shard
from inferscope.errors import InferScopeError
from inferscope.private import open_own, own_folder

LOCK_NAME = "collect.lock"
_OF_SHARD = re.compile(r"collect-(\d+)-of-(\d+)\.lock")


@contextmanager
def only_collector(folder: Path, shard: Shard = ALL) -> Iterator[None]:
    """Hold a collector's folder, or that of a shard, for as long as the context lasts.

    Args:
        folder: of the collector; it is made where it is missing.
        shard: of the engines.

    Raises:
        InferScopeError: another one runs, with its pid; or the folder cannot be used.
    """
    try:
        own_folder(folder)
    except InferScopeError as error:
        raise InferScopeError(
            f"{error} A collector keeps its lock, budgets and pins in a folder that no other user "
            "can write to. Name one: folder: in its configuration, or INFERSCOPE_COLLECT_FOLDER."
        ) from error
    with ExitStack() as held:
        whole = _opened(folder / LOCK_NAME, held)
        if not _has_locked(whole, fcntl.LOCK_EX if shard.is_all else fcntl.LOCK_SH):
            others = _shards_at(folder)
            if others:
                raise InferScopeError(
                    f"collectors of shards run already on {folder}: {_named(others)}. "
                    "Stop those, or start this one as a shard of theirs that is missing."
                )
            raise InferScopeError(
                f"a collector runs already on {folder}, as process {_pid(whole)}. "
                "Stop that one, or give this one other rings and a folder of its own."
            )
        # Whoever sends a signal to the process in this file means the collector of all engines.
        os.truncate(whole, 0)
        own = whole
        if not shard.is_all:
            own = _opened(shard.file(folder / LOCK_NAME), held)
            if not _has_locked(own, fcntl.LOCK_EX):
                raise InferScopeError(
                    f"a collector of shard {shard} runs already on {folder}, "
                    f"as process {_pid(own)}. Stop that one, or give this one another shard."
                )
            others = _shards_at(folder, but=shard.total)
            if others:
                raise InferScopeError(
                    f"shard {shard} does not fit to what runs already on {folder}: "
                    f"{_named(others)}. Divide by the same number, or stop those."
                )
        os.truncate(own, 0)
        os.pwrite(own, f"{os.getpid()}\n".encode(), 0)
        yield


def _opened(path: Path, held: ExitStack) -> int:
    try:
        handle = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise InferScopeError(
            f"cannot open {path}: {error.strerror}. Remove it if no collector runs."
        ) from error
    held.callback(os.close, handle)
    return handle


def _has_locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InferScopeError(
            f"the file system of the collector's folder has no locks: {error.strerror}. "
            "Set INFERSCOPE_COLLECT_FOLDER to a folder on a local one."
        ) from error
    return True


def _shards_at(folder: Path, *, but: int = 0) -> list[tuple[Shard, str]]:
    """Return the shards that somebody holds, and who.

    Args:
        folder: of the collector.
        but: shards of so many are left alone: to look at one is to keep it from beginning.
    """
    found = []
    for path in sorted(folder.glob("collect-*-of-*.lock")):
        named = _OF_SHARD.fullmatch(path.name)
        if named is None or int(named[2]) == but:
            continue
        with ExitStack() as held:
            handle = _opened(path, held)
            if not _has_locked(handle, fcntl.LOCK_SH):
                found.append((Shard(int(named[1]), int(named[2])), _pid(handle)))
    return found


def _named(shards: list[tuple[Shard, str]]) -> str:
    return ", ".join(f"{shard} as process {pid}" for shard, pid in shards)


def _pid(handle: int) -> str:
    """Return who holds the lock by its own word; it may be about to say it."""
    word = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return word if word.isdigit() else "unknown"
