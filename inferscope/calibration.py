"""Calibrations: device rates measured by `inferscope calibrate`, stored for later observation.

    calibrate ──► a private file per device, driver, clocks (CPU: model, threads)
                        │ when a probe opens, once         │ where the ring has none: readers
                        ▼                                  ▼ on the engine's host
                  CostTable in the engine's ring ──► every reader, every recording

The engine's process reads the file and states its content in the engine's ring. If it cannot (in a
container, for example), readers on its host add it to what they fold and record. A recording thus
always has it, so every reader starts from the same model, on any machine and at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from inferscope.private import write_private
from inferscope.records import CALIBRATION, CostTable, EngineInfo, Shape, plain_uuid

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "INFERSCOPE_CACHE"
CPU = "cpu"
_SUFFIX = ".calibration.json"
_LARGEST_BYTES = 1 << 20
_DRIVER = Path("/proc/driver/nvidia/version")
_CPUINFO = Path("/proc/cpuinfo")


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """The reference engine's step times on one model, as a cost model.

    Attributes:
        model: name of the model.
        shape: shape by which engines of the model are recognized.
        mode: execution mode.
        coefficients: see `cost.table`.
        num_steps: number of steps measured.
        error: median of |modelled / measured - 1| over these steps.
    """

    model: str
    shape: Shape
    mode: str
    coefficients: dict[str, float]
    num_steps: int
    error: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of one device.

    Attributes:
        device: its name; a CPU's model.
        device_uuid: its UUID, empty for a CPU.
        driver: version of the NVIDIA driver, empty for a CPU.
        clocks_mhz: maximum clocks of SMs and memory; None if unknown.
        num_threads: number of computing threads on a CPU; 0 on a GPU.
        measured_real_s: Unix time of the measurement.
        versions: versions of the measuring software, by name.
        copy_bytes_s: rate of a copy, reads plus writes.
        read_bytes_s: rate of reads alone.
        launch_s: host time to launch one operation.
        flops_s: rates of dense matrix products, by dtype.
        steps: step tables, one per model.
    """

    device: str
    device_uuid: str = ""
    driver: str = ""
    clocks_mhz: tuple[int, int] | None = None
    num_threads: int = 0
    measured_real_s: int
    versions: dict[str, str]
    copy_bytes_s: float
    read_bytes_s: float
    launch_s: float
    flops_s: dict[str, float]
    steps: tuple[StepTable, ...] = ()

    @property
    def key(self) -> str:
        """Return a key of the device and its state that affects rates; a new key is a change."""
        return _digest(
            (
                self.device_uuid.lower() or self.device,
                self.driver,
                self.clocks_mhz,
                self.num_threads,
            )
        )

    @property
    def ceilings(self) -> dict[str, float]:
        """Return the device's rates in the form of a CostTable."""
        return {
            "read_bytes_s": self.read_bytes_s,
            "copy_bytes_s": self.copy_bytes_s,
            "launch_s": self.launch_s,
            **{f"flops_s.{dtype}": flops_s for dtype, flops_s in self.flops_s.items()},
        }

    def tables(self, shape: Shape) -> list[CostTable]:
        """Return the cost tables for a model: the device's rates and its step times."""
        entries = [("", self.ceilings)]
        entries += [
            (table.mode, table.coefficients) for table in self.steps if table.shape == shape
        ]
        return [
            CostTable(0, f"calibration-{_digest((mode, rates))}", mode, CALIBRATION, rates)
            for mode, rates in entries
        ]


def cache_directory() -> Path:
    """Return the folder of calibrations: INFERSCOPE_CACHE, or the user's cache."""
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "inferscope"


def store(calibration: Calibration) -> Path:
    """Store a calibration readable by its owner alone; replace an older one with the same key.

    Raises:
        OSError: it cannot be written.
    """
    folder = cache_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{calibration.key}{_SUFFIX}"
    whole = path.with_suffix(f".{os.getpid()}")
    write_private(whole, msgspec.json.encode(calibration) + b"\n")
    whole.replace(path)
    return path


def stored() -> list[Calibration]:
    """Return the calibrations of this user, newest first; skip damaged files."""
    with suppress(OSError, RuntimeError):  # no such folder, or a user without a home
        found = sorted(cache_directory().glob(f"*{_SUFFIX}"))
        known = [calibration for path in found for calibration in _read(path)]
        return sorted(known, key=lambda calibration: -calibration.measured_real_s)
    return []


def fitting(info: EngineInfo, known: Iterable[Calibration]) -> Calibration | None:
    """Return the first calibration of the device that an engine runs on.

    A GPU is identified by UUID and driver. Without NVML the engine's process cannot query the
    current clocks, so the newest of several counts. `doctor` reports changed clocks.
    """
    if info.device == CPU:
        device = cpu_name()
        return next(
            (
                each
                for each in known
                if each.device == device and each.num_threads == info.num_threads
            ),
            None,
        )
    uuid, driver = plain_uuid(info.device_uuid), driver_version()
    if not uuid:
        return None
    return next(
        (each for each in known if plain_uuid(each.device_uuid) == uuid and each.driver == driver),
        None,
    )


def cost_tables(info: EngineInfo) -> list[CostTable]:
    """Return this machine's cost tables for an engine's ring; never raise."""
    if info.shape is None:
        return []
    try:
        calibration = fitting(info, stored())
        return [] if calibration is None else calibration.tables(info.shape)
    except Exception:  # no content of the cache may stop an engine
        logger.debug("cannot read calibrations; recording without cost tables", exc_info=True)
        return []


def driver_version() -> str:
    """Return the NVIDIA driver's version, empty where there is none."""
    try:
        first = _DRIVER.read_text(encoding="ascii", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "")


def cpu_name() -> str:
    """Return the processor's model, or the machine type if the kernel does not report it."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: Path) -> Iterator[Calibration]:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        status = path.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and status.st_size <= _LARGEST_BYTES:
            yield msgspec.json.decode(path.read_bytes(), type=Calibration)


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:16]
