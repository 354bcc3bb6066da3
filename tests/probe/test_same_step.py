"""Steps that repeat the last one: stated in a few bytes, or refused and stated in full."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.probe import Probe
from inferscope.probe.repeats import MOST_SAME
from inferscope.records import (
    DECODE,
    PREFILL,
    Emitted,
    ProbeHealth,
    StepPlan,
    StepSame,
    StepSlices,
    StepSpan,
    encode,
)
from inferscope.ring.control import SWITCHED_OFF, SWITCHED_ON, switch
from inferscope.ring.layout import frame_bytes
from inferscope.ring.reader import Frame, RingReader
from tests.probe.fakes import FakeClock, everything, facts_of, make_probe, of, records
from tests.probe.test_reentry import no_collector, signal_at_instruction, signals

MS = 1_000_000
__all__ = ["no_collector"]  # the fixture is found by its name


def opened(folder: Path, **parts: object) -> tuple[Probe, FakeClock, Path]:
    clock = FakeClock(10**12, step_ns=100)
    probe = make_probe(folder, clock, **parts)  # type: ignore[arg-type]
    path = probe.path
    assert path is not None
    return probe, clock, path


def full(probe: Probe, step: int, requests: Sequence[int], *, phase: int = DECODE) -> None:
    """State a step in full, with one row for each request."""
    num = len(requests)
    probe.plan(step, start_ns=1, end_ns=2, waiting=0, running=num)
    ones = (1,) * num
    probe.slices(
        step,
        requests=requests,
        phases=(phase,) * num,
        tokens=ones,
        contexts=tuple(range(40, 40 + num)),
        flags=(0,) * num,
        sampled=ones,
    )


def same(probe: Probe, step: int, **more: int) -> bool:
    return probe.same_step(step, start_ns=1, end_ns=2, waiting=0, running=2, **more)


def test_a_step_that_repeats_the_last_one_is_one_record(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    full(probe, 6, [0, 1])  # a report follows
    assert probe.same_step(
        7,
        start_ns=1000,
        end_ns=1300,
        waiting=3,
        running=2,
        blocks_used=10,
        blocks_cached=11,
        blocks_total=12,
        binding="blocks",
        emitted_step=6,
        emitted_ns=900,
    )
    assert same(probe, 8)
    first, second = of(StepSame, path)
    assert first == StepSame(first.t_ns, 7, 2, 1000, 300, 3, 2, 10, 11, 12, 2, 1, 100)
    assert second == StepSame(second.t_ns, 8, 3, 1, 1, 0, 2, 0, 0, 0)
    assert len(of(StepPlan, path)) == len(of(StepSlices, path)) == 1
    assert not of(Emitted, path)
    probe.close()


@pytest.mark.parametrize("batch", [1, 16, 64, 1024])
def test_with_its_span_it_takes_192_bytes_at_any_batch(tmp_path: Path, batch: int) -> None:
    probe, clock, path = opened(tmp_path)
    first = 1 << 31
    full(probe, first, list(range(batch)))
    probe.start(first + 1)
    begun_ns = clock.now_ns
    assert probe.same_step(
        first + 1,
        start_ns=begun_ns - 900_000_000,
        end_ns=begun_ns,
        waiting=60_000,
        running=batch,
        blocks_used=1 << 31,
        blocks_cached=1 << 31,
        blocks_total=1 << 31,
        binding="budget",
        emitted_step=first,
        emitted_ns=begun_ns - 2_000_000_000,
    )
    probe.stop(first + 1, padded_tokens=4096)
    probe.close()
    (step,), span = of(StepSame, path), of(StepSpan, path)[-1]
    on_device = StepSpan(
        *(span.t_ns, span.step, span.digest, span.launch_start_ns, span.launch_end_ns),
        *(span.ready_ns, 1 << 62, 1 << 62, (), "piecewise", 4096, False, False, False, None, 1024),
    )
    assert span.digest == of(StepSlices, path)[-1].digest
    num_bytes = [frame_bytes(len(encode(record))) for record in (step, on_device)]
    assert sum(num_bytes) <= 192, num_bytes


def test_without_a_full_step_before_it_must_be_stated_in_full(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    assert not same(probe, 0)
    assert not of(StepSame, path)


def _prefill(probe: Probe, clock: FakeClock, path: Path) -> None:
    full(probe, 7, [0, 1], phase=PREFILL)


def _no_slices(probe: Probe, clock: FakeClock, path: Path) -> None:
    probe.plan(7, start_ns=1, end_ns=2, waiting=0, running=2)


def _keyframe(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    clock.now_ns += 11_000 * MS
    probe.emitted([0], [1])


def _keyframe_with_the_span(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    probe.start(7)
    clock.now_ns += 11_000 * MS
    probe.stop(7)


def _finish(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    probe.finished(probe.live_requests[0], "stop")


def _preemption(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    probe.preempted(probe.live_requests[0])


def _admission(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    probe.admitted(probe.queued("c", prompt_tokens=3))


def _refused_record(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    probe.emitted(range(100_000), [1] * 100_000)
    assert probe._log._num_refused == 1


def _failed_write(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    ring = probe._log.ring
    assert ring is not None
    kept, closed = os.dup(ring._file), os.open(path, os.O_RDONLY)
    os.dup2(closed, ring._file)
    assert not same(probe, 8)
    os.dup2(kept, ring._file)
    os.close(kept)
    os.close(closed)
    assert ring.num_failed == 1


def _off_and_on(probe: Probe, clock: FakeClock, path: Path) -> None:
    assert same(probe, 7)
    switch(path, to=SWITCHED_OFF)
    probe._keeper.tend()
    assert not same(probe, 8)
    probe.plan(8, start_ns=1, end_ns=2, waiting=0, running=2)
    assert not probe.on
    assert not same(probe, 9)
    switch(path, to=SWITCHED_ON)
    probe._keeper.tend()
    assert not same(probe, 7)
    probe.plan(7, start_ns=1, end_ns=2, waiting=0, running=2)
    assert probe.on


@pytest.mark.parametrize(
    "happens",
    [
        _prefill,
        _no_slices,
        _keyframe,
        _keyframe_with_the_span,
        _finish,
        _preemption,
        _admission,
        _refused_record,
        _failed_write,
        _off_and_on,
    ],
)
def test_after_a_change_the_next_step_is_stated_in_full(
    tmp_path: Path, happens: Callable[[Probe, FakeClock, Path], None]
) -> None:
    probe, clock, path = opened(tmp_path, has_switch=True)
    rows = [probe.queued("a", prompt_tokens=3), probe.queued("b", prompt_tokens=3)]
    full(probe, 6, rows)
    happens(probe, clock, path)
    num = len(of(StepSame, path))
    assert not same(probe, 8)
    assert len(of(StepSame, path)) == num
    full(probe, 8, rows)
    assert same(probe, 9)
    probe.close()


def test_a_step_that_does_not_follow_the_last_one_is_stated_in_full(tmp_path: Path) -> None:
    probe, _, _ = opened(tmp_path)
    full(probe, 6, [0, 1])
    assert not same(probe, 6)
    assert not same(probe, 8)
    assert same(probe, 7)
    assert not same(probe, 9)
    assert same(probe, 8)


def test_slices_that_come_late_are_repeated_by_no_step(tmp_path: Path) -> None:
    probe, _, _ = opened(tmp_path)
    full(probe, 6, [0, 1])
    full(probe, 8, [0, 1])
    full(probe, 7, [0, 1, 2])  # its outputs were awaited
    assert not same(probe, 9)
    full(probe, 9, [0, 1])
    assert same(probe, 10)


def test_a_full_set_is_stated_again_every_so_many_steps(tmp_path: Path) -> None:
    probe, _, _ = opened(tmp_path)
    full(probe, 0, [0, 1])
    assert all(same(probe, step) for step in range(1, MOST_SAME + 1))
    assert not same(probe, MOST_SAME + 1)
    full(probe, MOST_SAME + 1, [0, 1])
    assert same(probe, MOST_SAME + 2)


def test_tokens_of_steps_with_other_rows_are_stated_by_themselves(tmp_path: Path) -> None:
    probe, clock, path = opened(tmp_path)
    full(probe, 4, [0, 1, 2])
    full(probe, 5, [0, 1])
    assert not same(probe, 6, emitted_step=4)
    assert same(probe, 6, emitted_step=5)
    assert not same(probe, 7, emitted_step=7)
    _keyframe(probe, clock, path)  # states step 7
    full(probe, 8, [0, 1])  # the same rows, stated again
    assert same(probe, 9, emitted_step=6)
    assert of(StepSame, path)[-1].emitted_back == 3
    full(probe, 10, [1, 0])
    assert not same(probe, 11, emitted_step=9)


def test_arguments_that_no_record_holds_are_left_to_the_full_statement(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    full(probe, 6, [0, 1])
    for wrong in ({"start_ns": -1}, {"end_ns": None}, {"binding": "tea"}, {"waiting": "three"}):
        arguments = {"start_ns": 1, "end_ns": 2, "waiting": 0, "running": 2} | wrong
        assert probe.same_step(7, **arguments) is False  # type: ignore[arg-type]
    assert same(probe, 7)
    probe.close()
    assert of(ProbeHealth, path)[-1].errors == 0


def test_within_another_call_nothing_is_noted_and_the_caller_knows(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    full(probe, 6, [0, 1])
    with probe._log.lock:
        assert not same(probe, 7)
        full(probe, 7, [0, 1])
    assert not same(probe, 8)
    full(probe, 8, [0, 1])
    assert same(probe, 9)
    probe.close()
    assert [slices.step for slices in of(StepSlices, path)] == [6, 7, 8]
    assert of(ProbeHealth, path)[-1].lost_calls == 0


@pytest.mark.parametrize("is_full", [False, True])
def test_an_exception_within_the_write_makes_the_next_step_a_full_one(
    tmp_path: Path, is_full: bool
) -> None:
    probe, _, _ = opened(tmp_path)
    full(probe, 6, [0, 1])
    log = probe._log
    write = log.write

    def write_and_raise(record: object) -> bool:
        write(record)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    log.write = write_and_raise  # type: ignore[method-assign, assignment]
    rows = {"requests": [0], "phases": [DECODE], "tokens": [1], "contexts": [3], "sampled": [1]}
    with pytest.raises(KeyboardInterrupt):
        probe.slices(7, **rows) if is_full else same(probe, 7)  # type: ignore[func-returns-value]
    log.write = write  # type: ignore[method-assign]
    assert not same(probe, 8)
    full(probe, 8, [0, 1])
    assert same(probe, 9)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_only_plain_decodes_are_repeated(data: st.DataObject) -> None:
    num = data.draw(st.integers(0, 3))
    few = st.sampled_from([0, 1, 1, 1, 2])

    def cells() -> st.SearchStrategy[bytes]:
        return st.lists(few, min_size=num, max_size=num).map(bytes)

    u16, u32 = (
        (lambda cells: b"".join(bytes((cell, 0)) for cell in cells)),
        (lambda cells: b"".join(bytes((cell, 0, 0, 0)) for cell in cells)),
    )
    phases, tokens, sampled = data.draw(cells()), data.draw(cells()), data.draw(cells())
    flags = data.draw(st.just(b"") | cells())
    proposed = data.draw(st.just(b"") | cells())
    slices = StepSlices(
        *(1, 2, 3, bytes(4 * num), phases, u32(tokens), bytes(4 * num), flags),
        *(u16(sampled), u16(proposed), b""),
    )
    is_plain = num > 0 and not any(flags) and not proposed
    is_plain &= all(cell == 1 for cell in (*phases, *tokens, *sampled))
    assert slices.is_plain_decode is is_plain


def test_slices_may_be_stated_before_between_and_after_the_span(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    for step, when in enumerate(("before", "between", "after")):
        if when == "before":
            full(probe, step, [0, step])
        probe.start(step)
        if when == "between":
            full(probe, step, [0, step])
        probe.stop(step)
        if when == "after":
            full(probe, step, [0, step])
    probe.close()
    by_step = {slices.step: slices.digest for slices in of(StepSlices, path)}
    assert {span.step: span.digest for span in of(StepSpan, path)} == by_step
    assert len(by_step) == 3
    assert not probe._spans._signed


def test_frames_back_points_at_the_slices(tmp_path: Path) -> None:
    probe, _, path = opened(tmp_path)
    full(probe, 0, [0, 1])
    for step in range(1, 40):
        probe.queued(f"r{step}", prompt_tokens=1)
        if not same(probe, step):
            full(probe, step, [0, 1])
        probe.start(step)
        probe.stop(step)
    reader = RingReader(path)
    frames = [frame for frame in everything(reader) if isinstance(frame, Frame)]
    reader.close()
    codes = {frame.sequence: frame.code for frame in frames}
    found = records(path)
    bases = {
        codes[frame.sequence - record.frames_back]
        for frame, record in zip(frames, found, strict=True)
        if isinstance(record, StepSame)
    }
    assert bases == {StepSlices.CODE}


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("function", ["_write_same_step", "_write_step_slices"])
def test_an_exception_of_a_handler_within_any_instruction_leaves_no_wrong_members(
    tmp_path: Path, function: str
) -> None:
    def state(step: int) -> None:
        contexts = (40 + step, 80 + step)
        if not (step % 2 and probe.same_step(step, start_ns=1, end_ns=2, waiting=0, running=2)):
            rows = {"requests": (0, 1), "phases": (1, 1), "tokens": (1, 1), "sampled": (1, 1)}
            probe.slices(step, contexts=contexts, **rows)

    def handler(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise TimeoutError("of the host")

    number, is_inside = 1, True
    while is_inside:
        probe, _, path = opened(tmp_path, capacity=1 << 16)
        state(0)
        with (
            signals(handler),
            signal_at_instruction(number, function) as sent,
            suppress(TimeoutError),
        ):
            state(1 if function == "_write_same_step" else 2)
        is_inside = bool(sent)
        for step in (3, 4, 5):
            state(step)
        found = facts_of(StepSlices, path)
        assert {3, 4, 5} <= {slices.step for slices in found}
        for slices in found:
            contexts = memoryview(slices.contexts).cast("I").tolist()
            assert contexts == [40 + slices.step, 80 + slices.step]
        probe.close()
        path.unlink()
        number += 3  # each instruction of the calls within is met by one of three
    assert number > 100


@pytest.mark.parametrize("cut", ["emitted", "slices", "same_step"])
def test_steps_behind_an_interrupted_write_have_their_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    probe, _, path = opened(tmp_path)
    full(probe, 6, [0, 1])
    ring = probe._log.ring
    assert ring is not None
    write = ring._pwrite

    def interrupted(*arguments: object) -> int:
        write(*arguments)
        raise KeyboardInterrupt  # of a signal handler

    monkeypatch.setattr(ring, "_pwrite", interrupted)
    calls: dict[str, Callable[[], object]] = {
        "emitted": lambda: probe.emitted([0], [1], step=6),
        "slices": lambda: full(probe, 7, [0, 1]),
        "same_step": lambda: same(probe, 7),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[cut]()
    monkeypatch.setattr(ring, "_pwrite", write)
    for step in range(7, 12):
        if not same(probe, step):
            full(probe, step, [0, 1])
    probe.close()
    assert {slices.step for slices in facts_of(StepSlices, path)} >= set(range(6, 12))
