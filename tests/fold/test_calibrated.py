"""Addition of this host's calibration by readers of engines that do not report one."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from inferscope.calibration import Calibration, store, stored
from inferscope.fold.fold import READER, Collector
from inferscope.probe import EngineInfo, Probe
from inferscope.readers.calibrated import Calibrated
from inferscope.readers.merge import Item
from inferscope.readers.source import RecordingSource, RingSource, catch_up
from inferscope.records import (
    CALIBRATION,
    Clock,
    CostTable,
    Keyframe,
    Record,
    RingOpened,
    decode,
    encode,
)
from inferscope.ring.discovery import boot_id
from inferscope.ring.recording import RecordingReader, RecordingWriter
from tests.fold.scripts import Finals
from tests.probe.fakes import of
from tests.test_calibration import ENGINE, HERE

WORKER = msgspec.structs.replace(ENGINE, engine="vllm")
CORE = msgspec.structs.replace(WORKER, device="", num_threads=0)
RATES: Calibration = msgspec.structs.replace(HERE, steps=())
_FIRST_FIT = 64


@pytest.fixture(autouse=True)
def _rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "contained")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")


def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a cache with calibrations that the engine's process cannot read."""
    monkeypatch.setenv("INFERSCOPE_CACHE", str(tmp_path / "cache"))


def run_engine(*, num_steps: int = _FIRST_FIT + 40, info: EngineInfo = WORKER) -> Path:
    """Run an engine with a ring for its core and one for its worker, each of its own process."""
    core = Probe.open(CORE)
    worker = Probe.open(info, role="worker")
    assert core.path is not None
    index = core.queued("r", prompt_tokens=8)
    core.admitted(index)
    for step in range(num_steps):
        now_ns = core.clock.monotonic_ns()
        core.plan(step, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1)
        tokens, context, phase = (8, 0, 0) if not step else (1, 7 + step, 1)
        worker.start(step, mode="eager")
        worker.stop(step)
        core.slices(
            step, requests=[index], phases=[phase], tokens=[tokens], contexts=[context], sampled=[1]
        )
        core.emitted([index], [1], step=step)
    core.finished(index, "length")
    worker.close()
    core.close()
    return core.path.parent


def folded(folder: Path, *, out: Path | None = None) -> tuple[Finals, RingSource]:
    finals = Finals()
    source = RingSource(
        lambda: folder.glob("*.ring"),
        name="",
        sinks=(finals,),
        recording=None if out is None else RecordingWriter(out),
    )
    catch_up(source, patience_s=30)
    source.close()
    return finals, source


def shares(finals: Finals) -> list[tuple[str, list[int]]]:
    return [(step.fit_id, step.shares_ns.tolist()) for step in finals.steps]


def test_the_calibration_applies_before_the_first_fit_and_in_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = run_engine(), tmp_path / "run.isr"
    without, _ = folded(folder)
    outside(monkeypatch, tmp_path)
    store(RATES)
    finals, source = folded(folder, out=file)
    assert len(finals.steps) == _FIRST_FIT + 40
    fits = [step.fit_id for step in finals.steps]
    assert fits[0].startswith("calibration-")
    assert set(fits[:60]) == {fits[0]}
    assert fits[-1].startswith("eager-"), "what the engine itself has shown goes before it"
    assert without.steps[0].fit_id.startswith("roofline")
    assert source.collector.totals().num_unjoined == 0
    assert source.collector.engines["contained"].info is not None
    monkeypatch.setenv("INFERSCOPE_CACHE", os.devnull)  # as on another machine
    again = Finals()
    replayed = RecordingSource(file, sinks=(again,))
    replayed.advance()
    replayed.close()
    assert replayed.collector.digest() == source.collector.digest()
    assert shares(again) == shares(finals)
    assert replayed.collector.totals() == source.collector.totals()


def test_every_reader_here_adds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_engine(num_steps=20)
    outside(monkeypatch, tmp_path)
    store(RATES)
    first, one = folded(folder)
    second, other = folded(folder, out=tmp_path / "run.isr")
    assert shares(first) == shares(second)
    assert one.collector.digest() == other.collector.digest()


def test_tables_follow_each_engine_info_so_a_fold_can_start_at_any_keyframe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe.open(WORKER)
    assert probe.path is not None
    for _ in range(3):
        probe._log.restate(probe.clock.monotonic_ns())
    probe.close()
    outside(monkeypatch, tmp_path)
    store(RATES)
    folded(probe.path.parent, out=tmp_path / "run.isr")
    reader = RecordingReader(tmp_path / "run.isr")
    records = [decode(frame.code, frame.payload) for frame in reader.frames()]
    reader.close()
    kinds = [type(record) for record in records]
    after = [kinds[at + 1] for at, kind in enumerate(kinds) if kind is EngineInfo]
    assert after == [CostTable] * kinds.count(Keyframe) == [CostTable] * 4
    times = [r.t_ns for r in records if type(r) in (Keyframe, EngineInfo, CostTable, Clock)]
    assert times == sorted(times)


def test_an_engines_own_tables_are_used_instead_of_those_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_CACHE", str(tmp_path / "engine"))
    store(RATES)
    folder = run_engine(num_steps=20)
    (worker,) = folder.glob("worker-*.ring")
    own = {table.fit_id for table in of(CostTable, worker)}
    outside(monkeypatch, tmp_path)
    store(msgspec.structs.replace(RATES, read_bytes_s=1e9))
    finals, source = folded(folder)
    assert {step.fit_id for step in finals.steps} == own
    monkeypatch.setenv("INFERSCOPE_CACHE", os.devnull)
    _, alone = folded(folder)
    assert source.collector.digest() == alone.collector.digest()


def test_no_table_is_added_if_no_calibration_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_engine(num_steps=20, info=msgspec.structs.replace(WORKER, num_threads=7))
    _, before = folded(folder)
    outside(monkeypatch, tmp_path)
    store(RATES)
    finals, after = folded(folder)
    assert before.collector.digest() == after.collector.digest()
    assert all(step.fit_id.startswith("roofline") for step in finals.steps)


def items(*records: Record, role: str = "worker", boot: str | None = None) -> list[Item]:
    opened = RingOpened(1, 5, "e", role, 0, 1, "h", boot_id() if boot is None else boot, 1, 1)
    found = [Item(1, READER, 0, opened, encode(opened))]
    return found + [Item(r.t_ns, 5, at, r, encode(r)) for at, r in enumerate(records, 100)]


KEYFRAME = (Keyframe(2, 0, -1), msgspec.structs.replace(WORKER, t_ns=3), Clock(4, 4))


def test_tables_are_added_only_to_rings_of_this_host_that_run_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside(monkeypatch, tmp_path)
    store(RATES)
    tables = RATES.tables(WORKER.shape)  # type: ignore[arg-type]

    def added(given: list[Item]) -> list[Item]:
        return [
            i
            for i in Calibrated(lambda _: tables).with_tables(given)
            if type(i.record) is CostTable
        ]

    (one,) = added(items(*KEYFRAME))
    assert (one.t_ns, one.ring, one.sequence) == (4, 5, 101)
    assert decode(CostTable.CODE, one.payload) == one.record
    assert added(items(*KEYFRAME, boot="another")) == []
    assert added(items(*KEYFRAME, role="frontend")) == []
    assert added(items(*KEYFRAME)[1:]) == [], "the ring has no RingOpened"


def test_tables_known_at_the_first_engine_info_stay_whatever_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside(monkeypatch, tmp_path)
    store(RATES)
    given = items(*KEYFRAME, *KEYFRAME)
    asked = []

    def tables_of(info: EngineInfo) -> list[CostTable]:
        asked.append(info)
        (calibration,) = stored()
        return calibration.tables(info.shape)  # type: ignore[arg-type]

    whole = Calibrated(tables_of).with_tables(given)
    assert [type(i.record) for i in whole].count(CostTable) == 2
    assert len(asked) == 1
    piecewise = Calibrated(tables_of)
    assert [i for item in given for i in piecewise.with_tables([item])] == whole


def test_rates_of_an_uncounted_shape_do_not_count_as_unjoined() -> None:
    assert WORKER.shape is not None
    latent = msgspec.structs.replace(WORKER.shape, latent_ranks=(1536, 512))
    collector = Collector()
    info = msgspec.structs.replace(WORKER, t_ns=3, shape=latent)
    table = msgspec.structs.replace(RATES.tables(latent)[0], t_ns=4)
    wrong = CostTable(5, "x", "", CALIBRATION, {"read_bytes_s": -1.0})
    for item in items(Keyframe(2, 0, -1), info, table):
        collector.fold(item.ring, item.record)
    assert collector.num_unjoined == 0
    collector.fold(5, wrong)
    assert collector.num_unjoined == 1


def test_a_core_without_a_device_has_that_of_its_first_rank() -> None:
    collector = Collector()
    opened = items()[0].record
    assert isinstance(opened, RingOpened)
    for number, role, rank in ((5, "core", 0), (6, "worker", 1), (7, "worker", 0)):
        ring_opened = msgspec.structs.replace(opened, ring=number, role=role, rank=rank)
        collector.fold(READER, ring_opened)
    engine = collector.engines["e"]
    on = [msgspec.structs.replace(WORKER, t_ns=4, device_uuid=f"GPU-{at}") for at in range(2)]
    first = msgspec.structs.replace(CORE, t_ns=3, max_running=9)
    for number, info in ((5, first), (6, on[1]), (7, on[0]), (5, first)):
        collector.fold(number, info)
    assert engine.info is not None
    assert (engine.info.device, engine.info.device_uuid) == (WORKER.device, "GPU-0")
    assert engine.info.max_running == 9
