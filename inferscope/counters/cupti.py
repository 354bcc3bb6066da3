"""The CUPTI library by ctypes: loaded, called, and its errors in words.

By ctypes because its Python binding drives only the version it was made for, and the one that
counts is the one that the driver here can run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from inferscope.counters import cupti_layout as layout
from inferscope.counters.cuda_driver import load_driver
from inferscope.counters.privilege import may_use_counters
from inferscope.counters.processes import named
from inferscope.counters.source import Unavailable

LIBRARY_VARIABLE = "INFERSCOPE_CUPTI"
"""A path, for a library that is not where they usually are."""
OLDEST_VERSION = 27
"""CUDA 12.9's. 12.6 and 12.8 know no bytes of device memory on GH100, and 12.6's structures are
shorter."""
_CUDA_BY_VERSION = {24: "12.6", 26: "12.8", 27: "12.9", 28: "12.9"}
"""From cupti_version.h: until 13.0 versions were numbered one by one."""
_METRICS_LIBRARIES = ("libnvperf_target.so", "libnvperf_host.so")
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
        path: as it was given.
    """

    def __init__(self, path: str) -> None:
        """Load the library, and what it opens late; nothing in it is called.

        Raises:
            Unavailable: there is none at this path, or it has no PM sampling.
        """
        with suppress(Unavailable):
            # First: without a loaded driver, 13.2 calls itself until the stack is used up.
            load_driver()
        try:
            self._library = ctypes.CDLL(path)
        except OSError:
            raise Unavailable(
                f"there is no libcupti at {path}: {LIBRARY_VARIABLE} names the wrong file, or one "
                "that this user may not read."
            ) from None
        self.path = path
        for name in _METRICS_LIBRARIES:
            # CUPTI opens them by their bare names, when it first needs them: the linker does not
            # look into site-packages, or it finds those of another CUDA.
            with suppress(OSError):
                ctypes.CDLL(os.path.join(os.path.dirname(path), name))
        if not hasattr(self._library, "cuptiPmSamplingEnable"):
            raise Unavailable(too_old(path, "before 12.6"))
        self.HostInitialize = layout.host_initialize(
            has_single_pass_sets=hasattr(self._library, "cuptiProfilerHostGetSinglePassSets")
        )

    @cached_property
    def version(self) -> int:
        """Return CUPTI's version, 0 if it is not told: 28 is CUDA 12.9's, 130001 CUDA 13.0's.

        Only where there is a driver: without one, some releases crash in any call.
        """
        version = ctypes.c_uint32()
        if self._library.cuptiGetVersion(ctypes.byref(version)):
            return 0
        return version.value

    def begin(self) -> None:
        """Initialise the profiler; the driver must be initialised before.

        Raises:
            Unavailable: this release is too old.
            CuptiError: it does not initialise here.
        """
        if self.version < OLDEST_VERSION:
            raise Unavailable(too_old(self.path, cuda_release(self.version) or "unknown"))
        self.call("cuptiProfilerInitialize", layout.Initialize())

    def end(self) -> None:
        """De-initialise the profiler; once for each `begin`."""
        with suppress(CuptiError):
            self.call("cuptiProfilerDeInitialize", layout.DeInitialize())

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


def cuda_release(version: int) -> str:
    """Return the CUDA release that a CUPTI version belongs to, empty for one that is not listed."""
    if version >= 130_000:
        return f"{version // 10_000}.{version // 100 % 100}"
    return _CUDA_BY_VERSION.get(version, "")


def too_old(path: str, release: str) -> str:
    """Return why a library of a release before 12.9 is not used, and what to do."""
    return (
        f"{path} is of CUDA {release}, and PM sampling needs CUPTI of 12.9 or later: "
        'pip install "nvidia-cuda-cupti-cu12>=12.9", into the Python that samples.'
    )


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
