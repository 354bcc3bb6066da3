"""What `doctor` says of a recorded device, through the real binding."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from inferscope.cli import doctor_device as module
from inferscope.cli.doctor_device import Finding, devices
from tests.counters.conftest import Play
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


def found(*calibrations: object) -> dict[str, Finding]:
    return {each.name: each for each in devices(list(calibrations), num_threads=[1])}  # type: ignore[arg-type]


@pytest.mark.usefixtures("_driver")
def test_a_device_is_named_and_each_thing_it_lacks_comes_with_what_would_give_it() -> None:
    rows = found()
    assert rows["GPU driver"].is_fine
    assert rows["GPU"].is_fine
    assert UUID in rows["GPU"].found
    assert "GPM" in rows["GPU"].found
    assert not rows["calibration"].is_fine
    assert rows["calibration"].fix.endswith("inferscope calibrate --device cuda:0")
    assert {"CUPTI", "PM sampling"} <= rows.keys()
    if not rows["PM sampling"].is_fine:
        assert rows["PM sampling"].fix


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


def test_a_machine_without_a_driver_is_told_how_to_get_one_and_amds_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_nvidia", lambda: False)
    monkeypatch.setattr(module, "_AMD", tmp_path / "absent")
    assert "--gpus all" in found()["GPU"].fix
    monkeypatch.setattr(module, "_AMD", tmp_path)
    row = found()["GPU"]
    assert "AMD" in row.found
    assert "unsupported" in row.found
    assert not row.fix
