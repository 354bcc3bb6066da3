"""Giving root back: the sampler becomes the user whose rings it writes beside.

What is made afterwards is that user's, so its ring need not be given to anybody. Where the
hardware's counters are wanted, one capability is kept: CAP_PERFMON, which the driver asks for, or
CAP_SYS_ADMIN, which implies it, where a container or a kernel before 5.8 gives only that.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from inferscope.errors import InferScopeError

_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
_PROFILING = {_CAP_PERFMON: "CAP_PERFMON", _CAP_SYS_ADMIN: "CAP_SYS_ADMIN"}
"""Capabilities that each permit the use of the counters, the one that permits least first."""
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
    """Return whose rings a folder holds: its owner's, or our own where there is none yet."""
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
    """Become a user for good, if this is root; return what was given up, empty for nothing.

    Args:
        uid: the user.
        keeps_counters: whether to keep one capability that permits the use of the counters.

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
    kept = _kept() if keeps_counters else None
    _check(libc.prctl(_PR_SET_KEEPCAPS, int(kept is not None), 0, 0, 0), "keep a capability")
    if uid != 0:
        group_id = _group_of(uid)
        try:
            os.setgroups(os.getgrouplist(pwd.getpwuid(uid).pw_name, group_id))
        except KeyError:  # a uid without a name, as containers have them
            os.setgroups([])
        os.setresgid(group_id, group_id, group_id)
        os.setresuid(uid, uid, uid)
    _check(_limit(libc, kept), "give up the capabilities")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new rights")
    rights = "without capabilities" if kept is None else f"with {_PROFILING[kept]} alone"
    return f"this is uid {uid} from here on, {rights}"


def _kept() -> int | None:
    """Return the capability to keep for the counters, None where this process has none."""
    permitted = _capabilities("CapPrm:") or 0
    return next((number for number in _PROFILING if permitted >> number & 1), None)


def _capabilities(name: str) -> int | None:
    """Return a set of this process's capabilities as bits, None where it is not shown."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    bits = next((line.split()[1] for line in lines if line.startswith(name)), None)
    return None if bits is None else int(bits, 16)


def _limit(libc: ctypes.CDLL, kept: int | None) -> int:
    """Keep this capability and no other; return capset's answer."""
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
