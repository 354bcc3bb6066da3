"""What `inferscope calibrate` has measured of a device, kept for those who observe engines on it.

    calibrate ──► a private file per device, driver, clocks (CPU: model, threads)
                        │ when a probe opens, once         │ where the ring has none: readers
                        ▼                                  ▼ on the engine's host
                  CostTable in the engine's ring ──► every reader, every recording

The engine's process reads the file and states it in its ring. One that cannot, in a container say,
states nothing: then its host's readers put it into what they fold and record. A recording has it
either way, so whoever reads that, on whatever machine and whenever, starts from the same model.
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
        model: by its name.
        shape: by which engines are recognised.
        mode: of execution.
        coefficients: see `cost.table`.
        num_steps: that were measured.
        error: the median of |modelled / measured - 1| over them.
    """

    model: str
    shape: Shape
    mode: str
    coefficients: dict[str, float]
    num_steps: int
    error: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one device.

    Attributes:
        device: its name; a CPU's model.
        device_uuid: empty for a CPU.
        driver: the NVIDIA driver's version, empty for a CPU.
        clocks_mhz: of SMs and memory, that they may reach; None where nobody says.
        num_threads: that computed, on a CPU; 0 on a GPU.
        measured_real_s: when, as Unix time.
        versions: of what measured, by name.
        copy_bytes_s: read and written together.
        read_bytes_s: read alone.
        launch_s: host time to launch one operation.
        flops_s: dense matrix products, by dtype.
        steps: per model.
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
        """Return what tells one calibration from another of the same device: a change of it."""
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
        """Return the device's rates as a CostTable has them."""
        return {
            "read_bytes_s": self.read_bytes_s,
            "copy_bytes_s": self.copy_bytes_s,
            "launch_s": self.launch_s,
            **{f"flops_s.{dtype}": flops_s for dtype, flops_s in self.flops_s.items()},
        }

    def tables(self, shape: Shape) -> list[CostTable]:
        """Return what there is to tell of a model: the device's rates, and its step times."""
        told = [("", self.ceilings)]
        told += [(table.mode, table.coefficients) for table in self.steps if table.shape == shape]
        return [
            CostTable(0, f"calibration-{_digest((mode, rates))}", mode, CALIBRATION, rates)
            for mode, rates in told
        ]


def cache_directory() -> Path:
    """Return the folder of calibrations: INFERSCOPE_CACHE, or the user's cache."""
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "inferscope"


def store(calibration: Calibration) -> Path:
    """Keep a calibration where its owner alone can read it, in place of an older one like it.

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
    """Return the calibrations of this user, the newest first; damaged files are passed over."""
    with suppress(OSError, RuntimeError):  # no such folder, or a user without a home
        found = sorted(cache_directory().glob(f"*{_SUFFIX}"))
        known = [calibration for path in found for calibration in _read(path)]
        return sorted(known, key=lambda calibration: -calibration.measured_real_s)
    return []


def fitting(info: EngineInfo, known: Iterable[Calibration]) -> Calibration | None:
    """Return the first calibration of the device that an engine runs on.

    A GPU is known by its uuid and driver: which clocks it runs at now, the engine's process cannot
    ask without NVML, so of several the newest counts. `doctor` says where clocks have changed.
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
    """Return what this machine has measured for an engine, for its ring; never raises."""
    if info.shape is None:
        return []
    try:
        calibration = fitting(info, stored())
        return [] if calibration is None else calibration.tables(info.shape)
    except Exception:  # an engine must start whatever stands in its user's cache
        logger.debug("no calibration can be read", exc_info=True)
        return []


def driver_version() -> str:
    """Return the NVIDIA driver's version, empty where there is none."""
    try:
        first = _DRIVER.read_text(encoding="ascii", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "")


def cpu_name() -> str:
    """Return the processor's model, or the kind of machine where the kernel does not say."""
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
