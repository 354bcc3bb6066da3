"""The search for a CUPTI library that works here: each candidate is tried in a child process.

    candidates ─► try in a child: load, version, initialise, metrics ─► the first that works ─► load

An unusable candidate (too old, newer than the driver, or crashing) must not be loaded into the
sampler: CUPTI opens its libraries by bare name, so a second CUPTI would get those of the first.
Child processes decide once which candidate is loaded.
"""

from __future__ import annotations

import functools
import glob
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from inferscope.sampler.cuda_driver import CudaDevices, load_driver
from inferscope.sampler.cupti.library import LIBRARY_VARIABLE, Cupti, CuptiError, describe_error
from inferscope.sampler.cupti.session import chip_name, choose_metrics, missing
from inferscope.sampler.source import Unavailable

_SONAMES = ("libcupti.so.13", "libcupti.so.12")
_IN_SITE_PACKAGES = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib")
_TOOLKITS = (
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/lib",
    "/usr/local/cuda*/extras/CUPTI/lib64",
    "/opt/cuda/lib64",
    "/opt/cuda/extras/CUPTI/lib64",
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
)
_TRIAL_S = 60.0
NO_LIBRARY = (
    "no libcupti found. PyTorch for CUDA and the CUDA toolkit contain one; "
    f"{LIBRARY_VARIABLE} sets its path."
)


class Trial(NamedTuple):
    """Result of trying one library.

    Attributes:
        path: path of the library.
        reason: why it is unusable; empty if it is usable.
        version: CUPTI version.
        missing: keys of COUNTERS that it does not count, by chip of this machine's devices.
    """

    path: str
    reason: str
    version: int
    missing: dict[str, list[str]]


def refused(path: str, reason: str) -> Trial:
    """Return the trial of an unusable library."""
    return Trial(path, reason, 0, {})


def candidates() -> list[str]:
    """Return candidate paths, CUDA 13 first; only the named path if one is set."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return [named]
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    folders += [Path(root, place) for root in sys.path if root for place in _IN_SITE_PACKAGES]
    folders += [Path(found) for pattern in _TOOLKITS for found in sorted(glob.glob(pattern))]
    found: dict[str, str] = {}
    for soname in _SONAMES:
        for folder in folders:
            path = str(folder / soname)
            if os.path.exists(path):  # never raises, even in directories that only root may read
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def usable() -> Cupti:
    """Load and return the first library that works here.

    Raises:
        Unavailable: none works, with the reasons.
    """
    return _usable(tuple(candidates()))


def trials(paths: Iterable[str]) -> Iterator[Trial]:
    """Yield a trial of each library, up to the first that works.

    Raises:
        Unavailable: there is no driver to try them with.
    """
    for path in paths:
        load_driver()
        trial = try_library(path)
        yield trial
        if not trial.reason:
            return


def try_library(path: str) -> Trial:
    """Try a library in a child process, which it may crash."""
    if os.sep in path:
        path = os.path.abspath(path)
    command = [sys.executable, "-m", "inferscope.sampler.cupti.search", path]
    # The child must import the same modules as this process: `-m` puts the current directory
    # first on the path, and for root that directory may belong to another user.
    imported_from = os.pathsep.join(os.path.abspath(part) for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": imported_from}
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=environment,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return refused(path, f"cannot try {path}: {error}.")
    try:
        return msgspec.json.decode(done.stdout, type=Trial)
    except msgspec.MsgspecError:
        code = done.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return refused(path, f"{path} crashed the process that tried it ({how}).")


@functools.cache
def _usable(paths: tuple[str, ...]) -> Cupti:
    if len(paths) == 1:
        return Cupti(paths[0])  # there is no alternative: its own errors name the problem
    reasons = []
    for trial in trials(paths):
        if not trial.reason:
            return Cupti(trial.path)
        reasons.append(trial.reason)
    raise Unavailable(" ".join(dict.fromkeys(reasons)) or NO_LIBRARY)


def _tried(path: str) -> Trial:
    """Try a library in this process."""
    try:
        ordinals = range(len(CudaDevices().uuids()))
        cupti = Cupti(path)
        cupti.begin()
    except Unavailable as reason:
        return refused(path, str(reason))
    except CuptiError as error:
        return refused(path, f"{path}: {describe_error(error)}")
    lacking = dict[str, list[str]]()
    reasons = list[str]()
    for ordinal in ordinals:
        try:
            chip = chip_name(cupti, ordinal)
            lacking[chip] = missing(choose_metrics(cupti, chip, None))
        except (CuptiError, Unavailable) as error:  # noqa: PERF203 - few devices
            reasons.append(f"{path}: {error}")
    cupti.end()
    refusal = "" if lacking else " ".join(dict.fromkeys(reasons))
    return Trial(path, refusal, cupti.version, lacking)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_tried(sys.argv[1])))
