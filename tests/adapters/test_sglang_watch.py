from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from inferscope.adapters.patching import Patches
from inferscope.adapters.sglang import hooks as sglang_hooks
from inferscope.adapters.sglang.hooks import SchedulerHooks
from inferscope.adapters.sglang.scheduler import SchedulerWatch
from inferscope.probe import Probe
from inferscope.probe.deferred import OVERDUE_NS
from inferscope.probe.timers import EventTimer, StepTimer
from inferscope.records import (
    COLUMNS,
    DECODE,
    EVENTS,
    FAILED,
    RECOMPUTED,
    VERIFY,
    Emitted,
    ProbeHealth,
    RequestEvent,
    StepPlan,
    StepSame,
    StepSlices,
    StepSpan,
)
from inferscope.ring.control import SWITCHED_OFF, SWITCHED_ON, switch
from inferscope.ring.reader import RingReader
from tests.adapters.sglang_objects import (
    Abort,
    Batch,
    ForwardMode,
    Reason,
    Req,
    Scheduler,
    Speculation,
    Tensor,
    TpModelWorker,
    hooked,
)
from tests.adapters.test_vllm import DoneEvents
from tests.probe.fakes import FakeClock, facts_of, make_probe, of, tokens_of_slices, tokens_signed

Row = dict[str, int]
_DISAGGREGATED = "when scheduling began in a disaggregated engine"


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Patches:
    """Set a guard for these hooks alone: a fault disables all hooks of a guard permanently."""
    own = Patches("sglang")
    monkeypatch.setattr(sglang_hooks, "patches", own)
    return own


def watched(
    folder: Path,
    patches: Patches,
    *,
    name: str = "core",
    is_core: bool = True,
    lacking: str = "",
    end_left: str = "client_cancel",
    is_deferring: bool = False,
    timer: StepTimer | None = None,
) -> tuple[type[Scheduler], Probe]:
    probe = make_probe(folder, FakeClock(step_ns=1000), name=name, timer=timer, has_switch=True)
    patches.probes.append(probe)
    hooks = SchedulerHooks()
    hooks._watch = SchedulerWatch(
        probe,
        is_core=is_core,
        pool=lambda: (60, 30),
        total_tokens=100,
        max_running=8,
        adapter_of={"1f": "sql"}.__getitem__,
        end_left=end_left,
        is_deferring=is_deferring,
        clock=probe.clock,
    )
    probe.look_after(hooks._watch.flush_overdue)
    patches.forgetting.append(hooks._watch.forget)
    placed = dict(hooks.by_target())
    for feature, wanted in hooks.by_feature().items():
        placed |= wanted if feature not in ("pauses", _DISAGGREGATED, lacking) else {}
    return hooked({k: v for k, v in placed.items() if "run_event_loop" not in k}), probe


def requests_of(sizes: list[tuple[int, int]]) -> list[Req]:
    return [Req(f"r{at}", prompt, out) for at, (prompt, out) in enumerate(sizes)]


def run(scheduler: Scheduler, requests: list[Req]) -> dict[str, list[int]]:
    for request in requests:
        scheduler._add_request_to_queue(request)
    scheduler.run_event_loop()
    return {request.rid: request.output_ids for request in requests}


def path_of(probe: Probe) -> Path:
    path = probe.path
    assert path is not None
    probe.close()
    return path


def rows_of(path: Path) -> list[Row]:
    """Return the slices' rows, each with its step."""
    found = []
    for slices in facts_of(StepSlices, path):
        columns = {
            name: np.frombuffer(getattr(slices, name), dtype=COLUMNS[name]).tolist()
            or [0] * len(slices.phases)
            for name in (
                "requests",
                "phases",
                "tokens",
                "contexts",
                "flags",
                "proposed",
                "accepted",
            )
        }
        found += [
            {"step": slices.step, **dict(zip(columns, row, strict=True))}
            for row in zip(*columns.values(), strict=True)
        ]
    return found


def kinds_of(path: Path, index: int) -> list[str]:
    return [EVENTS[event.kind] for event in of(RequestEvent, path) if event.index == index]


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_of_beams_are_those_of_the_request_that_they_search_for(
    overlap: bool, tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches)
    steps_of_beams = []

    class Beams(kind):  # type: ignore[misc, valid-type]
        def _decoding(self, reqs: list[Req]) -> Batch:
            batch = super()._decoding(reqs)
            at = next((at for at, req in enumerate(reqs) if req.rid == "r1"), None)
            if at is not None:
                lengths = batch.seq_lens_cpu
                batch.seq_lens_cpu = Tensor([*lengths, *lengths[at : at + 1] * 7])
                entry = SimpleNamespace(leader_idx=at, start=0, end=7)
                batch.beam_tail = SimpleNamespace(num_base_rows=len(reqs), entries=[entry])
                steps_of_beams.append(self.forward_ct + 1)
            return batch

    sizes = [(5, 12), (6, 4), (7, 12)]
    plain = run(Scheduler(overlap=overlap), requests_of(sizes))
    assert run(Beams(overlap=overlap), requests_of(sizes)) == plain
    path = path_of(probe)
    rows = rows_of(path)
    assert {row["step"] for row in rows} == {span.step for span in of(StepSpan, path)}
    assert {row["step"] for row in rows if row["tokens"] == 8} == set(steps_of_beams) != set()
    shared = [row for row in rows if row["step"] in steps_of_beams]
    assert {(row["requests"], row["tokens"]) for row in shared} == {(0, 1), (1, 8), (2, 1)}
    decodes = [row for row in rows if row["requests"] == 1 and row["phases"] == DECODE]
    assert [row["contexts"] for row in decodes] == list(range(6, 6 + len(decodes)))
    assert of(ProbeHealth, path)[-1].unsupported == ()


def test_a_request_is_of_the_adapter_that_it_asks_for(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches)
    requests = requests_of([(5, 2), (5, 2)])
    requests[0].lora_id = "1f"
    run(kind(), requests)
    events = of(RequestEvent, path_of(probe))
    assert [event.adapter for event in events if event.request_id] == ["sql", ""]


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=sizes, pool=st.sampled_from([60, 80, 10_000]), overlap=st.booleans())
def test_the_ring_reports_all_work_of_a_scheduler_and_changes_nothing(
    sizes: list[tuple[int, int]],
    pool: int,
    overlap: bool,
    tmp_path: Path,
    patches: Patches,
) -> None:
    for old in tmp_path.glob("*.ring"):
        old.unlink()
    kind, probe = watched(tmp_path, patches)
    plain = run(Scheduler(pool=pool, overlap=overlap), requests_of(sizes))
    assert run(kind(pool=pool, overlap=overlap), requests_of(sizes)) == plain
    path = path_of(probe)

    tokens: dict[int, int] = defaultdict(int)
    for row in rows_of(path):
        tokens[row["requests"]] += row["tokens"] * (not row["flags"] & RECOMPUTED)
    emitted: dict[int, int] = defaultdict(int)
    for record in facts_of(Emitted, path):
        indices = np.frombuffer(record.requests, dtype="<u4").tolist()
        for index, count in zip(indices, np.frombuffer(record.tokens, "<u4").tolist(), strict=True):
            emitted[index] += count
    for at, (num_prompt, num_out) in enumerate(sizes):
        assert tokens[at] == num_prompt + num_out - 1
        assert emitted[at] == num_out
        kinds = kinds_of(path, at)
        assert kinds[:2] == ["queued", "admitted"]
        assert kinds[-1] == "finished"
        assert kinds[2:-1] == ["preempted", "resumed"] * ((len(kinds) - 3) // 2)
    plans, slices, spans = facts_of(StepPlan, path), facts_of(StepSlices, path), of(StepSpan, path)
    assert [plan.step for plan in plans] == [one.step for one in slices]
    assert [span.step for span in spans] == [one.step for one in slices]
    assert [span.digest for span in spans] == [one.digest for one in slices]
    assert (plans[0].blocks_used, plans[0].blocks_cached, plans[0].blocks_total) == (10, 30, 100)


def _facts(path: Path, *, is_core: bool = True) -> dict[str, list[Any]]:
    """Return the facts of a ring, without times and without the order of records of two kinds."""
    facts: dict[str, list[Any]] = defaultdict(list)
    for kind in (StepPlan, StepSlices, StepSpan, Emitted, RequestEvent):
        for record in facts_of(kind, path):
            fields = {k: v for k, v in structs.asdict(record).items() if not k.endswith("_ns")}
            key = f"{fields.pop('index')}" if isinstance(record, RequestEvent) else ""
            facts[kind.__name__ + key].append(fields)
    assert facts["StepPlan"] or not is_core
    return dict(facts)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=sizes,
    pool=st.sampled_from([60, 80, 10_000]),
    overlap=st.booleans(),
    is_core=st.booleans(),
    leaving=st.integers(0, 6),
)
def test_what_is_recorded_behind_launches_is_what_is_recorded_at_once(
    sizes: list[tuple[int, int]],
    pool: int,
    overlap: bool,
    is_core: bool,
    leaving: int,
    tmp_path: Path,
    patches: Patches,
) -> None:
    facts, tokens = [], []
    for is_deferring in (False, True):
        for old in tmp_path.glob("*.ring"):
            old.unlink()
        kind, probe = watched(tmp_path, patches, is_core=is_core, is_deferring=is_deferring)
        scheduler, requests = kind(pool=pool, overlap=overlap), requests_of(sizes)
        for request in requests[leaving:]:
            request.to_finish = Reason("abort", message="Aborted", status_code=None)
        tokens.append(run(scheduler, requests))
        scheduler.get_next_batch_to_run(scheduler.running_batch)  # of an idle engine
        facts.append(_facts(path_of(probe), is_core=is_core))
    assert facts[1] == facts[0]
    assert tokens[1] == tokens[0]


def test_a_retraction_is_seen_and_its_work_counted_twice(tmp_path: Path, patches: Patches) -> None:
    """The property above must not hold because nothing is ever retracted."""
    kind, probe = watched(tmp_path, patches)
    run(kind(pool=60), requests_of([(20, 12)] * 3))
    path = path_of(probe)
    assert sum(kinds_of(path, at).count("resumed") for at in range(3)) > 0
    assert any(row["flags"] & RECOMPUTED for row in rows_of(path))
    assert any(plan.preempted for plan in facts_of(StepPlan, path))


def test_other_ranks_sign_what_the_core_reports(tmp_path: Path, patches: Patches) -> None:
    paths = []
    for is_core in (True, False):
        kind, probe = watched(tmp_path, patches, name=f"is-core-{is_core}", is_core=is_core)
        run(kind(pool=80), requests_of([(20, 12), (5, 3), (30, 6)]))
        paths.append(path_of(probe))
    planned = [(slices.step, slices.digest) for slices in facts_of(StepSlices, paths[0])]
    assert [(span.step, span.digest) for span in of(StepSpan, paths[1])] == planned
    assert tokens_signed(paths[1]) == tokens_of_slices(paths[0])
    for silent in (StepSlices, StepPlan, RequestEvent, Emitted):
        assert not of(silent, paths[1])


def test_health_checks_are_dummy_steps_and_no_requests(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches)
    run(kind(), [Req("HEALTH_CHECK_1", 1, 1)])
    path = path_of(probe)
    assert [span.dummy for span in of(StepSpan, path)] == [True]
    assert not of(RequestEvent, path)
    assert not facts_of(StepSlices, path)
    assert not facts_of(Emitted, path)


@pytest.mark.parametrize(
    ("mode", "spans"), [(ForwardMode.IDLE, [True]), (ForwardMode.PREBUILT, [])]
)
def test_a_batch_without_requests_is_a_dummy_and_a_prebuilt_one_no_step(
    mode: ForwardMode, spans: list[bool], tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler = kind()
    scheduler.model_worker = scheduler.tp_worker
    if mode == ForwardMode.PREBUILT:
        # SGLang does not call the model for it.
        scheduler.model_worker = _NoModel()  # type: ignore[assignment]
    scheduler.run_batch(Batch([], mode))
    path = path_of(probe)
    assert [span.dummy for span in of(StepSpan, path)] == spans
    assert len(facts_of(StepPlan, path)) == len(spans)


class _NoModel:
    def forward_batch_generation(self, batch: Batch) -> list[int]:
        return []


def test_a_request_aborted_in_the_queue_or_while_running_is_cancelled(
    tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler, requests = kind(), requests_of([(5, 50), (5, 3), (5, 3)])
    refusal = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    for request in requests:
        scheduler._add_request_to_queue(request)
    for request, reason in ((requests[1], None), (requests[2], refusal)):
        scheduler.waiting_queue.remove(request)
        scheduler.send_abort_output(Abort(reason), request)
    requests[0].to_finish = Reason("abort", message="Aborted", status_code=None)
    scheduler.run_event_loop()
    finishes = {e.index: e.reason for e in of(RequestEvent, path_of(probe)) if e.reason}
    assert finishes == {0: "client_cancel", 1: "client_cancel", 2: "shed"}


def test_verified_drafts_are_recorded_with_the_result(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler, request = kind(), Req("r", 8, 50)
    scheduler._add_request_to_queue(request)
    scheduler.run_batch(_extend(request, 0, 8))
    batch = Batch([request])
    batch.spec_algorithm = Speculation(is_on=True)
    request.output_ids.append(1)  # with the first result
    result = scheduler.run_batch(batch)
    assert len(result) == 1
    scheduler.process_batch_result = _accepting(scheduler, 3)  # type: ignore[method-assign]
    scheduler.process_batch_result(batch.copy(), ([], []))
    rows = [row for row in rows_of(path_of(probe)) if row["phases"] == VERIFY]
    assert rows == [
        {"step": 2, "requests": 0, "phases": VERIFY, "tokens": 4, "contexts": 8, "flags": 0,
         "proposed": 3, "accepted": 2}
    ]  # fmt: skip


class _Verified:
    speculative_output_stride = None
    speculative_num_draft_tokens = 4
    num_non_draft_tokens_per_req = 1


def _accepting(scheduler: Scheduler, num: int) -> Callable[[Batch, Any], None]:
    """Return the scheduler's own method with its hook, as it is for a result with drafts."""
    hook = type(scheduler).process_batch_result.__closure__[0].cell_contents  # type: ignore[attr-defined]

    def original(scheduler: Scheduler, batch: Batch, result: Any) -> None:
        batch.reqs[0].output_ids += [7] * num
        scheduler.output_streamer.stream_output(batch.reqs, False)

    return lambda batch, result: hook(original, scheduler, batch, _Verified())


def _extend(request: Req, context: int, num: int) -> Batch:
    batch = Batch([request], ForwardMode.EXTEND)
    batch.extend_lens, batch.prefix_lens = [num], [context]
    return batch


def test_an_extension_with_logprobs_computes_more_rows_of_logits(
    tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler, request = kind(), Req("r", 8, 1)
    scheduler._add_request_to_queue(request)
    batch = _extend(request, 0, 8)
    batch.return_logprob, batch.extend_logprob_start_lens = True, [3]
    scheduler.run_batch(batch)
    (slices,) = facts_of(StepSlices, path_of(probe))
    assert np.frombuffer(slices.sampled, dtype="<u2").tolist() == [5]


def test_switched_off_and_on_between_steps_it_reports_the_right_contexts_again(
    tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler, requests = kind(), requests_of([(8, 30), (5, 4)])

    def serve_until(step: int) -> None:
        while scheduler.forward_ct < step:
            scheduler.iterate()

    scheduler._add_request_to_queue(requests[0])
    serve_until(5)
    probe._life.want(is_on=False)
    serve_until(8)
    scheduler._add_request_to_queue(requests[1])  # comes and goes unseen
    serve_until(15)
    probe._life.want(is_on=True)
    scheduler.run_event_loop()
    assert [len(request.output_ids) for request in requests] == [30, 4]
    rows = rows_of(path_of(probe))
    assert [row["step"] for row in rows] == [*range(1, 6), *range(16, scheduler.forward_ct + 1)]
    contexts = [row["contexts"] for row in rows if row["requests"] == 0]
    assert contexts[5:] == list(range(contexts[5], contexts[5] + len(contexts) - 5))
    assert contexts[-1] == 8 + 30 - 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_deferring", [False, True])
def test_steps_of_an_unchanged_batch_are_stated_as_repetitions(
    overlap: bool, is_deferring: bool, tmp_path: Path, patches: Patches
) -> None:
    kind, probe = watched(tmp_path, patches, is_deferring=is_deferring)
    run(kind(overlap=overlap), requests_of([(5, 20), (6, 20)]))
    path = path_of(probe)
    assert len(of(StepSame, path)) >= 15
    assert len(of(StepSlices, path)) == len(of(StepPlan, path)) <= 5
    assert is_deferring is (len(of(Emitted, path)) <= 5)
    assert len(facts_of(StepSlices, path)) == len(facts_of(Emitted, path)) == 20


def test_tokens_that_the_engine_is_recording_are_not_recorded_by_the_probes_own_thread(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, probe = watched(tmp_path, patches, is_deferring=True)
    state, num_looks = probe.same_step, 0

    def look_meanwhile(step: int, **stated: Any) -> bool:
        nonlocal num_looks
        num_looks += 1
        housekeeping = threading.Thread(target=probe._keeper.tend)
        housekeeping.start()
        housekeeping.join()
        return state(step, **stated)

    monkeypatch.setattr(probe, "same_step", look_meanwhile)
    run(kind(), requests_of([(5, 20), (6, 20)]))
    assert num_looks >= 15
    assert (
        sum(np.frombuffer(one.tokens, "<u4").sum() for one in facts_of(Emitted, path_of(probe)))
        == 40
    )


def test_after_a_fault_no_batch_of_the_engine_is_kept(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches, is_deferring=True)
    scheduler = kind()
    batch = Batch(requests_of([(5, 20)]), ForwardMode.DECODE)
    scheduler.run_batch(batch)
    patches.fail(run, ValueError("a fault"))
    is_there = weakref.ref(batch)
    del batch, scheduler
    gc.collect()
    assert is_there() is None
    probe.close()


def test_a_rank_that_runs_idle_batches_alone_reports_their_times(
    tmp_path: Path, patches: Patches
) -> None:
    timer = EventTimer(DoneEvents())
    kind, probe = watched(tmp_path, patches, is_deferring=True, timer=timer)
    scheduler = kind()
    for _ in range(200):
        scheduler.run_batch(Batch([], ForwardMode.IDLE))
    assert len(of(StepSpan, path_of(probe))) >= 199


def test_a_launch_that_hangs_is_recorded_by_the_probes_own_thread(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, is_recorded = TpModelWorker.forward_batch_generation, defaultdict(set)

    def hanging(worker: TpModelWorker, batch: Batch) -> list[int]:
        step = batch.forward_iter
        for wait_ns in (0, 2 * OVERDUE_NS) if step > 3 else ():
            clock.now_ns += wait_ns
            probe._keeper.tend()
            is_recorded[wait_ns].add(facts_of(StepSlices, path)[-1].step == step)
        return whole(worker, batch)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", hanging)
    kind, probe = watched(tmp_path, patches, is_deferring=True)
    clock, path = probe.clock, probe.path
    assert isinstance(clock, FakeClock)
    assert path is not None
    scheduler, request = kind(), Req("r", 8, 5)
    scheduler._add_request_to_queue(request)
    scheduler.run_event_loop()  # of each kind the first is recorded before its launch
    assert is_recorded == {0: {False}, 2 * OVERDUE_NS: {True}}
    steps = list(range(1, scheduler.forward_ct + 1))
    assert [one.step for one in facts_of(StepSlices, path)] == steps
    assert [one.step for one in facts_of(StepPlan, path)] == steps
    probe.close()


_KILLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
from inferscope.adapters.patching import Patches
from tests.adapters import sglang_objects as engine, test_sglang_watch as tests

folder, where, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
owner, name = {
    "launch": (engine.TpModelWorker, "forward_batch_generation"),
    "wait": (engine.Scheduler, "process_batch_result"),
    "stream": (engine.SchedulerOutputStreamer, "stream_output"),
}[where]
original, calls = getattr(owner, name), []

def dying(*args, **kwargs):
    calls.append(name)
    if len(calls) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(owner, name, dying)
kind, probe = tests.watched(folder, Patches("sglang"), is_deferring=True)
tests.run(kind(), tests.requests_of([(5, 40), (6, 40)]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "launched", "emitted"), [("launch", 9, 7), ("wait", 11, 9), ("stream", 11, 9)]
)
def test_a_process_that_is_killed_has_recorded_what_came_before_its_last_launch(
    where: str, launched: int, emitted: int, tmp_path: Path
) -> None:
    """With overlap: within launch 10 result 8 is not recorded yet; result 10 awaits launch 11."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path, where, "10"],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    path = tmp_path / "core.ring"
    assert [plan.step for plan in facts_of(StepPlan, path)] == list(range(1, launched + 1))
    assert [slices.step for slices in facts_of(StepSlices, path)] == list(range(1, launched + 1))
    assert max(record.step for record in facts_of(Emitted, path)) == emitted
    assert [kinds_of(path, index) for index in (0, 1)] == [["queued", "admitted"]] * 2
    reader = RingReader(path)
    ended_ns = max(span.launch_end_ns for span in of(StepSpan, path))
    assert (reader.pending_ns() > ended_ns) is (where == "launch")
    reader.close()


def test_an_idle_engine_has_recorded_all_that_it_did(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches, is_deferring=True)
    scheduler, request = kind(overlap=False), Req("r", 8, 5)
    scheduler._add_request_to_queue(request)
    while request.finished_reason is None:
        scheduler.iterate()
    path = probe.path
    assert path is not None
    assert probe._spans.deferred_ns > 0
    assert len(facts_of(Emitted, path)) == 4
    scheduler.iterate()
    assert probe._spans.deferred_ns == 0
    assert len(facts_of(Emitted, path)) == 5
    assert kinds_of(path, 0)[-1] == "finished"
    probe.close()


def test_before_the_result_of_a_step_is_awaited_its_members_are_in_the_ring(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    whole = Scheduler.process_batch_result

    def awaiting(scheduler: Scheduler, batch: Batch, result: Any) -> None:
        waited.append(batch.forward_iter)
        assert batch.forward_iter in {one.step for one in facts_of(StepSlices, path)}
        assert batch.forward_iter in {one.step for one in facts_of(StepPlan, path)}
        num_tokens = sum(np.frombuffer(one.tokens, "<u4").sum() for one in facts_of(Emitted, path))
        assert num_tokens == sum(len(request.output_ids) for request in requests)
        whole(scheduler, batch, result)

    monkeypatch.setattr(Scheduler, "process_batch_result", awaiting)
    kind, probe = watched(tmp_path, patches, is_deferring=True)
    path = probe.path
    assert path is not None
    requests = requests_of([(20, 12), (5, 3), (30, 6)])
    run(kind(pool=80), requests)
    assert len(waited) > 10
    assert not patches.is_off
    probe.close()


# --- faults -------------------------------------------------------------------------------------

_WATCH_METHODS = [
    "enqueued",
    "scheduled",
    "launching",
    "launched",
    "forward_begins",
    "forward_ends",
    "result_begins",
    "result_ends",
    "streamed",
    "aborted",
]


@pytest.mark.parametrize("method", _WATCH_METHODS)
def test_a_fault_in_any_hook_ends_the_probe_and_nothing_else(
    method: str,
    tmp_path: Path,
    patches: Patches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def serve(scheduler: Scheduler) -> tuple[dict[str, list[int]], list[str]]:
        refused = [Req(f"refused-{at}", 5, 1) for at in range(4)]
        for request in refused:
            scheduler.send_abort_output(Abort(None), request)
        served = run(scheduler, requests_of([(20, 12), (5, 3), (30, 6)]))
        return served, scheduler.aborted

    plain = serve(Scheduler(pool=80))
    kind, probe = watched(tmp_path, patches)
    calls = []

    def fail(*args: object) -> None:
        calls.append(args)
        if len(calls) > 2:  # some work is under way
            raise RuntimeError("injected")

    monkeypatch.setattr(SchedulerWatch, method, fail)
    with caplog.at_level(logging.WARNING, logger="inferscope"):
        assert serve(kind(pool=80)) == plain
    assert len(calls) == 3, "a hook was called after its fault, or never"
    (line,) = caplog.messages
    assert "injected" in line
    assert not probe.on
    assert of(ProbeHealth, path_of(probe))[-1].state == FAILED


def test_an_engine_error_passes_through_and_the_next_step_is_timed(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TpModelWorker.forward_batch_generation
    fails = [True, False]

    def forward(worker: TpModelWorker, batch: Batch) -> list[int]:
        if fails.pop(0):
            raise MemoryError("the engine's own")
        return whole(worker, batch)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", forward)
    kind, probe = watched(tmp_path, patches)
    scheduler, request = kind(), Req("r", 8, 2)
    scheduler._add_request_to_queue(request)
    with pytest.raises(MemoryError, match="own"):
        scheduler.run_batch(_extend(request, 0, 8))
    scheduler.run_batch(_extend(request, 0, 8))
    assert probe.on
    assert [slices.step for slices in facts_of(StepSlices, path_of(probe))] == [2]


@pytest.mark.parametrize(
    "lacking", ["how requests end outside of a batch", "when scheduling began"]
)
def test_a_feature_that_a_version_lacks_costs_that_feature_alone(
    tmp_path: Path, patches: Patches, lacking: str
) -> None:
    kind, probe = watched(tmp_path, patches, lacking=lacking)
    outputs = run(kind(), requests_of([(20, 12), (5, 3)]))
    assert [len(tokens) for tokens in outputs.values()] == [12, 3]
    path = path_of(probe)
    tokens: dict[int, int] = defaultdict(int)
    for row in rows_of(path):
        tokens[row["requests"]] += row["tokens"]
    assert tokens == {0: 31, 1: 7}
    assert [kinds_of(path, index)[-1] for index in (0, 1)] == ["finished", "finished"]


@pytest.mark.parametrize("end_left", ["client_cancel", "error"])
def test_a_request_that_ends_where_no_hook_is_leaves_nothing_behind(
    tmp_path: Path, patches: Patches, end_left: str
) -> None:
    kind, probe = watched(
        tmp_path, patches, lacking="how requests end outside of a batch", end_left=end_left
    )
    scheduler = kind()
    scheduler._add_request_to_queue(Req("left", 5, 1))
    scheduler.waiting_queue.clear()  # as a client's abort takes it from the queue
    run(scheduler, [Req("next", 5, 2)])
    ends = {e.index: e.reason for e in of(RequestEvent, path_of(probe)) if e.reason}
    assert ends == {0: end_left, 1: "length"}
    assert probe._log.requests.num_live == 0


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(st.sampled_from(["add", "drop", "retract", "step"]), max_size=80))
def test_what_is_kept_of_requests_goes_with_them_though_they_never_end(
    events: list[str], tmp_path: Path, patches: Patches
) -> None:
    for old in tmp_path.glob("*.ring"):
        old.unlink()
    kind, probe = watched(tmp_path, patches, lacking="how requests end outside of a batch")
    scheduler, live, num_added = kind(), [], 0
    for event in events:
        if event == "add":
            live.append(Req(f"r{num_added}", 5, 1000))
            num_added += 1
            scheduler._add_request_to_queue(live[-1])
        elif event == "drop" and live:
            gone = live.pop()
            for queue in (scheduler.waiting_queue, scheduler.running_batch.reqs):
                if gone in queue:
                    queue.remove(gone)
            del queue
            if scheduler.chunked_req is gone:
                scheduler.chunked_req = None
            scheduler._results.clear()
            del gone
        elif event == "retract" and live and live[-1] not in scheduler.waiting_queue:
            live[-1].is_retracted = True
            scheduler._add_request_to_queue(live[-1], is_retracted=True)
        elif event == "step":
            scheduler.get_next_batch_to_run(scheduler.running_batch)
    live.clear()
    scheduler.waiting_queue.clear()
    scheduler.running_batch = Batch([])
    scheduler.chunked_req = None
    scheduler.get_next_batch_to_run(scheduler.running_batch)
    assert probe.on
    assert probe._log.requests.num_live == 0
    probe.close()


@pytest.mark.parametrize("is_core", [True, False])
@pytest.mark.parametrize("is_seen", [True, False])
def test_an_idle_scheduler_keeps_no_request_alive(
    tmp_path: Path, patches: Patches, is_core: bool, is_seen: bool
) -> None:
    kind, _ = watched(tmp_path, patches, is_core=is_core)
    scheduler = kind()
    requests = requests_of([(5, 6), (5, 6)])
    for request in requests:
        scheduler._add_request_to_queue(request)
    alive = [weakref.ref(request) for request in requests]
    del request, requests
    for _ in range(4):
        scheduler.iterate()
    if is_seen:
        scheduler.run_event_loop()
    scheduler.running_batch = Batch([])
    scheduler._results.clear()
    for _ in range(2):
        scheduler.iterate()
    gc.collect()
    assert [request() for request in alive] == [None, None]


RESULTS = (
    SimpleNamespace(
        speculative_output_stride=2, speculative_num_draft_tokens=2, num_non_draft_tokens_per_req=1
    ),
    SimpleNamespace(speculative_num_draft_tokens=2),  # up to 0.5.19
)


@pytest.mark.parametrize("result", RESULTS)
def test_the_result_of_a_verified_batch_leaves_no_request_behind(
    tmp_path: Path, patches: Patches, result: Any
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1000))
    watch, scheduler, request = SchedulerWatch(probe, is_core=True), Scheduler(), Req("r", 8, 100)
    watch.enqueued(scheduler, request)
    batch = Batch([request])
    batch.spec_algorithm = Speculation(is_on=True)
    batch.seq_lens_cpu = Tensor([8])
    watch.launching(scheduler, batch)
    watch.launched()
    batch.forward_iter = 1
    watch.result_begins(scheduler, batch)
    watch.result_ends(scheduler, batch, result)
    assert len(facts_of(StepSlices, path_of(probe))) == 1
    alive = weakref.ref(request)
    del request, batch
    gc.collect()
    assert alive() is None


def test_after_a_fault_amid_a_verified_result_no_request_is_kept(
    tmp_path: Path, patches: Patches
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1000))
    watch, scheduler, request = SchedulerWatch(probe, is_core=True), Scheduler(), Req("r", 8, 100)
    patches.forgetting.append(watch.forget)
    watch.enqueued(scheduler, request)
    batch = Batch([request])
    batch.spec_algorithm = Speculation(is_on=True)
    batch.seq_lens_cpu = Tensor([8])
    watch.launching(scheduler, batch)
    watch.launched()
    batch.forward_iter = 1
    watch.result_begins(scheduler, batch)
    alive = weakref.ref(request)
    del request, batch
    gc.collect()
    assert alive() is not None
    patches.fail(run, ValueError("a fault"))
    gc.collect()
    assert alive() is None
    probe.close()


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_a_batch_is_recorded_as_it_was_launched_whatever_its_worker_makes_of_it(
    tmp_path: Path, patches: Patches, mode: ForwardMode
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1000))
    watch = SchedulerWatch(probe, is_core=True, is_deferring=True, clock=probe.clock)
    scheduler, request = Scheduler(), Req("r", 8, 100)
    watch.enqueued(scheduler, request)
    for step in (1, 2):
        batch = Batch([request])
        batch.spec_algorithm, batch.seq_lens_cpu = Speculation(is_on=True), Tensor([8])
        watch.launching(scheduler, batch)
        watch.forward_begins()
        if step > 1:  # of the first all is recorded at once
            batch.forward_mode = mode
            watch.flush_overdue(probe.clock.monotonic_ns() + 2 * OVERDUE_NS)
            batch.forward_mode = ForwardMode.DECODE
        watch.forward_ends()
        watch.launched()
        scheduler.forward_ct = batch.forward_iter = step
        watch.result_begins(scheduler, batch)
        request.output_ids += [7, 7]
        watch.result_ends(scheduler, batch, RESULTS[0])
    watch.flush()
    rows = rows_of(path_of(probe))
    assert [(row["step"], row["phases"], row["tokens"]) for row in rows] == [
        (1, VERIFY, 2), (2, VERIFY, 2)
    ]  # fmt: skip


def test_a_token_that_is_taken_back_before_the_next_launch_has_left(
    tmp_path: Path, patches: Patches
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1000))
    more: dict[str, Any] = {"is_deferring": True, "counts_at_once": True}
    watch = SchedulerWatch(probe, is_core=True, clock=probe.clock, **more)
    scheduler, request = Scheduler(), Req("r", 8, 100)
    watch.enqueued(scheduler, request)
    batch = Batch([request])
    batch.seq_lens_cpu = Tensor([9])
    watch.launching(scheduler, batch)
    watch.launched()
    batch.forward_iter = 1
    watch.result_begins(scheduler, batch)
    request.output_ids.append(7)
    watch.streamed(probe.clock.monotonic_ns(), scheduler, [request])
    watch.result_ends(scheduler, batch, None)
    taken_ns = probe.clock.monotonic_ns()
    request.output_ids.pop()  # a pause of an engine that decodes for another
    watch.flush()
    (emitted,) = facts_of(Emitted, path_of(probe))
    assert (emitted.step, emitted.left_ns < taken_ns) == (1, True)


def test_ranks_agree_on_steps_after_the_core_was_off_while_a_request_came(
    tmp_path: Path, patches: Patches
) -> None:
    sides = []
    for name in ("core", "worker"):
        kind, probe = watched(tmp_path, patches, name=name, is_core=name == "core")
        sides.append((kind(), probe))
    core = sides[0][1]
    assert core.path is not None
    for number, state in enumerate((SWITCHED_ON, SWITCHED_OFF, SWITCHED_ON, SWITCHED_ON)):
        switch(core.path, to=state)
        assert isinstance(core.clock, FakeClock)
        core.clock.now_ns += 10**9
        core._keeper.tend()
        for scheduler, _ in sides:
            scheduler._add_request_to_queue(Req(f"r{number}", 8, 100))
            for _ in range(3):
                scheduler.iterate()
    signed = {span.step: span.digest for span in of(StepSpan, path_of(sides[1][1]))}
    slices = facts_of(StepSlices, path_of(core))
    assert 0xFFFFFFFF in {index for row in slices for index in memoryview(row.requests).cast("I")}
    assert {row.step for row in slices} >= {1, 8, 11}
    assert [signed[row.step] for row in slices] == [row.digest for row in slices]


def test_arguments_may_be_passed_by_their_names(tmp_path: Path, patches: Patches) -> None:
    kind, probe = watched(tmp_path, patches)
    scheduler, request = kind(), Req("r", 8, 1)
    scheduler._add_request_to_queue(req=request)
    batch = _extend(request, 0, 8)
    result = scheduler.run_batch(batch=batch)
    scheduler.process_batch_result(batch=batch, result=(result, []))
    scheduler.send_abort_output(abort_req=Abort(None), req=request)
    path = path_of(probe)
    assert kinds_of(path, 0) == ["queued", "admitted", "finished"]
    assert not patches.is_off


def test_a_changed_signature_costs_the_probe_and_not_the_call(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Req] = []

    def add(scheduler: Scheduler, *, item: Req) -> None:
        added.append(item)

    monkeypatch.setattr(Scheduler, "_add_request_to_queue", add)
    kind, probe = watched(tmp_path, patches)
    request = Req("r", 8, 1)
    kind()._add_request_to_queue(item=request)  # type: ignore[call-arg]
    assert added == [request]
    assert patches.is_off
    assert not probe.on


def test_a_feature_without_a_place_is_known_to_be_lacking(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[str] = []
    registry = SimpleNamespace(register=lambda target, hook, kind: placed.append(target))
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    monkeypatch.setattr(sglang_hooks, "_exists", lambda target: "send_abort" not in target)
    hooks = SchedulerHooks()
    sglang_hooks._place("the scheduler", hooks, "")
    assert hooks.lacking == {"how requests end outside of a batch"}
    assert hooks.is_whole
    assert len(placed) == len(hooks.by_target()) + 13
