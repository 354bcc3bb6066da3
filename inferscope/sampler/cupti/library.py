"""The CUPTI library by ctypes: loading, calls and error messages.

CUPTI's Python binding supports only the version it was built for, whereas the version to use is
the one that this machine's driver can run: hence ctypes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from inferscope.sampler.cuda_driver import load_driver
from inferscope.sampler.cupti import layout
from inferscope.sampler.privilege import may_use_counters
from inferscope.sampler.processes import named
from inferscope.sampler.source import Unavailable

LIBRARY_VARIABLE = "INFERSCOPE_CUPTI"
"""Environment variable with the path of a library outside the usual directories."""
OLDEST_VERSION = 27
"""CUPTI version of CUDA 12.9. CUPTI of 12.6 and 12.8 has no bytes of device memory on GH100, and
the structures of 12.6 are shorter."""
_CUDA_BY_VERSION = {24: "12.6", 26: "12.8", 27: "12.9", 28: "12.9"}
"""CUDA release by CUPTI version, from cupti_version.h: consecutive numbers until CUDA 13.0."""
_TARGET_LIBRARY, _HOST_LIBRARY = "libnvperf_target.so", "libnvperf_host.so"
PROFILERS = ("nv-hostengine", "dcgm-exporter", "ncu", "nsys", "nvidia-cuda-mps")
"""Programs that can hold a device's counters; DCGM's programs hold them only while it profiles."""
NOT_PERMITTED = (
    "performance counters are restricted to root and CAP_PERFMON here. Run `inferscope sampler "
    "--counters pm` as root, or permit all users: NVreg_RestrictProfilingToAdminUsers=0 for the "
    "nvidia kernel module."
)
_MESSAGES = {
    layout.ERROR_INSUFFICIENT_PRIVILEGES: NOT_PERMITTED,
    layout.ERROR_VIRTUALIZED_PRIVILEGES: (
        "the host of this virtual GPU does not permit profiling. Enable it for this guest there."
    ),
    layout.ERROR_VIRTUALIZED_NOT_SUPPORTED: "a virtual GPU's counters cannot be sampled.",
    layout.ERROR_CONFIDENTIAL_COMPUTING: "confidential computing hides the device's counters.",
    layout.ERROR_MIG_NOT_SUPPORTED: "a MIG device cannot be sampled; GPM covers MIG instances.",
    layout.ERROR_WSL_NOT_SUPPORTED: "WSL does not expose the device's counters.",
    layout.ERROR_NOT_SUPPORTED: "this device cannot be sampled; PM sampling needs Turing or later.",
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
"""Error codes that another session on the device can cause."""


class CuptiError(Exception):
    """A CUPTI call failed.

    Attributes:
        code: CUptiResult of the call.
    """

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} failed: {name} ({code})")
        self.code = code


class Cupti:
    """A loaded CUPTI library.

    Attributes:
        path: path as given to the constructor.
    """

    def __init__(self, path: str) -> None:
        """Load the library and the libraries it opens later, without calling any of them.

        Raises:
            Unavailable: there is no library at this path, or it has no PM sampling.
        """
        with suppress(Unavailable):
            # First: without a loaded driver, CUPTI 13.2 recurses until the stack overflows.
            load_driver()
        try:
            self._library = ctypes.CDLL(path)
        except OSError:
            raise Unavailable(
                f"cannot load libcupti from {path}: {LIBRARY_VARIABLE} names another file, or one "
                "that this user cannot read."
            ) from None
        self.path = path
        for name in (_TARGET_LIBRARY, _HOST_LIBRARY):
            # CUPTI opens these by bare name on first use. The linker does not search
            # site-packages, or finds the libraries of another CUDA release.
            with suppress(OSError):
                ctypes.CDLL(os.path.join(os.path.dirname(path), name))
        if not hasattr(self._library, "cuptiPmSamplingEnable"):
            raise Unavailable(too_old(path, "before 12.6"))
        self.HostInitialize = layout.host_initialize(
            has_single_pass_sets=hasattr(self._library, "cuptiProfilerHostGetSinglePassSets")
        )

    @cached_property
    def version(self) -> int:
        """Return CUPTI's version, 0 if unknown: 28 is CUDA 12.9's, 130001 CUDA 13.0's.

        Requires a driver: without one, some releases crash in any call.
        """
        version = ctypes.c_uint32()
        if self._library.cuptiGetVersion(ctypes.byref(version)):
            return 0
        return version.value

    def begin(self) -> None:
        """Initialise the profiler; the driver must be initialised before.

        Raises:
            Unavailable: this release is too old.
            CuptiError: the profiler does not initialise.
        """
        if self.version < OLDEST_VERSION:
            raise Unavailable(too_old(self.path, cuda_release(self.version) or "unknown"))
        self.call("cuptiProfilerInitialize", layout.Initialize())

    def end(self) -> None:
        """De-initialise the profiler; once for each `begin`."""
        with suppress(CuptiError):
            self.call("cuptiProfilerDeInitialize", layout.DeInitialize())

    def call(self, function: str, params: layout.Params, *, allowed: Container[int] = ()) -> int:
        """Call a function; return its code, which is success or in `allowed`.

        Raises:
            CuptiError: the code is any other.
        """
        structure: Any = params
        structure.structSize = layout.struct_size(type(params))
        code: int = getattr(self._library, function)(ctypes.byref(params))
        if code and code not in allowed:
            raise CuptiError(function, code, self._name_of(code))
        return code

    def repeated(self, function: str, params: layout.Params) -> Callable[[], None]:
        """Return a call of a function with one structure, for calls by the thousand.

        The returned function raises CuptiError as `call` does.
        """
        structure: Any = params
        structure.structSize = layout.struct_size(type(params))
        address, loaded = ctypes.byref(params), getattr(self._library, function)

        def again() -> None:
            code: int = loaded(address)
            if code:
                raise CuptiError(function, code, self._name_of(code))

        return again

    def _name_of(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuptiGetResultString(code, ctypes.byref(name))
        return (name.value or b"an error without a name").decode("ascii", "replace")


def cuda_release(version: int) -> str:
    """Return the CUDA release of a CUPTI version, empty for an unlisted version."""
    if version >= 130_000:
        return f"{version // 10_000}.{version // 100 % 100}"
    return _CUDA_BY_VERSION.get(version, "")


def too_old(path: str, release: str) -> str:
    """Return the message that rejects a library of a release before 12.9, with the remedy."""
    return (
        f"{path} belongs to CUDA {release}; PM sampling needs CUPTI 12.9 or later: "
        'pip install "nvidia-cuda-cupti-cu12>=12.9" into the Python that runs the sampler.'
    )


def describe_error(error: CuptiError) -> str:
    """Return one line with the meaning of an error and the remedy."""
    known = _MESSAGES.get(error.code)
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
    return (
        f"the device's counters are in use, {by}. Stop that program, or use --counters gpm. "
        f"({error})"
    )


def counter_holders(despite: Container[str] = ()) -> dict[str, int]:
    """Return the PIDs of running profilers and DCGM programs that can hold counters, by name.

    Names are the only evidence: no interface reports whether DCGM is profiling at the moment.

    Args:
        despite: names of programs that the user declares not to hold the counters.
    """
    return {name: pid for name, pid in named(PROFILERS).items() if name not in despite}


def listed(pid_by_name: Mapping[str, int]) -> str:
    """Return a text that lists programs with their PIDs."""
    return ", ".join(f"{name} (process {pid})" for name, pid in sorted(pid_by_name.items()))


def may_profile(params: Path = _PARAMS) -> bool | None:
    """Return whether this process may use the counters; None if unknown.

    Args:
        params: file with the kernel module's settings, which containers and WSL may hide.
    """
    if may_use_counters():
        return True
    try:
        settings = params.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    pairs = [line.replace(" ", "").partition(":") for line in settings.splitlines()]
    restricted = next((value for name, _, value in pairs if name == "RmProfilingAdminOnly"), "")
    return restricted == "0" if restricted else None
