"""Checks of `doctor` for devices: driver, counters, the permission to profile, calibration.

The checks claim no counters, load nothing into a device and change nothing. If a part is missing,
the checks that depend on it are skipped: a machine without a GPU gets one line.
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
from inferscope.json_document import Document
from inferscope.records import plain_uuid
from inferscope.sampler import Device, Unavailable, ask, find_devices, has_nvidia, open_nvml
from inferscope.sampler.cupti import (
    LIBRARY_VARIABLE,
    NO_LIBRARY,
    NOT_PERMITTED,
    Trial,
    candidates,
    counter_holders,
    cuda_release,
    how_to_pass,
    listed,
    may_profile,
    trials,
)

_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PERF = Path("/proc/sys/kernel/perf_event_paranoid")
_PTRACE_MEANINGS = {
    0: "any process of the same user may be traced",
    1: "only its own children may be traced",
    2: "only root may trace",
    3: "no process may be traced until the machine restarts",
}
_PTRACE_FIX = (
    "for tools that trace running processes (py-spy, gdb): sudo sysctl kernel.yama.ptrace_scope=0; "
    "not needed for engines started with `inferscope run`"
)
_ALLOW_COUNTERS = (
    'echo "options nvidia NVreg_RestrictProfilingToAdminUsers=0" | '
    "sudo tee /etc/modprobe.d/nvidia-profiling.conf, then reload the module (or reboot); "
    "or for one run: sudo inferscope sampler --counters pm"
)
_SAMPLE_AS_ADMIN = (
    "it is allowed with CAP_PERFMON or CAP_SYS_ADMIN: sudo inferscope sampler --counters pm; in a "
    "container, as its root: docker run --cap-add PERFMON"
)
_NO_BYTES = (
    "PM sampling does not count this chip's memory traffic: --counters auto,pm measures SM "
    "activity only; memory traffic stays modelled"
)
_CUDA_13_DRIVER = 580
"""First major version of the driver with CUDA 13."""
_WITHOUT_GPM = (
    "run a dcgm-exporter whose counters file lists DCGM_FI_PROF_SM_ACTIVE and "
    "DCGM_FI_PROF_DRAM_ACTIVE, then inferscope sampler --counters auto,dcgm; or, without a "
    "dcgm-exporter: sudo inferscope sampler --counters auto,pm"
)
_GIVE_GPU = (
    "if this machine has one: install its driver (nvidia-smi shows whether it is loaded); in a "
    "container: docker run --gpus all, or the NVIDIA device plugin"
)
_AMD = Path("/dev/kfd")
_DAY_S = 86_400


class Check(msgspec.Struct, frozen=True):
    """Result of one check."""

    name: str
    """Subject of the check: a folder, an extra, a device, an engine."""
    is_fine: bool
    """Whether the subject is in order."""
    found: str
    """Description of the state found."""
    fix: str = ""
    """Action that enables a missing capability; empty if none is missing."""


class DoctorDocument(Document, frozen=True, kw_only=True):
    """Capabilities of this machine (`inferscope doctor --json`)."""

    checks: tuple[Check, ...]
    """Checks, in the order of the text."""


def devices(calibrations: list[Calibration], *, num_threads: Iterable[int]) -> Iterator[Check]:
    """Yield the checks of the CPU and of every GPU, and of the access to their counters.

    Args:
        calibrations: calibrations of this user, the newest first.
        num_threads: numbers of CPU threads with which engines compute here.
    """
    yield from _cpu(calibrations, num_threads)
    if not has_nvidia():
        found = "the host's clock times steps, and SM and HBM columns show -"
        if _AMD.exists():
            yield Check("GPU", False, f"AMD GPU, counters not supported: {found}")
        else:
            yield Check("GPU", False, f"no NVIDIA driver: {found}", _GIVE_GPU)
        return
    yield _driver()
    try:
        nvml = open_nvml()
    except Unavailable as reason:
        yield Check(
            "NVML", False, f"utilization, power, clocks and GPM are not available: {reason}"
        )
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
    """Yield which access this kernel gives other tools to a running engine."""
    scope = _number(ptrace)
    if scope is not None:
        meaning = _PTRACE_MEANINGS.get(scope, "unknown")
        fix = _PTRACE_FIX if scope else ""
        yield Check("ptrace", scope == 0, f"ptrace_scope={scope}: {meaning}", fix)
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
        return Check("GPU driver", False, "version not available here (WSL, or a container)")
    return Check("GPU driver", True, version)


def _device(nvml: ModuleType, device: Device, calibrations: list[Calibration]) -> Iterator[Check]:
    """Yield the checks of one device; only the error if the device does not respond."""
    found = f"{device.name}, {device.uuid}"
    if device.is_divided:
        found += f", MIG: {len(device.instances)} instances"
    try:
        checks = [_gpm(nvml, device), _calibrated_gpu(nvml, device, calibrations)]
    except nvml.NVMLError as error:
        fix = (
            f"see the driver's log: nvidia-smi -q -i {device.uuid}; sudo dmesg | grep -i xid; a "
            "lost device usually needs a restart of the machine"
        )
        yield Check("GPU", False, f"{found}, does not respond: {error}", fix)
        return
    yield Check("GPU", True, found)
    yield from checks


def _gpm(nvml: ModuleType, device: Device) -> Check:
    query = getattr(nvml, "nvmlGpmQueryDeviceSupport", None)
    if query is None:
        fix = "pip install -U nvidia-ml-py"
        return Check("GPM", False, "this version of nvidia-ml-py does not support GPM", fix)
    support = ask(nvml, lambda: query(device.handle))
    if support is None or not support.isSupportedDevice:
        found = (
            "not supported (before Hopper, or a virtual GPU): --counters auto has no SM activity"
        )
        return Check("GPM", False, found, _WITHOUT_GPM)
    return Check("GPM", True, "SM activity and memory traffic, with --counters auto")


def _cupti() -> Check:
    """Return the library that PM sampling would use, tried in a child, and what it cannot count.

    The check names the reason for each unusable library, even if another one is usable.
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
    release = cuda_release(used.version) or "unknown"
    found = f"{used.version} (CUDA {release}), {used.path}"
    for chip, missing in sorted(used.missing.items()):
        found += f"; {chip}: {'does not count ' + ', '.join(missing) if missing else 'counts all'}"
    has_bytes = not any("dram_read_bytes" in missing for missing in used.missing.values())
    return Check(
        "CUPTI", has_bytes, f"{found}. {refused}".rstrip(". "), "" if has_bytes else _NO_BYTES
    )


def _how_to_get_cupti() -> str:
    """Return the instructions to install the library that matches the driver, if it is known."""
    release = driver_version().partition(".")[0]
    is_13 = release.isdecimal() and int(release) >= _CUDA_13_DRIVER
    package = "nvidia-cuda-cupti>=13" if is_13 else "nvidia-cuda-cupti-cu12>=12.9"
    number = 13 if is_13 else 12
    return (
        f"pip install \"{package}\" into the sampler's Python; or use the toolkit's library: "
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
        found = "unknown whether it is allowed: /proc/driver/nvidia/params is not readable"
        return Check("PM sampling", False, found, _SAMPLE_AS_ADMIN)
    return Check(
        "PM sampling",
        True,
        "allowed, with --counters pm: memory traffic and SM activity within a step",
    )


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
        found = f"outdated: measured with driver {of_device[0].driver}"
        return Check("calibration", False, found, command)
    clocks = tuple(
        ask(nvml, partial(nvml.nvmlDeviceGetMaxClockInfo, device.handle, clock))
        for clock in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
    )
    if known and known[0].clocks_mhz not in (None, clocks):
        found = f"outdated: measured with clocks up to {known[0].clocks_mhz} MHz, now {clocks}"
        return Check("calibration", False, found, command)
    return _calibrated("calibration", known, command)


def _calibrated(name: str, known: list[Calibration], command: str) -> Check:
    if not known:
        return Check(name, False, "not calibrated: utilization uses estimated peak rates", command)
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
