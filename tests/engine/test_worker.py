from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.remote import RemoteRunner, WorkerLost
from inferscope.errors import BadInput
from inferscope.probe import Probe
from inferscope.readers.source import RingSource
from inferscope.records import DRAFT, VERIFY, Emitted, StepPlan, StepSlices, StepSpan
from tests.engine.checkpoints import prompts
from tests.probe.fakes import of, tokens_of_slices, tokens_signed

pytestmark = pytest.mark.thorough

PLAIN = EngineOptions(dtype="float32", token_budget=24, max_running=6, num_blocks=14)
"""Options under which chunks, prefix hits and preemptions occur."""
OPTIONS = replace(PLAIN, speculative="ngram")
DRAFTING = replace(PLAIN, speculative="draft", draft_model="random:tiny,layers=1")
SAMPLINGS = (
    Sampling(max_tokens=20),
    Sampling(max_tokens=20, temperature=0.9, seed=5),
    Sampling(max_tokens=20, temperature=0.9, top_k=5, top_p=0.8, seed=6),
    Sampling(max_tokens=20, min_tokens=20, stop_token_ids=tuple(range(80)), temperature=1.0),
)


def remote_engine() -> Engine:
    return load_engine("random:tiny", OPTIONS, in_worker=True)


def pid_of(engine: Engine) -> int:
    runner = engine._runner
    assert isinstance(runner, RemoteRunner)
    return runner.pids[0]


def is_dead(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()[0] == "Z"


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def remote() -> Iterator[Engine]:
    """An engine with a worker; the tests stop it in their order."""
    engine = remote_engine()
    yield engine
    engine.close()


def test_worker_generates_the_same_tokens_as_an_in_process_engine(remote: Engine) -> None:
    local = load_engine("random:tiny", PLAIN)
    batch_prompts = [*prompts(6, vocab=64), *prompts(6, vocab=64)]
    for sampling in SAMPLINGS:
        assert remote.generate(batch_prompts, sampling) == local.generate(batch_prompts, sampling)


def test_failing_step_ends_its_requests_but_not_the_worker(
    remote: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = remote.generate([[4, 5]], Sampling(max_tokens=4))
    with monkeypatch.context() as patched:
        patched.setattr(remote, "_check", lambda prompt, sampling: None)
        remote.submit([1, 2], Sampling(max_tokens=4, min_tokens=2, stop_token_ids=(99_999_999,)))
    (output,) = remote.step()
    assert output.finish == "error"
    assert "its 1 requests end with an error: StepFailed: IndexError: index 9" in caplog.text
    assert remote.generate([[4, 5]], Sampling(max_tokens=4)) == [expected]


def test_worker_exits_with_its_engine(remote: Engine) -> None:
    pid = pid_of(remote)
    runner = remote._runner
    assert isinstance(runner, RemoteRunner)
    runner._workers[0].pipe.close()  # as when the engine's process is killed
    deadline = time.monotonic() + 90
    while not is_gone(pid) and time.monotonic() < deadline:
        runner._workers[0].process.poll()
        time.sleep(0.02)
    assert is_gone(pid)


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "apart")
    return tmp_path / "apart"


@pytest.mark.parametrize("options", [OPTIONS, DRAFTING])
def test_worker_spans_join_the_slices_of_the_core(rings: Path, options: EngineOptions) -> None:
    given, sampling = prompts(8, vocab=64), Sampling(max_tokens=10)
    engine = load_engine("random:tiny", options, open_probe=Probe.open, in_worker=True)
    expected = load_engine("random:tiny", PLAIN).generate(given, sampling)
    assert engine.generate(given, sampling) == expected
    engine.close()
    engine.probe.close()
    assert is_gone(pid_of(engine))
    core, worker = (next(rings.glob(f"{role}-0-*.ring")) for role in ("core", "worker"))
    assert of(StepPlan, core)
    assert of(Emitted, core)
    assert not of(StepSpan, core)
    assert not of(StepSlices, worker)
    spans = {span.step: span.digest for span in of(StepSpan, worker)}
    slices_of_steps = of(StepSlices, core)
    assert spans == {slices.step: slices.digest for slices in slices_of_steps}
    assert 0 not in spans.values()
    by_phase = tokens_signed(worker)
    assert by_phase == tokens_of_slices(core)
    assert any(prefill and decode for prefill, decode in by_phase.values())
    assert any(VERIFY in slices.phases for slices in slices_of_steps)
    assert any(DRAFT in slices.phases for slices in slices_of_steps) == (options is DRAFTING)

    source = RingSource(lambda: rings.glob("*.ring"), name="")
    deadline = time.monotonic() + 60
    while not source.has_ended and time.monotonic() < deadline:
        source.advance()
        time.sleep(0.02)
    fold = source.collector
    (view,) = fold.engines.values()
    assert view.lives.num_finished == 8
    assert fold.num_unjoined == 0
    assert view.num_partial == 0
    for final in view.lives.finished:
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert final.ledger_ns["decode_own"] > 0
        assert not final.joined_late
    source.close()


def test_killed_worker_ends_the_engine_with_one_error() -> None:
    engine = remote_engine()
    pid = pid_of(engine)
    engine.submit([1, 2, 3], Sampling(max_tokens=50))
    engine.step()
    os.kill(pid, signal.SIGKILL)
    while not is_dead(pid):
        time.sleep(0.01)
    with pytest.raises(WorkerLost, match=r"the worker's process has ended \(exit code -9\)"):
        engine.step()
    engine.close()


def test_load_failure_is_raised_in_the_caller(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no model"):
        load_engine(str(tmp_path / "nothing"), in_worker=True)
