"""Giving root back: the sampler becomes the user whose rings it writes beside.

What is made afterwards is that user's, so its ring need not be given to anybody. Where the
hardware's counters are wanted, one capability is kept: CAP_SYS_ADMIN, which the driver asks for.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from inferscope.errors import InferScopeError

_CAP_SYS_ADMIN = 21
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 8, 38
_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def owner_of(folder: Path) -> int:
    """Return whose rings a folder holds: its owner's, or our own where there is none yet."""
    try:
        return folder.stat().st_uid
    except OSError:
        return os.geteuid()


def become(uid: int, *, keeps_admin: bool) -> str:
    """Become a user for good, if this is root; return what was given up, empty for nothing.

    Raises:
        InferScopeError: the system refuses, or only root could.
    """
    if os.geteuid() != 0:
        if uid != os.geteuid():
            raise InferScopeError(
                f"the rings belong to uid {uid}. Sample as that user, or as root."
            )
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_KEEPCAPS, int(keeps_admin), 0, 0, 0), "keep a capability")
    if uid != 0:
        group_id = _group_of(uid)
        try:
            os.setgroups(os.getgrouplist(pwd.getpwuid(uid).pw_name, group_id))
        except KeyError:  # a uid without a name, as containers have them
            os.setgroups([])
        os.setresgid(group_id, group_id, group_id)
        os.setresuid(uid, uid, uid)
    kept = 1 << _CAP_SYS_ADMIN if keeps_admin else 0
    if not _limit(libc, kept):
        kept = 0
        _check(0 if _limit(libc, 0) else -1, "give up the capabilities")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new rights")
    rights = "with CAP_SYS_ADMIN alone" if kept else "without capabilities"
    return f"this is uid {uid} from here on, {rights}"


def _limit(libc: ctypes.CDLL, kept: int) -> bool:
    """Keep these capabilities of the first 32, and no others; tell whether that was possible."""
    header = _Header(_VERSION_3, 0)
    data = (_Data * 2)(_Data(kept, kept, 0), _Data(0, 0, 0))
    return bool(libc.capset(ctypes.byref(header), ctypes.byref(data)) == 0)


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def _check(code: int, what: str) -> None:
    if code != 0:
        reason = os.strerror(ctypes.get_errno())
        raise InferScopeError(f"cannot {what}: {reason}. Start the sampler as the rings' owner.")
