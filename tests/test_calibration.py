from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from inferscope.calibration import (
    Calibration,
    StepTable,
    cache_directory,
    cost_tables,
    cpu_name,
    store,
    stored,
)
from inferscope.probe import EngineInfo, Probe
from inferscope.records import CALIBRATION, CostTable, Keyframe
from tests.cost.truth import SMALL
from tests.probe.fakes import of

OTHER = msgspec.structs.replace(SMALL, num_layers=3)
STEPS = StepTable(
    model="made-up",
    shape=SMALL,
    mode="eager",
    coefficients={"f_ns.1": 5.0},
    num_steps=9,
    error=0.1,
)
HERE = Calibration(
    device=cpu_name(),
    num_threads=2,
    measured_real_s=100,
    versions={"torch": "2.11"},
    copy_bytes_s=6e9,
    read_bytes_s=7e9,
    launch_s=3e-6,
    flops_s={"float32": 5e10},
    steps=(STEPS,),
)
ENGINE = EngineInfo(0, "test", shape=SMALL, device="cpu", num_threads=2)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")


def test_what_is_stored_is_read_back_and_is_its_owner_s_alone() -> None:
    path = store(HERE)
    assert stored() == [HERE]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_newer_one_replaces_its_like_and_stands_before_others() -> None:
    newer = msgspec.structs.replace(HERE, measured_real_s=200)
    other = msgspec.structs.replace(HERE, measured_real_s=150, num_threads=1)
    for each in (HERE, other, newer):
        store(each)
    assert stored() == [newer, other]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1, 2]", b'{"device": 3}'])
def test_a_damaged_file_is_passed_over(content: bytes) -> None:
    store(HERE)
    (cache_directory() / "x.calibration.json").write_bytes(content)
    assert stored() == [HERE]


def test_a_link_to_elsewhere_is_passed_over(tmp_path: Path) -> None:
    path = store(HERE)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert stored() == []


def test_an_engine_gets_its_device_s_rates_and_its_own_model_s_steps() -> None:
    store(HERE)
    rates, steps = cost_tables(ENGINE)
    assert (rates.mode, steps.mode) == ("", "eager")
    assert rates.coefficients["flops_s.float32"] == 5e10
    assert steps.coefficients == STEPS.coefficients
    assert [table.mode for table in cost_tables(msgspec.structs.replace(ENGINE, shape=OTHER))] == [
        ""
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"num_threads": 1},
        {"device": "NVIDIA H200"},
        {"device": "NVIDIA H200", "device_uuid": "GPU-1"},
        {"shape": None},
    ],
)
def test_an_engine_elsewhere_gets_nothing(change: dict[str, object]) -> None:
    store(HERE)
    assert cost_tables(msgspec.structs.replace(ENGINE, **change)) == []


def test_a_gpu_is_known_by_its_uuid_with_or_without_the_prefix() -> None:
    on_gpu = msgspec.structs.replace(
        HERE, device="NVIDIA H200", device_uuid="GPU-ab", num_threads=0
    )
    store(on_gpu)
    info = msgspec.structs.replace(ENGINE, device="NVIDIA H200", device_uuid="AB", num_threads=0)
    assert len(cost_tables(info)) == 2
    assert cost_tables(msgspec.structs.replace(info, device_uuid="cd")) == []


def test_a_probe_states_it_in_every_keyframe() -> None:
    store(HERE)
    probe = Probe.open(ENGINE)
    assert probe.path is not None
    probe._log.restate(probe.clock.monotonic_ns())
    probe.close()
    tables = of(CostTable, probe.path)
    assert [record.source for record in tables] == [CALIBRATION] * 4
    assert len(of(Keyframe, probe.path)) == 2
    ids = [record.fit_id for record in tables]
    assert ids[:2] == ids[2:]


def test_a_front_end_and_an_uncalibrated_engine_state_nothing() -> None:
    for role in ("core", "frontend"):
        if role == "frontend":
            store(HERE)
        probe = Probe.open(ENGINE, role=role)
        assert probe.path is not None
        probe.close()
        assert of(CostTable, probe.path) == []
