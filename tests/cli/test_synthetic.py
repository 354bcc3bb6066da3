"""Records marked as synthetic: everything derived from them is marked, too."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.probe.identity import identity
from inferscope.readers.source import catch_up, open_source
from inferscope.records import DECODE, PREFILL, SAMPLER_ROLE, CounterSample, Keyframe, encode
from inferscope.ring.layout import STARTS_KEYFRAME
from inferscope.ring.writer import RingWriter
from tests.cli.running import inferscope

UUID = "1b2c"


def engine(folder: Path, name: str, *, synthetic: bool) -> None:
    """Serve one request."""
    me = identity("core", 0, engine=name, synthetic=synthetic)
    (folder / name).mkdir(parents=True)
    ring = RingWriter(folder / name / "core-0-1.ring", me, capacity=1 << 16)
    info = EngineInfo(0, "by-hand", "1.0", model=f"model-of-{name}", device_uuid=UUID)
    probe = Probe(ring, None, info)
    probe._keeper.begin("test")
    index = probe.queued(f"request-of-{name}", prompt_tokens=8)
    probe.admitted(index)
    for step, (phase, tokens, context) in enumerate([(PREFILL, 8, 0), (DECODE, 1, 8)]):
        probe.start(step)
        probe.stop(step)
        row = {"requests": [index], "phases": [phase], "tokens": [tokens], "contexts": [context]}
        probe.slices(step, **row)
        probe.emitted([index], [1], step=step)
    probe.finished(index, "stop")
    probe.close()


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made_up")
    engine(folder, "pretender", synthetic=True)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ("attach", "{rings}", "--once"),
        ("why", "request-of-pretender", "{rings}"),
        ("shares", "{rings}"),
        ("findings", "{rings}"),
        ("slo", "check", "{slo}", "{rings}"),
    ],
)
def test_every_text_states_it(made_up: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("slos: [{metric: ttft, threshold: 1s, objective: 99%, window: 1h}]")
    words = [word.format(rings=made_up, slo=slo) for word in command]
    done = inferscope(*words, rings=tmp_path, NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "synthetic" in done.stdout.lower()
    (tmp_path / "real").mkdir()
    engine(tmp_path / "real", "pretender", synthetic=False)
    words = [word.format(rings=tmp_path / "real", slo=slo) for word in command]
    assert "synthetic" not in inferscope(*words, rings=tmp_path, NO_COLOR="1").stdout.lower()


def test_every_export_states_it_for_each_engine(made_up: Path, tmp_path: Path) -> None:
    engine(made_up, "honest", synthetic=False)
    for form, name in (("jsonl", "a.jsonl"), ("perfetto", "a.json"), ("parquet", "a.parquet")):
        out = str(tmp_path / name)
        done = inferscope("export", str(made_up), "--format", form, "-o", out, rings=tmp_path)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        assert row["synthetic"] is (row.get("engine") != "honest"), row["kind"]
    trace = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["synthetic"] is True
    for name in ("requests", "steps", "slices"):
        (file,) = (tmp_path / "a.parquet").glob(f"{name}/*/*/*.parquet")
        rows = pq.ParquetFile(file).read().to_pylist()
        assert {row["engine"] for row in rows} == {"pretender", "honest"}
        assert all(row["synthetic"] is (row["engine"] == "pretender") for row in rows)


def test_an_engine_on_a_device_with_synthetic_samples_is_synthetic(tmp_path: Path) -> None:
    engine(tmp_path, "honest", synthetic=False)
    me = identity(SAMPLER_ROLE, 0, engine="sampler", synthetic=True)
    (tmp_path / "sampler").mkdir()
    ring = RingWriter(tmp_path / "sampler" / "sampler-0-1.ring", me, capacity=1 << 16)
    at_ns = me.start_ns
    ring.write(Keyframe.CODE, encode(Keyframe(at_ns, 0, -1)), flags=STARTS_KEYFRAME)
    for uuid, is_made_up in (("GPU-other", False), (f"GPU-{UUID}", True)):
        sample = CounterSample(at_ns + 1, uuid, at_ns, at_ns + 1, "nvml", {"energy_uj": 1.0})
        ring.write(CounterSample.CODE, encode(sample))
        source = open_source(tmp_path)
        catch_up(source)
        (view,) = source.snapshot(1).engines
        source.close()
        assert view.is_synthetic is is_made_up
    ring.close()
