from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from inferscope.engine import BadRequest, Engine, Output, QueueFull, Sampling
from inferscope.engine.load import describe
from inferscope.errors import InferScopeError
from inferscope.probe import Probe
from inferscope.readers.source import RingSource
from inferscope.records import DECODE, RECOMPUTED
from tests.engine.checkpoints import prompts

Build = Callable[..., Engine]


class Spy(Probe):
    """Probe that keeps every call in order, with the number of its step or request."""

    on = True
    path = None
    hidden = contextlib.nullcontext()  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def queued(self, request_id: str, **fields: Any) -> Any:
        index = sum(name == "queued" for name, _, _ in self.calls)
        self._note("queued", index, {"request_id": request_id, **fields})
        return index

    def admitted(self, index: int, **fields: Any) -> None:
        self._note("admitted", index, fields)

    def preempted(self, index: int, **fields: Any) -> None:
        self._note("preempted", index, fields)

    def resumed(self, index: int, **fields: Any) -> None:
        self._note("resumed", index, fields)

    def routed(self, step: int, counts: Any, **fields: Any) -> None:
        """Leave out the routing, whose records have tests of their own."""

    def finished(self, index: int, reason: str, **fields: Any) -> None:
        self._note("finished", index, {"reason": reason, **fields})

    def plan(self, step: int, **fields: Any) -> None:
        self._note("plan", step, fields)

    def start(self, step: int, **fields: Any) -> None:
        self._note("start", step, fields)

    def stop(self, step: int, **fields: Any) -> None:
        self._note("stop", step, fields)

    def slices(self, step: int, **fields: Any) -> None:
        self._note("slices", step, fields)

    def emitted(self, requests: Any, tokens: Any, *, step: int = -1, **fields: Any) -> None:
        self._note("emitted", step, {"requests": requests, "tokens": tokens, **fields})

    def marks(self) -> None:
        """Return no notes: steps on a device have tests of their own."""

    def defer(self, since_ns: int) -> None:
        """Do nothing: no test reads the deferred time."""

    def look_after(self, write_overdue: Callable[[int], object]) -> None:
        """Do nothing: the loop never hangs in these tests."""

    def of(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        return [(number, fields) for call, number, fields in self.calls if call == name]

    def finishes(self) -> list[tuple[int, str]]:
        return [(index, fields["reason"]) for index, fields in self.of("finished")]

    def _note(self, name: str, number: int, fields: dict[str, Any]) -> None:
        self.calls.append((name, number, fields))


@contextmanager
def running(engine: Engine, deliver: Callable[[list[Output]], None]) -> Iterator[None]:
    engine.start(deliver)
    try:
        yield
    finally:
        engine.close()


def _without_times(spy: Spy) -> list[tuple[str, int, dict[str, Any]]]:
    """Return all calls, sorted by name, without times."""
    calls = [
        (name, number, {key: each for key, each in fields.items() if not key.endswith("_ns")})
        for name, number, fields in spy.calls
    ]
    return sorted(calls, key=lambda call: call[0])


@pytest.mark.parametrize("is_tight", [False, True])
def test_deferred_records_equal_immediate_records(tiny_engine: Build, is_tight: bool) -> None:
    pool = {"num_blocks": 50, "block_tokens": 4, "token_budget": 23} if is_tight else {}
    spies = []
    for is_asynchronous in (False, True):
        engine = tiny_engine(**pool)
        engine._runner.is_asynchronous = is_asynchronous
        engine.probe = spy = Spy()
        for prompt in prompts(12, vocab=512):
            engine.submit(prompt, Sampling(max_tokens=20))
        engine.step()
        engine.cancel("request-3")
        drain(engine)
        spies.append(spy)
        calls = [(name, step) for name, step, _ in spy.calls]
        for step, _ in spy.of("plan"):
            is_behind = calls.index(("plan", step)) > calls.index(("stop", step))
            assert is_behind is is_asynchronous
            assert calls.index(("slices", step)) > calls.index(("plan", step))
            if (
                "start",
                step + 1,
            ) in calls:  # a step's slices are recorded before its end is awaited
                assert calls.index(("slices", step)) < calls.index(("start", step + 1))
    assert _without_times(spies[1]) == _without_times(spies[0])
    for spy in spies:
        for name, number, fields in spy.calls:
            if name == "finished":
                emitted = [e["at_ns"] for _, e in spy.of("emitted") if number in e["requests"]]
                assert fields["at_ns"] >= max(emitted, default=0)


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("is_tight", [False, True])
def test_records_account_for_every_token(tiny_engine: Build, is_tight: bool) -> None:
    pool = {"num_blocks": 50, "block_tokens": 4, "token_budget": 23} if is_tight else {}
    engine = tiny_engine(**pool)
    engine.probe = spy = Spy()
    for prompt in prompts(12, vocab=512):
        engine.submit(prompt, Sampling(max_tokens=20))
    requests = {output.request.index: output.request for output in drain(engine)}

    computed = dict.fromkeys(requests, 0)
    recomputed = dict.fromkeys(requests, 0)
    sampled = dict.fromkeys(requests, 0)
    for _, fields in spy.of("slices"):
        columns = (fields["requests"], fields["tokens"], fields["flags"], fields["sampled"])
        for index, num_tokens, flags, rows in zip(*columns, strict=True):
            computed[index] += num_tokens
            recomputed[index] += num_tokens if flags & RECOMPUTED else 0
            sampled[index] += rows
    emitted = dict.fromkeys(requests, 0)
    for _, fields in spy.of("emitted"):
        for index, num in zip(fields["requests"], fields["tokens"], strict=True):
            emitted[index] += num
    for index, request in requests.items():
        assert request.num_output == 20 == sampled[index] == emitted[index]
        assert request.recomputed_tokens == recomputed[index]
        owed = request.num_prompt + request.num_output - 1
        assert computed[index] == owed - request.cached_tokens + recomputed[index]
    assert sorted(spy.finishes()) == [(index, "length") for index in sorted(requests)]
    assert any(recomputed.values()) == is_tight
    assert bool(spy.of("preempted")) == is_tight
    assert len(spy.of("preempted")) == len(spy.of("resumed"))
    assert engine.pool.num_used == 0


def test_step_records_are_in_the_order_a_probe_expects(tiny_engine: Build) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    assert [(name, number) for name, number, _ in spy.calls] == [
        ("queued", 0),
        ("admitted", 0),
        ("plan", 0),
        ("start", 0),
        ("stop", 0),
        ("slices", 0),
        ("emitted", 0),
        ("plan", 1),
        ("start", 1),
        ("stop", 1),
        ("slices", 1),
        ("emitted", 1),
        ("finished", 0),
    ]
    assert spy.of("slices")[1][1]["phases"] == (DECODE,)
    assert [fields["cold"] for _, fields in spy.of("start")] == [True, True]


class Unfetched:
    """Tokens of a step whose reading is recorded, as if it waited for a device."""

    def __init__(self, tokens: Any, spy: Spy) -> None:
        self._tokens = tokens
        self._spy = spy

    def tolist(self) -> Any:
        self._spy._note("fetch", 0, {})
        return self._tokens.tolist()


def test_step_is_stopped_before_the_host_waits_for_its_tokens(tiny_engine: Build) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    execute = engine._runner.execute  # type: ignore[attr-defined]
    engine._runner.execute = lambda batch: Unfetched(execute(batch), spy)  # type: ignore[attr-defined]
    engine.generate([[1, 2, 3]], Sampling(max_tokens=1))
    names = [name for name, _, _ in spy.calls]
    assert names[names.index("start") :] == [
        "start", "stop", "slices", "fetch", "emitted", "finished"
    ]  # fmt: skip


def test_step_of_a_known_size_is_not_cold(tiny_engine: Build) -> None:
    engine = tiny_engine(prefix_cache=False)
    engine.probe = spy = Spy()
    for _ in range(2):
        engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    assert [fields["cold"] for _, fields in spy.of("start")] == [True, True, False, False]


def test_stop_token_ends_the_output(tiny_engine: Build) -> None:
    engine = tiny_engine()
    (output,) = engine.generate([[1, 2, 3]], Sampling(max_tokens=4))
    engine.submit([1, 2, 3], Sampling(max_tokens=4, stop_token_ids=(output[0],)))
    (last,) = drain(engine)
    assert (last.tokens, last.finish) == (output[:1], "stop")


def test_output_ends_where_the_model_does(tiny_engine: Build) -> None:
    engine = tiny_engine(max_model_tokens=10)
    (output,) = engine.generate([[1] * 7], Sampling(max_tokens=50))
    assert len(output) == 3


def test_sampled_output_depends_on_its_seed_alone(tiny_engine: Build) -> None:
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=5)
    (alone,) = tiny_engine().generate([[1, 2, 3]], sampling)
    engine = tiny_engine(token_budget=7)
    beside = engine.generate([[9] * 30, [1, 2, 3], [4, 5]], sampling)
    assert beside[1] == alone
    assert beside[2] != alone


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 2048, "2048 tokens"), ([512], "0 to 511"), ([-1], "0 to 511")],
)
def test_prompt_that_cannot_be_served_is_rejected(
    tiny_engine: Build, prompt: list[int], message: str
) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    with pytest.raises(BadRequest, match=message):
        engine.submit(prompt)
    assert drain(engine) == []
    assert spy.finishes() == [(0, "rejected")]


def test_prompt_larger_than_the_pool_is_rejected(tiny_engine: Build) -> None:
    engine = tiny_engine(num_blocks=2)
    with pytest.raises(BadRequest, match="num_blocks"):
        engine.submit([1] * 32)
    assert len(engine.generate([[1] * 31], Sampling(max_tokens=9))[0]) == 1


def test_full_queue_rejects(tiny_engine: Build) -> None:
    engine = tiny_engine(max_waiting=2)
    engine.probe = spy = Spy()
    for _ in range(2):
        engine.submit([1])
    with pytest.raises(QueueFull):
        engine.submit([1])
    drain(engine)
    assert sorted(spy.finishes()) == [(0, "length"), (1, "length"), (2, "shed")]
    finished = engine.stats().finished
    assert (finished["shed"], finished["rejected"]) == (1, 0)
    engine.submit([1])


def test_request_id_in_use_is_rejected_until_it_is_free(tiny_engine: Build) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    engine.submit([1], request_id="mine")
    with pytest.raises(BadRequest, match="mine"):
        engine.submit([1], request_id="mine")
    drain(engine)
    assert spy.finishes() == [(0, "length")]
    assert engine.submit([1], request_id="mine") == "mine"


def test_cancelled_request_ends_once_wherever_it_is(tiny_engine: Build) -> None:
    engine = tiny_engine(max_running=1)
    engine.probe = spy = Spy()
    active, queued = (engine.submit([1, 2], Sampling(max_tokens=50)) for _ in range(2))
    engine.step()
    for request_id in (active, queued, active, "unknown"):
        engine.cancel(request_id)
    outputs = drain(engine)
    assert [output.finish for output in outputs] == ["client_cancel", "client_cancel"]
    assert spy.finishes() == [(0, "client_cancel"), (1, "client_cancel")]
    assert engine.pool.num_used == 0


def test_loop_serves_submissions_from_many_threads(tiny_engine: Build) -> None:
    engine = tiny_engine(max_running=4)
    finished: list[str] = []
    all_done = threading.Event()

    def deliver(outputs: list[Output]) -> None:
        finished.extend(output.request.request_id for output in outputs if output.finish)
        if len(finished) == 20:
            all_done.set()

    def submit(number: int) -> None:
        for idx in range(5):
            engine.submit([number + 1, idx + 1], Sampling(max_tokens=3))

    with running(engine, deliver):
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all_done.wait(30)
    assert len(set(finished)) == 20
    with pytest.raises(InferScopeError, match="closed"):
        engine.submit([1])


def test_step_of_64_decodes_costs_little_beside_the_forward_pass(tiny_engine: Build) -> None:
    engine = tiny_engine(token_budget=1024, prefix_cache=False)
    execute, forwards_ns = engine._runner.execute, [0]

    def timed(batch: Any) -> list[int]:
        start_ns = time.perf_counter_ns()
        tokens = execute(batch)
        forwards_ns.append(time.perf_counter_ns() - start_ns)
        return tokens

    engine._runner.execute = timed  # type: ignore[method-assign]
    for idx in range(64):
        engine.submit([idx, 1, 2], Sampling(max_tokens=500))
    engine.step()
    host_ns = []
    for _ in range(100):  # other load interrupts some: the fastest counts
        start_ns = time.perf_counter_ns()
        engine.step()
        host_ns.append(time.perf_counter_ns() - start_ns - forwards_ns[-1])
    assert min(host_ns) < 0.6 * min(forwards_ns[2:])


def test_idle_loop_sleeps(tiny_engine: Build) -> None:
    engine = tiny_engine()
    with running(engine, lambda outputs: None):
        before_s = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before_s < 0.1


def test_closing_aborts_unfinished_requests(tiny_engine: Build) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    outputs: list[Output] = []
    started = threading.Event()

    def deliver(step_outputs: list[Output]) -> None:
        outputs.extend(step_outputs)
        started.set()

    with running(engine, deliver):
        engine.submit([1, 2], Sampling(max_tokens=2000))
        assert started.wait(30)
    engine.close()
    assert outputs[-1].finish == "server_abort"
    assert spy.finishes() == [(0, "server_abort")]
    assert engine.pool.num_used == 0


def break_steps_with(engine: Engine, token: int) -> None:
    """Make every step raise that has a request with this token."""
    execute = engine._runner.execute  # type: ignore[attr-defined]

    def broken(batch: Any) -> Any:
        if any(token in part.request.tokens for part in batch.sampled):
            raise ValueError("a kernel failed")
        return execute(batch)

    engine._runner.execute = broken  # type: ignore[attr-defined]


def test_failing_step_ends_only_its_own_requests(
    tiny_engine: Build, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = tiny_engine().generate([[1, 2, 3]], Sampling(max_tokens=4))
    engine = tiny_engine(max_running=2)
    engine.probe = spy = Spy()
    break_steps_with(engine, 500)
    for prompt in ([9] * 5, [500] * 20, [1, 2, 3]):  # the third waits for a sequence slot
        engine.submit(prompt, Sampling(max_tokens=4))
    outputs = drain(engine)
    assert spy.finishes() == [(0, "error"), (1, "error"), (2, "length")]
    assert [output.finish for output in outputs[:2]] == ["error", "error"]
    assert [token for output in outputs[2:] for token in output.tokens] == expected
    assert engine.pool.num_used == 0
    assert [record.getMessage() for record in caplog.records] == [
        "step 0 failed; its 2 requests end with an error: ValueError: a kernel failed"
    ]
    stats = engine.stats()
    assert (stats.failed_steps, stats.finished["error"], stats.finished["length"]) == (1, 2, 1)


def test_loop_goes_on_after_failing_steps_and_ends_when_all_fail(
    tiny_engine: Build, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()
    break_steps_with(engine, 500)
    ends: SimpleQueue[str | None] = SimpleQueue()

    def serve(prompt: list[int]) -> str | None:
        engine.submit(prompt, Sampling(max_tokens=1))
        return ends.get(timeout=30)

    with running(engine, lambda outputs: [ends.put(output.finish) for output in outputs][:0]):
        for _ in range(3):
            assert [serve([500]) for _ in range(9)] == ["error"] * 9
            assert serve([1]) == "length"
        assert [serve([500]) for _ in range(10)] == ["error"] * 10
        assert str(engine.failure).startswith("10 steps in a row failed, the last one with Value")
        with pytest.raises(InferScopeError, match="stopped"):
            engine.submit([1])
    assert caplog.records[-1].getMessage().startswith("the engine's loop failed; it accepts no")
    assert not caplog.records[-1].exc_info


def test_request_of_a_failed_step_is_final_and_its_ledger_closes(
    tiny_engine: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    engine = tiny_engine()
    engine.probe = Probe.open(describe(engine, name="tiny"))
    break_steps_with(engine, 500)
    for prompt in ([1, 2], [500], [1, 2]):
        engine.submit(prompt, Sampling(max_tokens=3))
        drain(engine)
    engine.probe.close()
    source = RingSource(lambda: tmp_path.glob("*/*.ring"), name="")
    while not source.has_ended:
        source.advance()
    (view,) = source.collector.engines.values()
    finals = list(view.lives.finished)
    source.close()
    assert [final.finish for final in finals] == ["length", "error", "length"]
    for final in finals:
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


def test_generate_raises_if_a_step_fails(tiny_engine: Build) -> None:
    engine = tiny_engine()
    break_steps_with(engine, 500)
    with pytest.raises(InferScopeError, match="a step failed"):
        engine.generate([[500], *([[1]] * 70)])
    assert not engine.has_work
    assert len(engine.generate([[1]], Sampling(max_tokens=2))[0]) == 2


@pytest.mark.parametrize("token", [512, 99_999_999, -1])
def test_stop_token_outside_the_vocabulary_is_rejected(tiny_engine: Build, token: int) -> None:
    engine = tiny_engine()
    engine.probe = spy = Spy()
    with pytest.raises(BadRequest, match=rf"stop_token_ids holds {token}; .* 0 to 511"):
        engine.submit([1], Sampling(max_tokens=4, min_tokens=2, stop_token_ids=(3, token)))
    drain(engine)
    assert spy.finishes() == [(0, "rejected")]


def test_stats_equal_the_sums_over_requests(tiny_engine: Build) -> None:
    engine = tiny_engine(num_blocks=50, block_tokens=4, token_budget=23)
    engine.probe = spy = Spy()
    for _ in range(2):
        engine.generate(prompts(6, vocab=512), Sampling(max_tokens=20))
    with pytest.raises(BadRequest):
        engine.submit([])
    engine.submit([1, 2, 3], request_id="active")
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (1, 0, 1)
    engine.cancel("active")
    engine.step()
    stats = engine.stats()
    assert {reason: num for reason, num in stats.finished.items() if num} == {
        "length": 12, "rejected": 1, "client_cancel": 1
    }  # fmt: skip
    assert stats.prompt_tokens == 2 * sum(map(len, prompts(6, vocab=512))) + 3
    assert (
        stats.cached_tokens == sum(fields["cached_tokens"] for _, fields in spy.of("admitted")) > 0
    )
    assert stats.generated_tokens == 12 * 20 + 1
    assert stats.preemptions == len(spy.of("preempted")) > 0
    assert stats.steps == len(spy.of("plan"))
    assert (stats.running, stats.blocks_used, stats.blocks_total) == (0, 0, 50)
    assert stats.blocks_cached == engine.pool.num_cached > 0
