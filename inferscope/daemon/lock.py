"""Locks that permit one collector per directory, or one per shard: two would count twice.

    collect.lock              exclusive for a collector of all engines, shared among shards
    collect-K-of-N.lock       exclusive for shard K of N

A collector of all engines therefore excludes shards and vice versa. A shard that holds its own lock
checks for shards of another N; of two that start at once, at least one sees the other. The kernel
releases the locks when their process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inferscope.daemon.shard import ALL, Shard
from inferscope.errors import InferScopeError
from inferscope.private import lock_holder, open_own, own_folder

LOCK_NAME = "collect.lock"
_OF_SHARD = re.compile(r"collect-(\d+)-of-(\d+)\.lock")


@contextmanager
def only_collector(folder: Path, shard: Shard = ALL) -> Iterator[None]:
    """Hold the lock of a collector or shard for the duration of the context.

    Args:
        folder: the collector's directory, created if it is missing.
        shard: part of the engines.

    Raises:
        InferScopeError: another collector runs (with its PID), or the directory is unusable.
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
                    "Stop them, or start this one as a missing shard of the same division."
                )
            raise InferScopeError(
                f"a collector runs already on {folder}, as process {lock_holder(whole)}. "
                "Stop it, or give this one other rings and a folder of its own."
            )
        # A PID in this file is that of a collector of all engines, for signals by scripts.
        os.truncate(whole, 0)
        own = whole
        if not shard.is_all:
            own = _opened(shard.file(folder / LOCK_NAME), held)
            if not _has_locked(own, fcntl.LOCK_EX):
                raise InferScopeError(
                    f"a collector of shard {shard} runs already on {folder}, "
                    f"as process {lock_holder(own)}. Stop it, or start this one as another shard."
                )
            others = _shards_at(folder, but=shard.total)
            if others:
                raise InferScopeError(
                    f"shard {shard} conflicts with the shards that run already on {folder}: "
                    f"{_named(others)}. Use the same N, or stop them."
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
            f"the file system of the collector's folder does not support locks: {error.strerror}. "
            "Set INFERSCOPE_COLLECT_FOLDER to a folder on a local file system."
        ) from error
    return True


def _shards_at(folder: Path, *, but: int = 0) -> list[tuple[Shard, str]]:
    """Return the shards whose locks are held, with the PIDs of their holders.

    Args:
        folder: the collector's directory.
        but: total of the shards to skip, because probing a lock can make its shard's start fail.
    """
    found = []
    for path in sorted(folder.glob("collect-*-of-*.lock")):
        named = _OF_SHARD.fullmatch(path.name)
        if named is None or int(named[2]) == but:
            continue
        with ExitStack() as held:
            handle = _opened(path, held)
            if not _has_locked(handle, fcntl.LOCK_SH):
                found.append((Shard(int(named[1]), int(named[2])), lock_holder(handle)))
    return found


def _named(shards: list[tuple[Shard, str]]) -> str:
    return ", ".join(f"{shard} as process {pid}" for shard, pid in shards)
