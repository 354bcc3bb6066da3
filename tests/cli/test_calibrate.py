from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest

from inferscope.calibration import Calibration, stored
from inferscope.cli.calibrate.command import document_of
from inferscope.cli.main import main
from inferscope.engine import EngineOptions, Sampling, load_engine
from inferscope.engine.load import describe
from inferscope.probe import Probe
from inferscope.readers.source import RingSource
from tests.cli.running import inferscope
from tests.test_calibration import HERE

pytestmark = pytest.mark.thorough


def test_an_engine_begins_with_what_calibrate_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for seconds in ("3", "40"):  # a busy machine needs more, as the message says
        done = inferscope(
            "calibrate", "random:tiny", "--device", "cpu", "--seconds", seconds, "--json",
            rings=tmp_path / "rings", INFERSCOPE_CACHE=str(cache),
        )  # fmt: skip
        if "Give more --seconds" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert stat.S_IMODE(Path(document["path"]).stat().st_mode) == 0o600
    assert [rate["name"] for rate in document["memory"]] == ["copy", "read"]
    assert "float32" in {rate["name"] for rate in document["compute"]}
    assert all(rate["peak_bytes_s"] is None for rate in document["memory"]), (
        "no CPU's peaks are known"
    )
    monkeypatch.setenv("INFERSCOPE_CACHE", str(cache))
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    (calibration,) = stored()
    (steps,) = calibration.steps
    assert steps.model == "random:tiny"
    assert steps.num_steps >= 64
    assert 0 <= steps.error < 1
    engine = load_engine("random:tiny", EngineOptions(num_blocks=64))
    engine.probe = Probe.open(describe(engine, name="random:tiny"))
    engine.generate([[1, 2, 3]], Sampling(max_tokens=8, ignore_eos=True))
    engine.probe.close()
    source = RingSource(lambda: list((tmp_path / "rings").glob("**/*.ring")), name="offline")
    while not source.has_ended:
        source.advance()
    source.close()
    (folded,) = source.collector.engines.values()
    assert folded.book.mode("eager").model.source == "calibration"


def test_a_model_that_is_too_slow_for_the_time_is_no_table(tmp_path: Path) -> None:
    done = inferscope(
        "calibrate", "random:tiny", "--device", "cpu", "--seconds", "0.001",
        rings=tmp_path, INFERSCOPE_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Give more --seconds" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_device_that_is_not_there_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    assert main(["calibrate", "--device", "cuda:99", "--seconds", "1"]) == 2
    assert "cuda:99" in capsys.readouterr().err


def test_measured_rates_stand_beside_the_maker_s() -> None:
    on_gpu: Calibration = msgspec.structs.replace(
        HERE,
        device="NVIDIA H200",
        device_uuid="GPU-1",
        read_bytes_s=4.32e12,
        flops_s={"bfloat16": 791.2e12, "float8_e4m3fn": 1187.4e12, "float32": 5e13},
    )
    shares = shares_of(on_gpu)
    assert shares["read"] == pytest.approx(0.9)
    assert shares["bfloat16"] == pytest.approx(0.8)
    assert shares["float8_e4m3fn"] == pytest.approx(0.6)
    assert shares["float32"] is None, "the table has no such column"
    unknown = msgspec.structs.replace(on_gpu, device="NVIDIA Z9000")
    assert set(shares_of(unknown).values()) == {None}


def shares_of(calibration: Calibration) -> dict[str, float | None]:
    document = document_of(calibration, Path("calibration.json"))
    return {rate.name: rate.share for rate in (*document.memory, *document.compute)}
