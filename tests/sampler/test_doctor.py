"""Rows of `doctor` for a recorded device, through the real binding."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pynvml
import pytest

from inferscope.cli.doctor import device as module
from inferscope.cli.doctor.device import Check, devices
from inferscope.sampler.cupti.library import LIBRARY_VARIABLE
from inferscope.sampler.cupti.search import Trial, refused
from tests.sampler.conftest import Play
from tests.sampler.recorded_nvml import H200, Recording
from tests.test_calibration import HERE

UUID = "GPU-6f2a1c3e-58d4-4b7a-9c1e-2f0d3b5a7e91"
MEASURED = msgspec.structs.replace(
    HERE, device="NVIDIA H200", device_uuid=UUID, driver="580.95.05", num_threads=0
)


@pytest.fixture
def _driver(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_nvidia", lambda: True)
    monkeypatch.setattr(module, "driver_version", lambda: "580.95.05")
    play()


def found(*calibrations: object) -> dict[str, Check]:
    return {each.name: each for each in devices(list(calibrations), num_threads=[1])}  # type: ignore[arg-type]


@pytest.mark.usefixtures("_driver")
def test_a_device_is_named_and_each_thing_it_lacks_comes_with_what_would_give_it() -> None:
    rows = found()
    assert rows["GPU driver"].is_fine
    assert rows["GPU"].is_fine
    assert UUID in rows["GPU"].found
    assert rows["GPM"].is_fine
    assert not rows["calibration"].is_fine
    assert rows["calibration"].fix.endswith("inferscope calibrate --device cuda:0")
    assert {"CUPTI", "PM sampling"} <= rows.keys()
    if not rows["PM sampling"].is_fine:
        assert rows["PM sampling"].fix


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("asked", ["nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMaxClockInfo"])
def test_lost_device_is_one_row_with_the_reason_beside_the_others(play: Play, asked: str) -> None:
    sick = Recording.of(H200)
    sick.fails[asked] = int(pynvml.NVML_ERROR_GPU_IS_LOST)
    play(sick)
    rows = found(MEASURED)
    assert not rows["GPU"].is_fine
    assert UUID in rows["GPU"].found
    assert "does not respond: GPU is lost" in rows["GPU"].found
    assert f"nvidia-smi -q -i {UUID}" in rows["GPU"].fix
    assert {"CUPTI", "PM sampling"} <= rows.keys()


@pytest.mark.usefixtures("_driver")
def test_binding_without_gpm_differs_from_device_without_gpm(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Recording.of(H200)
    older.document["devices"][0]["has_gpm"] = False
    play(older)
    row = found()["GPM"]
    assert not row.is_fine
    assert "--counters auto,dcgm" in row.fix
    monkeypatch.delattr(pynvml, "nvmlGpmQueryDeviceSupport")
    rows = found()
    assert rows["GPU"].is_fine
    assert rows["GPM"].fix == "pip install -U nvidia-ml-py"


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize(
    ("driver", "package"),
    [("580.95.05", '"nvidia-cuda-cupti>=13"'), ("560.35", '"nvidia-cuda-cupti-cu12>=12.9"')],
)
def test_a_missing_libcupti_comes_with_the_package_that_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str, package: str
) -> None:
    monkeypatch.setattr(module, "candidates", list)
    monkeypatch.setattr(module, "driver_version", lambda: driver)
    row = found()["CUPTI"]
    assert not row.is_fine
    assert f"pip install {package}" in row.fix
    assert f"{LIBRARY_VARIABLE}=/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.1" in row.fix


BYTES = ["dram_read_bytes", "dram_write_bytes"]


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize(
    ("version", "missing", "is_fine", "message"),
    [
        (28, {"GH100": []}, True, "28 (CUDA 12.9), /lib/libcupti.so.12; GH100: counts all"),
        (130_001, {"GB100": ["pcie_read_bytes"]}, True, "130001 (CUDA 13.0)"),
        (130_202, {"GB20B": BYTES}, False, "GB20B: does not count dram_read_bytes, dram_write"),
    ],
)
def test_the_library_row_has_its_cuda_release_and_what_a_chip_cannot_count(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    missing: dict[str, list[str]],
    is_fine: bool,
    message: str,
) -> None:
    first = refused("/lib/libcupti.so.13", "/lib/libcupti.so.13: it does not initialise.")
    used = Trial("/lib/libcupti.so.12", "", version, missing)
    monkeypatch.setattr(module, "trials", lambda paths: [first, used])
    row = found()["CUPTI"]
    assert row.is_fine is is_fine
    assert message in row.found
    assert first.reason.rstrip(".") in row.found
    assert bool(row.fix) is not is_fine


@pytest.mark.usefixtures("_driver")
def test_libraries_that_cannot_be_used_come_with_the_package_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = refused("/lib/libcupti.so.12", "/lib/libcupti.so.12 is of CUDA 12.8.")
    monkeypatch.setattr(module, "trials", lambda paths: [old])
    row = found()["CUPTI"]
    assert not row.is_fine
    assert row.found == f"no PM sampling: {old.reason}"
    assert "pip install" in row.fix


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize(
    ("is_allowed", "is_fine", "message"),
    [
        (True, True, "allowed"),
        (False, False, "restricted to root and"),
        (None, False, "unknown whether it is allowed"),
    ],
)
def test_the_right_to_profile_is_claimed_only_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool | None, is_fine: bool, message: str
) -> None:
    monkeypatch.setattr(module, "may_profile", lambda: is_allowed)
    monkeypatch.setattr(module, "counter_holders", dict)
    row = found()["PM sampling"]
    assert row.is_fine is is_fine
    assert message in row.found
    assert ("sudo inferscope sampler --counters pm" in row.fix) is not is_fine


@pytest.mark.usefixtures("_driver")
def test_possible_counter_holder_is_named_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "may_profile", lambda: True)
    monkeypatch.setattr(module, "counter_holders", lambda: {"nv-hostengine": 812})
    row = found()["PM sampling"]
    assert "nv-hostengine (process 812)" in row.found
    assert "process 812" in row.fix
    assert row.fix.endswith("--counters pm --pm-despite nv-hostengine.")


@pytest.mark.usefixtures("_driver")
def test_a_calibration_is_of_one_driver_and_of_its_clocks() -> None:
    assert found(MEASURED)["calibration"].is_fine
    older = found(msgspec.structs.replace(MEASURED, driver="570.1"))["calibration"]
    assert not older.is_fine
    assert "570.1" in older.found
    slower = found(msgspec.structs.replace(MEASURED, clocks_mhz=(1, 2)))["calibration"]
    assert not slower.is_fine
    assert "1, 2" in slower.found
    other = found(msgspec.structs.replace(MEASURED, device_uuid="GPU-another"))["calibration"]
    assert "not calibrated" in other.found


def test_missing_driver_has_a_remedy_and_amd_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_nvidia", lambda: False)
    monkeypatch.setattr(module, "_AMD", tmp_path / "absent")
    assert "--gpus all" in found()["GPU"].fix
    monkeypatch.setattr(module, "_AMD", tmp_path)
    row = found()["GPU"]
    assert "AMD" in row.found
    assert "counters not supported" in row.found
    assert not row.fix
