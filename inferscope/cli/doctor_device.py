"""What `doctor` looks at of devices: driver, counters, the right to profile, calibration.

Nothing is claimed, loaded into a device or changed. What is not there is not looked at further: a
machine without a GPU hears that once, not once per thing that a GPU could have.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec

from inferscope.calibration import Calibration, cpu_name, driver_version
from inferscope.counters.cupti import (
    LIBRARY_VARIABLE,
    NOT_PERMITTED,
    counter_holders,
    cuda_release,
    listed,
    may_profile,
)
from inferscope.counters.cupti_pm import how_to_pass
from inferscope.counters.cupti_search import NO_LIBRARY, Trial, candidates, trials
from inferscope.counters.nvml_devices import Device, ask, find_devices, open_nvml
from inferscope.counters.source import Unavailable, has_nvidia
from inferscope.json_document import Document
from inferscope.records import plain_uuid

_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PERF = Path("/proc/sys/kernel/perf_event_paranoid")
_PTRACE_WORDS = {
    0: "any process of the same user may be traced",
    1: "only its own children may be traced",
    2: "only root may trace",
    3: "nobody may trace, until the machine is started again",
}
_PTRACE_FIX = (
    "for tools that trace what runs already (py-spy, gdb): sudo sysctl kernel.yama.ptrace_scope=0; "
    "inferscope itself needs none of it: start the engine with `inferscope run`"
)
_ALLOW_COUNTERS = (
    'echo "options nvidia NVreg_RestrictProfilingToAdminUsers=0" | '
    "sudo tee /etc/modprobe.d/nvidia-profiling.conf, then load the module anew (or reboot); "
    "or once: sudo inferscope sampler --counters pm"
)
_ASK_AS_ADMIN = (
    "with CAP_PERFMON or CAP_SYS_ADMIN it is: sudo inferscope sampler --counters pm; in a "
    "container, as its root: docker run --cap-add PERFMON"
)
_NO_BYTES = (
    "PM sampling does not count this chip's bytes of device memory: --counters auto,pm measures "
    "its SM activity; memory traffic stays modelled"
)
_CUDA_13_DRIVER = 580
"""The first release of the driver that brings CUDA 13."""
_WITHOUT_GPM = (
    "what works there: a dcgm-exporter whose counters file lists DCGM_FI_PROF_SM_ACTIVE and "
    "DCGM_FI_PROF_DRAM_ACTIVE, then inferscope sampler --counters auto,dcgm; or, while none runs: "
    "sudo inferscope sampler --counters auto,pm"
)
_GIVE_GPU = (
    "if this machine has one: install its driver (nvidia-smi shows whether it is loaded); in a "
    "container: docker run --gpus all, or the NVIDIA device plugin"
)
_AMD = Path("/dev/kfd")
_DAY_S = 86_400


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    """Name of the thing: a folder, an extra, a device, an engine."""
    is_fine: bool
    """Whether it is as it should be."""
    found: str
    """Description of the state found."""
    fix: str = ""
    """Action that provides what is missing; empty where nothing is."""


class DoctorDocument(Document, frozen=True, kw_only=True):
    """Capabilities of this machine (`inferscope doctor --json`)."""

    checks: tuple[Check, ...]
    """Checks, in the order of the text."""


def devices(calibrations: list[Calibration], *, num_threads: Iterable[int]) -> Iterator[Check]:
    """Yield what there is to compute on, and what may be counted of it.

    Args:
        calibrations: of this user, the newest first.
        num_threads: with which engines here compute, on the CPU.
    """
    yield from _cpu(calibrations, num_threads)
    if not has_nvidia():
        found = "steps are timed by the host's clock, SM and HBM columns show -"
        if _AMD.exists():
            yield Check("GPU", False, f"AMD's, whose counters are unsupported: {found}")
        else:
            yield Check("GPU", False, f"no NVIDIA driver: {found}", _GIVE_GPU)
        return
    yield _driver()
    try:
        nvml = open_nvml()
    except Unavailable as reason:
        yield Check("NVML", False, f"utilisation, power, clocks and GPM are not read: {reason}")
    else:
        try:
            for device in find_devices(nvml, ()):
                yield from _device(nvml, device, calibrations)
        except Unavailable as reason:
            yield Check("GPU", False, str(reason))
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
    yield _cupti()
    yield _permission()


def tracing(ptrace: Path = _PTRACE, perf: Path = _PERF) -> Iterator[Check]:
    """Yield what this kernel lets other tools see of a running engine."""
    scope = _number(ptrace)
    if scope is not None:
        words = _PTRACE_WORDS.get(scope, "unknown")
        fix = _PTRACE_FIX if scope else ""
        yield Check("ptrace", scope == 0, f"ptrace_scope={scope}: {words}", fix)
    paranoid = _number(perf)
    has_perf = shutil.which("perf") is not None
    if paranoid is None:
        return
    found = f"perf_event_paranoid={paranoid}, perf is {'' if has_perf else 'not '}installed"
    fix = (
        ""
        if paranoid <= 1
        else "to profile the host side: sudo sysctl kernel.perf_event_paranoid=1"
    )
    yield Check("perf", paranoid <= 1, found, fix)


def _driver() -> Check:
    version = driver_version()
    if not version:
        return Check("GPU driver", False, "its version is not told here (WSL, or a container)")
    return Check("GPU driver", True, version)


def _device(nvml: ModuleType, device: Device, calibrations: list[Calibration]) -> Iterator[Check]:
    """Yield what there is to say of one device, of a sick one why there is no more."""
    found = f"{device.name}, {device.uuid}"
    if device.is_divided:
        found += f", MIG: {len(device.instances)} instances"
    try:
        told = [_gpm(nvml, device), _calibrated_gpu(nvml, device, calibrations)]
    except nvml.NVMLError as error:
        fix = (
            f"ask the driver: nvidia-smi -q -i {device.uuid}; sudo dmesg | grep -i xid; a device "
            "that is lost returns when the machine is started again"
        )
        yield Check("GPU", False, f"{found}, does not answer: {error}", fix)
        return
    yield Check("GPU", True, found)
    yield from told


def _gpm(nvml: ModuleType, device: Device) -> Check:
    query = getattr(nvml, "nvmlGpmQueryDeviceSupport", None)
    if query is None:
        fix = "pip install -U nvidia-ml-py"
        return Check("GPM", False, "nvidia-ml-py is older than GPM: it is not read", fix)
    support = ask(nvml, lambda: query(device.handle))
    if support is None or not support.isSupportedDevice:
        found = "none (before Hopper, or a virtual GPU): --counters auto tells no SM activity"
        return Check("GPM", False, found, _WITHOUT_GPM)
    return Check("GPM", True, "SM activity and memory traffic, with --counters auto")


def _cupti() -> Check:
    """Return which library PM sampling would use, tried in a child, and what it cannot count.

    The finding holds the reason of each library that cannot be used, also where another one can.
    """
    tried: list[Trial] = []
    try:
        tried += trials(candidates())
    except Unavailable as reason:
        return Check("CUPTI", False, f"no PM sampling: {reason}")
    refused = " ".join(trial.reason for trial in tried if trial.reason)
    if not tried or tried[-1].reason:
        found = f"no PM sampling: {refused or NO_LIBRARY}"
        return Check("CUPTI", False, found, _how_to_get_cupti())
    used = tried[-1]
    release = cuda_release(used.version) or "not known"
    found = f"{used.version} (CUDA {release}), {used.path}"
    for chip, words in sorted(used.missing.items()):
        found += f"; {chip}: {'does not count ' + ', '.join(words) if words else 'counts all'}"
    has_bytes = not any("dram_read_bytes" in words for words in used.missing.values())
    return Check(
        "CUPTI", has_bytes, f"{found}. {refused}".rstrip(". "), "" if has_bytes else _NO_BYTES
    )


def _how_to_get_cupti() -> str:
    """Return how to get the library that goes with the driver, as far as that is known."""
    release = driver_version().partition(".")[0]
    is_13 = release.isdecimal() and int(release) >= _CUDA_13_DRIVER
    package = "nvidia-cuda-cupti>=13" if is_13 else "nvidia-cuda-cupti-cu12>=12.9"
    number = 13 if is_13 else 12
    return (
        f'pip install "{package}", into the Python that samples; or name the toolkit\'s: '
        f"{LIBRARY_VARIABLE}=/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.{number}"
    )


def _permission() -> Check:
    is_allowed = may_profile()
    if is_allowed is False:
        return Check("PM sampling", False, NOT_PERMITTED, _ALLOW_COUNTERS)
    held_by = counter_holders()
    if held_by:
        found = f"{listed(held_by)} may hold the counters"
        return Check("PM sampling", False, found, how_to_pass(held_by))
    if is_allowed is None:
        found = "whether it is allowed is not known here: /proc/driver/nvidia/params is not to read"
        return Check("PM sampling", False, found, _ASK_AS_ADMIN)
    return Check("PM sampling", True, "allowed, with --counters pm: bytes and SMs within a step")


def _cpu(calibrations: list[Calibration], num_threads: Iterable[int]) -> Iterator[Check]:
    for threads in sorted(set(num_threads)):
        known = [
            each
            for each in calibrations
            if each.device == cpu_name() and each.num_threads == threads
        ]
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        command = f"inferscope calibrate --device cpu --threads {threads}"
        yield _calibrated(name, known, command)


def _calibrated_gpu(nvml: ModuleType, device: Device, calibrations: list[Calibration]) -> Check:
    of_device = [
        each for each in calibrations if plain_uuid(each.device_uuid) == plain_uuid(device.uuid)
    ]
    command = f"CUDA_VISIBLE_DEVICES={device.uuid} inferscope calibrate --device cuda:0"
    known = [each for each in of_device if each.driver == driver_version()]
    if of_device and not known:
        found = f"measured with driver {of_device[0].driver}, which is another now"
        return Check("calibration", False, found, command)
    clocks = tuple(
        ask(nvml, partial(nvml.nvmlDeviceGetMaxClockInfo, device.handle, clock))
        for clock in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
    )
    if known and known[0].clocks_mhz not in (None, clocks):
        found = f"measured with clocks up to {known[0].clocks_mhz} MHz, which are {clocks} now"
        return Check("calibration", False, found, command)
    return _calibrated("calibration", known, command)


def _calibrated(name: str, known: list[Calibration], command: str) -> Check:
    if not known:
        return Check(name, False, "not calibrated: shares of what is possible are guesses", command)
    newest = known[0]
    models = ", ".join(table.model for table in newest.steps) or "no model"
    days = max(0, int(time.time()) - newest.measured_real_s) // _DAY_S
    when = "today" if not days else f"{days} day{'s' if days > 1 else ''} ago"
    found = f"read {newest.read_bytes_s / 1e9:.3g} GB/s, {models}, measured {when}"
    return Check(name, True, found)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
