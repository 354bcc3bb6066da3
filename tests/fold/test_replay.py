"""Folds as functions of their records: live, replayed, in any pieces, under any hash seed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscope.calibration import Calibration, StepTable, cpu_name, store
from inferscope.cost.model import roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.table import coefficients
from inferscope.engine import EngineOptions, Sampling, load_engine, load_tokenizer
from inferscope.engine.frontend import FrontEnd
from inferscope.engine.load import describe
from inferscope.probe import EngineInfo, Probe
from inferscope.readers.source import RecordingSource, RingSource, recorded
from inferscope.ring.recording import RecordingWriter
from tests.fold.refolding import Frames, fold_again, folded_from, replayed
from tests.fold.scripts import Finals, Script, assert_all_closes


async def _serve(front_end: FrontEnd) -> None:
    front_end.start()

    async def ask(number: int) -> None:
        await asyncio.sleep(0.05 * number)
        sampling = Sampling(max_tokens=4 + number % 9, temperature=0.5, seed=number)
        got = 0
        prompt = "word " * (3 + 7 * number % 40)
        sections = (("system", 9), ("user", len(prompt) - 9)) if number % 2 else ()
        async for _ in front_end.generate(prompt, sampling, sections=sections):
            got += 1
            if number % 7 == 6 and got == 2:
                return  # the client leaves

    await asyncio.gather(*(ask(number) for number in range(30)))
    await asyncio.sleep(0.2)
    front_end.close()


def _calibration(info: EngineInfo) -> Calibration:
    """Return rates that a machine could have measured; machines that only read have none."""
    assert info.shape is not None
    model = roofline(info.shape, peaks_of("cpu"))
    steps = StepTable(
        model=info.model,
        shape=info.shape,
        mode="eager",
        coefficients=coefficients(model),
        num_steps=1,
        error=0.0,
    )
    return Calibration(
        device=cpu_name(),
        num_threads=info.num_threads,
        measured_real_s=1,
        versions={},
        copy_bytes_s=6e9,
        read_bytes_s=7e9,
        launch_s=3e-6,
        flops_s={"float32": 5e10},
        steps=(steps,),
    )


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run the reference engine behind its front end for two seconds; return its rings."""
    folder = tmp_path_factory.mktemp("rings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERSCOPE_DIR", str(folder))
        patch.setenv("INFERSCOPE_RING_MB", "4")
        options = EngineOptions(token_budget=32, max_running=4, num_blocks=40, dtype="float32")
        engine = load_engine("builtin", options)
        patch.setenv("INFERSCOPE_CACHE", str(folder / "cache"))
        store(_calibration(describe(engine, name="builtin")))
        engine.probe = Probe.open(describe(engine, name="builtin"))
        front_probe = Probe.open(describe(engine, name="builtin"), role="frontend")
        front_end = FrontEnd(engine, load_tokenizer("builtin"), probe=front_probe)
        asyncio.run(_serve(front_end))
        engine.probe.close()
        front_probe.close()
    return sorted(folder.glob("**/*.ring"))


@pytest.fixture(scope="module")
def folded_run(rings: list[Path]) -> Frames:
    return folded_from(rings)


@pytest.fixture(scope="module")
def recording(
    rings: list[Path], folded_run: Frames, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "first"
    return fold_again(rings, folded_run, folder, random.Random(1))[1]


def test_a_run_folds_to_the_same_numbers_however_it_is_read(
    rings: list[Path], folded_run: Frames, tmp_path: Path
) -> None:
    digests = set()
    for seed, most_bytes in enumerate((1, 1 << 24, 20_000, 1 << 24)):
        folder, draw = tmp_path / str(seed), random.Random(seed)
        digest, file = fold_again(rings, folded_run, folder, draw, most_bytes=most_bytes)
        digests |= {digest, replayed(file)}
    pieces = RingSource(lambda: rings, name="in pieces", most_bytes=1)
    while not pieces.has_ended:
        pieces.advance()
    pieces.close()
    digests.add(pieces.collector.digest())
    whole = RingSource(lambda: rings, name="offline")
    while not whole.has_ended:
        whole.advance()
    whole.close()
    digests.add(whole.collector.digest())
    assert len(digests) == 1
    (engine,) = whole.collector.engines.values()
    assert engine.book.mode("never seen").model.source == "calibration"
    assert whole.collector.num_late == whole.collector.num_unjoined == 0


def test_a_run_names_the_same_culprits_however_it_is_read(
    rings: list[Path], folded_run: Frames, tmp_path: Path
) -> None:
    readings = []
    for seed in range(2):
        live, again = Finals(), Finals()
        _, file = fold_again(rings, folded_run, tmp_path / str(seed), random.Random(seed), live)
        replayed(file, again)
        readings += [
            [(final.request_id, final.blame) for final in finals.requests]
            for finals in (live, again)
        ]
    assert all(reading == readings[0] for reading in readings)


@pytest.mark.thorough
def test_a_replay_does_not_depend_on_the_hash_seed(recording: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from inferscope.readers.source import RecordingSource;"
        "s = RecordingSource(Path(sys.argv[1])); s.advance(); print(s.collector.digest())"
    )
    for seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(recording)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == replayed(recording)


def test_a_recording_cut_or_flipped_anywhere_folds_without_raising(
    recording: Path, tmp_path: Path
) -> None:
    rng, whole = random.Random(3), recording.read_bytes()
    for number in range(12):
        content = bytearray(whole)
        if number % 2:
            del content[rng.randrange(12, len(content)) :]
        else:
            for _ in range(rng.choice([1, 20])):
                content[rng.randrange(12, len(content))] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{number}.isr"
        path.write_bytes(content)
        source = RecordingSource(path)
        source.advance()
        assert source.snapshot(10**10).engines is not None
        source.close()


def test_damaged_block_marks_its_requests_and_leaves_none_open(tmp_path: Path) -> None:
    script = Script()
    core = script.ring()
    for number in range(12):
        script.at(500 * number)
        mine = core.queued(str(number))
        core.admitted(mine)
        core.step(number, [(mine, 8, 0)], start_ms=500 * number + 10, end_ms=500 * number + 90)
        core.finished(mine)
        core.keyframe()
        core.health()
    path = tmp_path / "damaged.isr"
    writer = RecordingWriter(path)
    for item in script.items(until_ms=7_000):
        writer.write(recorded(item))
    writer.close()
    content = bytearray(path.read_bytes())
    third = [at for at in range(len(content)) if content.startswith(b"\x89ISBLOCK", at)][2]
    content[third + 60] ^= 0xFF
    path.write_bytes(content)
    finals = Finals()
    source = RecordingSource(path, sinks=(finals,))
    source.advance()
    assert source.collector.num_lost > 10
    assert not source.collector.engines["engine"].lives.table.alive()
    assert {final.finish for final in finals.requests} == {"stop"}
    assert 8 <= len(finals.requests) < 12
    assert_all_closes(source.collector, finals)
    source.close()


@pytest.mark.thorough
def test_the_snapshot_agrees_with_the_export(recording: Path, tmp_path: Path) -> None:
    exported = tmp_path / "run.jsonl"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "inferscope", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    run("export", str(recording), "-o", str(exported))
    view = json.loads(run("attach", str(recording), "--once", "--json", "--window", "300"))
    engine = view["engines"][0]
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in exported.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["kind"], []).append(row)
    requests = rows["request"]
    assert engine["num_finished"] == len(requests) == 30
    assert view["digest"] == rows["run"][0]["digest"]
    for name in ("prefill", "decode", "padding", "unattributed"):
        assert engine["device_total_ns"][name] == rows["device"][0]["ns_by"][name]
        assert engine["device_ns"][name] == engine["device_total_ns"][name]
    assert engine["wall_total_ns"] == sum(engine["device_total_ns"].values())
    for phase in ("prefill", "decode"):
        assert engine["device_ns"][phase] == sum(r["compute_ns"][phase] for r in requests)
    causes: dict[str, int] = {}
    for request in requests:
        for cause, ns in request["ledger_ns"].items():
            causes[cause] = causes.get(cause, 0) + ns
    assert engine["ledger_ns"] == causes
    ended = [r for r in requests if r["finish"] in ("stop", "length")]
    for name, values in {
        "ttft": [r["first_token_ns"] - r["arrived_ns"] for r in requests if r["first_token_ns"]],
        "tbt": [gap for r in requests for gap in r["tbt_ns"]],
        "e2e": [r["last_token_ns"] - r["arrived_ns"] for r in ended],
        "step": [row["measured_ns"] for row in rows["step"]],
    }.items():
        values.sort()
        assert engine[name]["num"] == len(values)
        assert engine[name]["max_ns"] == values[-1]
        assert engine[name]["mean_ns"] == pytest.approx(sum(values) / len(values))
        for share in (50, 95, 99):
            exact = values[-(-share * len(values) // 100) - 1]
            assert engine[name][f"p{share}_ns"] == pytest.approx(exact, rel=0.011, abs=11_000)


def test_the_reference_engine_conserves_everything(recording: Path) -> None:
    finals = Finals()
    source = RecordingSource(recording, sinks=(finals,))
    source.advance()
    source.close()
    assert {final.finish for final in finals.requests} == {"length", "client_cancel"}
    assert_all_closes(source.collector, finals)
