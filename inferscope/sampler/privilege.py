"""Dropping root: the sampler switches to the user who owns the ring directory.

Files created afterwards belong to that user, so its readers can open the sampler's ring. For
hardware counters one capability is kept: CAP_PERFMON, which the driver checks, or CAP_SYS_ADMIN,
which implies it, where a container or a kernel before 5.8 grants only that.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from inferscope.errors import InferScopeError

_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
_PROFILING = {_CAP_PERFMON: "CAP_PERFMON", _CAP_SYS_ADMIN: "CAP_SYS_ADMIN"}
"""Capabilities that each permit the use of the counters, least powerful first."""
_STATUS = Path("/proc/self/status")
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
    """Return the UID of a ring directory's owner, or this process's if it does not exist yet."""
    try:
        return folder.stat().st_uid
    except OSError:
        return os.geteuid()


def may_use_counters() -> bool:
    """Return whether a capability of this process permits the use of the counters."""
    effective = _capabilities("CapEff:")
    if effective is None:
        return os.geteuid() == 0
    return any(effective >> number & 1 for number in _PROFILING)


def become(uid: int, *, keeps_counters: bool) -> str:
    """Switch from root to a user permanently; return a line about it, empty if not root.

    Args:
        uid: user ID to switch to.
        keeps_counters: whether to keep one capability that permits the use of the counters.

    Raises:
        InferScopeError: the system refuses, or the switch needs root.
    """
    if os.geteuid() != 0:
        if uid != os.geteuid():
            raise InferScopeError(
                f"the rings belong to uid {uid}. Sample as that user, or as root."
            )
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    kept = _kept() if keeps_counters else None
    _check(libc.prctl(_PR_SET_KEEPCAPS, int(kept is not None), 0, 0, 0), "keep a capability")
    if uid != 0:
        group_id = _group_of(uid)
        try:
            os.setgroups(os.getgrouplist(pwd.getpwuid(uid).pw_name, group_id))
        except KeyError:  # a UID without a name, which is common in containers
            os.setgroups([])
        os.setresgid(group_id, group_id, group_id)
        os.setresuid(uid, uid, uid)
    _check(_limit(libc, kept), "drop the capabilities")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    rights = "without capabilities" if kept is None else f"with {_PROFILING[kept]} only"
    return f"switched to uid {uid}, {rights}"


def _kept() -> int | None:
    """Return the capability to keep for the counters, None if this process has none."""
    permitted = _capabilities("CapPrm:") or 0
    return next((number for number in _PROFILING if permitted >> number & 1), None)


def _capabilities(name: str) -> int | None:
    """Return one of this process's capability sets as a bit mask, None if unreadable."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    bits = next((line.split()[1] for line in lines if line.startswith(name)), None)
    return None if bits is None else int(bits, 16)


def _limit(libc: ctypes.CDLL, kept: int | None) -> int:
    """Drop all capabilities except `kept`; return capset's result."""
    bits = 0 if kept is None else 1 << kept
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = _Header(_VERSION_3, 0)
    data = (_Data * 2)(_Data(low, low, 0), _Data(high, high, 0))
    code: int = libc.capset(ctypes.byref(header), ctypes.byref(data))
    return code


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def _check(code: int, what: str) -> None:
    if code != 0:
        reason = os.strerror(ctypes.get_errno())
        raise InferScopeError(f"cannot {what}: {reason}. Start the sampler as the rings' owner.")
