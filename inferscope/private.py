"""Files private to their owner: recordings, exports, screenshots.

A path given by the user may be a link or a device. A collector's own file never is: it is opened
without following links or waiting for a process, and is a plain file of this user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from inferscope.errors import BadInput, InferScopeError


def open_private(path: Path, *, alone: bool = False) -> int:
    """Create or truncate a file private to its owner; return its handle.

    Args:
        path: the file.
        alone: whether to lock the file while it is open; a locked file is left unchanged.

    Raises:
        BlockingIOError: another process has locked the file.
        OSError: the file cannot be created.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # never a device, whose mode root could change
            if alone:
                _lock(handle)
            os.ftruncate(handle, 0)
            os.fchmod(handle, 0o600)  # an existing file may be open to others
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def lock_holder(handle: int) -> str:
    """Return the PID in an open lock file, or "unknown" if its holder has not written it yet."""
    digits = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return digits if digits.isdigit() else "unknown"


def write_private(path: Path, content: bytes) -> None:
    """Write a file private to its owner.

    Raises:
        OSError: the file cannot be written.
    """
    with os.fdopen(open_private(path), "wb") as file:
        file.write(content)


def own_folder(folder: Path) -> None:
    """Create a folder that only this user may write to, or check that it is one.

    An existing folder of this user is closed to writing by others. A folder of root is left as it
    is, but refused if all users may write to it.

    Raises:
        InferScopeError: it cannot be created, is no real folder, or others can change it.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        status, around = folder.lstat(), folder.parent.stat()
    except OSError as error:
        raise InferScopeError(f"cannot make the folder {folder}: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InferScopeError(f"{folder} is not a folder.")
    if status.st_uid not in (os.geteuid(), 0):
        raise InferScopeError(
            f"{folder} belongs to uid {status.st_uid}, not to uid {os.geteuid()}."
        )
    is_open = around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX
    if is_open and not os.path.ismount(folder.parent):
        raise InferScopeError(f"all users may replace {folder}: {folder.parent} is open to them.")
    if status.st_uid != os.geteuid():
        if status.st_mode & stat.S_IWOTH:
            raise InferScopeError(f"{folder} is open to all users.")
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of this user; a created file is closed to others.

    Raises:
        OSError: the file cannot be opened, is no plain file, or belongs to another user.
    """
    wanted = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
    handle = os.open(path, wanted, 0o600)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return handle
    os.close(handle)
    raise OSError(errno.EPERM, f"not a plain file of uid {os.geteuid()}", str(path))


def replace_own(path: Path, content: bytes) -> None:
    """Replace a file of this user atomically: a reader sees the old or the new content.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # left by a killed process: PIDs are reused
    with os.fdopen(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
    part.replace(path)


def private_file(path: Path) -> IO[bytes]:
    """Create or truncate a file private to its owner, and open it.

    Raises:
        BadInput: the file cannot be created; the message has the reason.
    """
    try:
        return os.fdopen(open_private(path), "wb")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another place.") from error
