"""The CUPTI library by ctypes: found, called, and its errors in words.

By ctypes because its Python binding drives only the version it was made for, and the one that
counts is the one that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferscope.counters import cupti_layout as layout
from inferscope.counters.privilege import may_use_counters
from inferscope.counters.processes import named
from inferscope.counters.source import Unavailable

LIBRARY_VARIABLE = "INFERSCOPE_CUPTI"
"""A path, for a library that is not where they usually are."""

_SONAMES = ("libcupti.so.13", "libcupti.so.12")
_IN_SITE_PACKAGES = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib")
_TOOLKITS = (
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/lib",
    "/usr/local/cuda*/extras/CUPTI/lib64",
)
_METRICS_LIBRARY = "libnvperf_host.so"
PROFILERS = ("nv-hostengine", "dcgm-exporter", "ncu", "nsys", "nvidia-cuda-mps")
"""Programs that hold devices' counters, or may; DCGM's do so only while it profiles."""
NOT_PERMITTED = (
    "performance counters are for root and CAP_PERFMON alone here. Run `inferscope sampler "
    "--counters pm` as root, or let everybody use them: NVreg_RestrictProfilingToAdminUsers=0 for "
    "the nvidia kernel module."
)
_IN_WORDS = {
    layout.ERROR_INSUFFICIENT_PRIVILEGES: NOT_PERMITTED,
    layout.ERROR_VIRTUALIZED_PRIVILEGES: (
        "this virtual GPU's host does not let guests profile. Enable profiling for it there."
    ),
    layout.ERROR_VIRTUALIZED_NOT_SUPPORTED: "a virtual GPU's counters cannot be sampled.",
    layout.ERROR_CONFIDENTIAL_COMPUTING: "confidential computing hides the device's counters.",
    layout.ERROR_MIG_NOT_SUPPORTED: "a MIG device cannot be sampled; GPM tells of instances.",
    layout.ERROR_WSL_NOT_SUPPORTED: "WSL does not show the device's counters.",
    layout.ERROR_NOT_SUPPORTED: "this device cannot be sampled; that begins with Turing.",
}
_PARAMS = Path("/proc/driver/nvidia/params")
_HELD = (
    layout.ERROR_INVALID_OPERATION,
    layout.ERROR_HARDWARE,
    layout.ERROR_MAX_LIMIT_REACHED,
    layout.ERROR_NOT_READY,
    layout.ERROR_HARDWARE_BUSY,
    layout.ERROR_MULTIPLE_SUBSCRIBERS,
    layout.ERROR_UNKNOWN,
)
"""Answers that another session on the device may be behind."""


class CuptiError(Exception):
    """A call failed.

    Attributes:
        code: CUPTI's.
    """

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} failed: {name} ({code})")
        self.code = code


class Cupti:
    """A loaded library.

    Attributes:
        path: as it was found.
        version: 130001 is that of CUDA 13.0.
    """

    def __init__(self, path: str | None = None) -> None:
        """Load the library at a path, or the first that is found.

        Raises:
            Unavailable: there is none, or it has no PM sampling.
        """
        self.path, self._library = _load(path)
        version = ctypes.c_uint32()
        if self._library.cuptiGetVersion(ctypes.byref(version)):
            version.value = 0
        self.version = version.value
        if not hasattr(self._library, "cuptiPmSamplingEnable"):
            raise Unavailable(f"{self.path} has no PM sampling: that begins with CUDA 12.6.")
        self.HostInitialize = layout.host_initialize(
            has_single_pass_sets=hasattr(self._library, "cuptiProfilerHostGetSinglePassSets")
        )

    def call(self, function: str, params: layout.Params, *, allowed: Container[int] = ()) -> int:
        """Call a function; return its code, success or an allowed one.

        Raises:
            CuptiError: for any other.
        """
        structure: Any = params
        structure.structSize = layout.struct_size(type(params))
        code: int = getattr(self._library, function)(ctypes.byref(params))
        if code and code not in allowed:
            raise CuptiError(function, code, self._name_of(code))
        return code

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuptiGetResultString(code, ctypes.byref(name))
        return (name.value or b"an error without a name").decode("ascii", "replace")


def in_words(error: CuptiError) -> str:
    """Return what an error means for whoever wanted the counters, in one line."""
    known = _IN_WORDS.get(error.code)
    if known is not None:
        return known
    if error.code not in _HELD:
        return f"{error}."
    held_by = named(PROFILERS)
    by = (
        f"by {listed(held_by)}"
        if held_by
        else "perhaps by a profiler or DCGM outside this container"
    )
    return f"the device's counters are held, {by}. Stop that, or use --counters gpm. ({error})"


def rivals(despite: Container[str] = ()) -> dict[str, int]:
    """Return who may hold the devices' counters here, profilers and DCGM, with their pids.

    They are known by name only: whether DCGM profiles just now is not told to anybody.

    Args:
        despite: names of those that hold nothing, on the user's word.
    """
    return {name: pid for name, pid in named(PROFILERS).items() if name not in despite}


def listed(pid_by_name: Mapping[str, int]) -> str:
    """Return programs in words."""
    return ", ".join(f"{name} (process {pid})" for name, pid in sorted(pid_by_name.items()))


def may_profile(params: Path = _PARAMS) -> bool | None:
    """Tell whether this process may use the counters; None where that is not known.

    Args:
        params: the kernel module's settings, which containers and WSL may hide.
    """
    if may_use_counters():
        return True
    try:
        told = params.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = [line.replace(" ", "").partition(":") for line in told.splitlines()]
    restricted = next((word for name, _, word in words if name == "RmProfilingAdminOnly"), "")
    return restricted == "0" if restricted else None


def _load(path: str | None) -> tuple[str, ctypes.CDLL]:
    path = path or os.environ.get(LIBRARY_VARIABLE)
    for candidate in [path] if path else _candidates():
        with suppress(OSError):
            library = ctypes.CDLL(candidate)
            _load_beside(candidate)
            return candidate, library
    where = f"at {path}" if path else "here"
    raise Unavailable(
        f"there is no libcupti {where}. It comes with PyTorch for CUDA and with the CUDA toolkit; "
        f"{LIBRARY_VARIABLE} names one."
    )


def _load_beside(path: str) -> None:
    """Load what goes with a library, from its own folder.

    CUPTI opens it by its bare name, when the first host object is made: the linker does not look
    into site-packages, or it finds that of another CUDA.
    """
    folder = os.path.dirname(path)
    if folder:
        with suppress(OSError):
            ctypes.CDLL(os.path.join(folder, _METRICS_LIBRARY))


def _candidates() -> Iterator[str]:
    """Yield libraries: first the one that is loaded already, for its name alone gives that."""
    yield from _SONAMES
    folders = [Path(root, place) for root in sys.path if root for place in _IN_SITE_PACKAGES]
    folders += [Path(found) for pattern in _TOOLKITS for found in sorted(glob.glob(pattern))]
    for folder in folders:
        for soname in _SONAMES:
            if os.path.exists(folder / soname):  # never raises, also where root alone may look
                yield str(folder / soname)
