"""Blame shares that the fold computes, for synthetic engines and the built-in one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from inferscope_jsonl.exporter import request_row
from msgspec.structs import replace

from inferscope.attribution.blame_shares import BlameShare
from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.load import describe
from inferscope.fold.final_records import FinalRequest
from inferscope.fold.view import snapshot
from inferscope.probe import Probe
from inferscope.readers.source import RingSource
from inferscope.records import RECOMPUTED, EngineInfo, StepPlan, StepSlices
from tests.fold.scripts import MS, Finals, Script, assert_all_closes
from tests.fold.test_cuts import assert_cuts_do_not_show


def most(final: FinalRequest, cause: str) -> BlameShare:
    """Return the largest blame share of a cause."""
    shares = [one for one in final.blame if one.cause == cause and one.request_id is not None]
    assert shares == sorted(shares, key=lambda one: -one.ns)
    return shares[0]


# --- synthetic engines ----------------------------------------------------------------------------


def test_the_plan_of_a_step_states_its_scarce_resource() -> None:
    for binding, expected in (("slots", 1 / 2), ("budget", 1 / 41), ("blocks", 81 / 122)):
        script = Script()
        core = script.ring()
        small, large = core.queued("small"), core.queued("large")
        for index in (small, large):
            core.admitted(index)
        script.at(1)
        mine = core.queued("mine")
        script.at(2)
        core.plan(0)
        script.entries[-1] = (core.number, replace(script.entries[-1][1], binding=binding))
        script.at(12)
        core.span(0, 2, 12)
        core.slices(0, [(small, 1, 80), (large, 40, 1)])
        script.at(13)
        core.admitted(mine)
        core.finished(mine)
        _, finals = script.play(until_ms=400)
        blamed_ns = {one.request_id: one.ns for one in finals.only().blame}
        assert sum(blamed_ns.values()) == 10 * MS
        assert blamed_ns["small"] == pytest.approx(expected * 10 * MS, abs=1)


@pytest.mark.parametrize("block_tokens", [0, -16, -1000, 2**64 - 1])
def test_blocks_of_an_impossible_size_are_counted_in_tokens(block_tokens: int) -> None:
    script = Script()
    core = script.ring()
    core.write(EngineInfo(script.now_ns, "made-up", device="gpu", block_tokens=block_tokens))
    small, large = core.queued("small"), core.queued("large")
    for index in (small, large):
        core.admitted(index)
    script.at(1)
    mine = core.queued("mine")
    core.step(0, [(small, 20, 0), (large, 60, 0)], start_ms=2, end_ms=12)
    at, plan = next(
        (at, entry[1]) for at, entry in enumerate(script.entries) if isinstance(entry[1], StepPlan)
    )
    script.entries[at] = (core.number, replace(plan, binding="blocks"))
    core.preempted(small)
    script.at(20)
    core.resumed(small)
    core.admitted(mine)
    for index in (mine, small, large):
        core.finished(index)
    collector, finals = script.play(until_ms=400)
    assert_all_closes(collector, finals)
    by_id = {final.request_id: final for final in finals.requests}
    blamed_ns = {one.request_id: one.ns for one in by_id["mine"].blame}
    assert blamed_ns["large"] == pytest.approx(3 * blamed_ns["small"], rel=1e-6)
    assert most(by_id["small"], "preempted").request_id == "large"


@pytest.mark.parametrize(("streams", "expected"), [("true", {"y"}), ("false", {"x", "y"})])
def test_steps_booked_as_output_have_no_blame_shares(streams: str, expected: set[str]) -> None:
    script = Script()
    core, front_end = script.ring(), script.ring("frontend")
    seen = front_end.received("mine", attributes={"stream": streams})
    front_end.tokenised(seen)
    mine, x, y = (core.queued(name) for name in ("mine", "x", "y"))
    for index in (mine, x, y):
        core.admitted(index)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=11)
    core.step(1, [(mine, 1, 8), (x, 4000, 0)], start_ms=12, end_ms=52)
    script.at(53)
    front_end.emitted([seen])
    core.step(2, [(mine, 1, 9), (y, 4000, 0)], start_ms=54, end_ms=94)
    for index in (mine, x, y):
        core.finished(index)
    script.at(96)
    front_end.emitted([seen], [2])
    front_end.last_byte(seen)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=400), random.Random(0))
    assert_all_closes(collector, finals)
    [final] = [final for final in finals.requests if final.request_id == "mine"]
    blamed = {one.request_id for one in final.blame if one.cause == "decode_interference"}
    assert blamed == expected


def test_a_preemption_has_no_blame_shares_up_to_the_edge_of_the_first_token() -> None:
    script = Script()
    front, core = script.ring("frontend"), script.ring()
    at_front = {name: front.received(name) for name in ("a", "mine")}
    for index in at_front.values():
        front.tokenised(index)
    script.at(0.1)
    a, mine = (core.queued(name) for name in at_front)
    core.admitted(a)
    core.admitted(mine)
    core.step(0, [(a, 8, 0), (mine, 8, 0)], start_ms=1, end_ms=10)
    script.at(10.2)
    front.emitted([at_front["a"]])
    script.at(10.5)
    core.preempted(mine)
    core.step(1, [(a, 1, 8)], start_ms=11, end_ms=30)
    script.at(30.5)
    front.emitted([at_front["mine"]])
    script.at(30.6)
    core.resumed(mine)
    core.step(2, [(mine, 8, 0)], start_ms=31, end_ms=40)
    script.at(40.1)
    core.finished(a)
    front.emitted([at_front["a"]])
    front.last_byte(at_front["a"])
    b = core.queued("b")
    core.admitted(b)
    core.step(3, [(b, 8, 0), (mine, 1, 9)], start_ms=41, end_ms=50)
    script.at(50.5)
    core.preempted(mine)
    core.step(4, [(b, 1, 8)], start_ms=51, end_ms=60)
    script.at(60.5)
    core.resumed(mine)
    core.step(5, [(mine, 10, 0)], start_ms=61, end_ms=70)
    script.at(71)
    core.finished(mine)
    core.finished(b)
    front.emitted([at_front["mine"]])
    front.last_byte(at_front["mine"])
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=1_000), random.Random(0))
    assert_all_closes(collector, finals)
    [final] = [final for final in finals.requests if final.request_id == "mine"]
    blamed_ns = {one.request_id: one.ns for one in final.blame if one.cause == "preempted"}
    assert blamed_ns == {"a": pytest.approx(0.1 * MS, abs=1), "b": pytest.approx(10 * MS, abs=1)}


def blamed(finals: Finals, name: str, cause: str) -> dict[str | None, float]:
    """Return the blame share of each request in a cause of a request, in milliseconds."""
    [final] = [final for final in finals.requests if final.request_id == name]
    return {one.request_id: one.ns / MS for one in final.blame if one.cause == cause}


def folded_alike(script: Script, *, until_ms: float = 1_000) -> Finals:
    """Fold a script whole and cut in many ways; return the result that all of these share."""
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=until_ms), random.Random(0))
    assert_all_closes(collector, finals)
    return finals


def test_a_requests_own_recompute_is_not_blamed_on_another_prompt() -> None:
    script = Script()
    core = script.ring()
    mine, before, after = (core.queued(name) for name in ("mine", "before", "after"))
    core.admitted(mine)
    core.admitted(before)
    core.step(0, [(mine, 1000, 0), (before, 10, 0)], start_ms=1, end_ms=101)
    core.preempted(mine)
    core.finished(before)
    script.at(102)
    core.resumed(mine)
    core.admitted(after)
    core.step(1, [(mine, 1000, 0), (after, 10, 0)], start_ms=103, end_ms=203)
    at, rows = next(
        (at, record)
        for at, (_, record) in enumerate(script.entries)
        if isinstance(record, StepSlices) and record.step == 1
    )
    script.entries[at] = (core.number, replace(rows, flags=bytes([RECOMPUTED, 0])))
    core.finished(mine)
    core.finished(after)
    blamed_ns = blamed(folded_alike(script), "mine", "prefill_co_batched")
    assert blamed_ns["before"] == pytest.approx(blamed_ns["after"], abs=0.01)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_steps_before_the_edge_of_a_first_token_have_no_blame_shares(
    is_preempted: bool,
) -> None:
    script = Script()
    front, core = script.ring("frontend"), script.ring()
    seen = front.received("mine", attributes={"stream": "true"})
    front.tokenised(seen)
    mine, x, y, z = (core.queued(name) for name in ("mine", "x", "y", "z"))
    core.admitted(mine)
    if is_preempted:
        core.step(0, [(mine, 100, 0)], start_ms=1, end_ms=11)
    else:  # its prompt was computed elsewhere
        core.step(0, [(mine, 1, 100)], start_ms=1, end_ms=11)
    core.admitted(x)
    core.step(1, [(mine, 1, 101), (x, 4000, 0)], start_ms=12, end_ms=52)
    core.finished(x)
    if is_preempted:
        core.preempted(mine)
        core.step(2, [(y, 100, 0)], start_ms=53, end_ms=60)
        core.resumed(mine)
        core.step(3, [(mine, 102, 0), (y, 1, 100)], start_ms=61, end_ms=71)
    script.at(72)
    front.emitted([seen])
    core.admitted(z)
    core.step(4, [(mine, 1, 102), (z, 4000, 0)], start_ms=73, end_ms=113)
    for index in (mine, y, z):
        core.finished(index)
    script.at(115)
    front.emitted([seen], [2])
    front.last_byte(seen)
    assert set(blamed(folded_alike(script), "mine", "decode_interference")) == {"z"}


@pytest.mark.parametrize("num_ended", [0, 1, 3])
def test_members_that_end_between_plan_and_start_count_as_unknown(num_ended: int) -> None:
    script = Script()
    core = script.ring()
    names = ["mine", "other", *(f"ended-{number}" for number in range(num_ended))]
    members = {name: core.queued(name) for name in names}
    for index in members.values():
        core.admitted(index)
    script.at(1)
    core.plan(0)
    core.slices(0, [(index, 8, 0) for index in members.values()])
    script.at(5)
    core.plan(1)
    core.slices(1, [(index, 1, 8) for index in members.values()])
    script.at(11)
    core.span(0, 1, 11)
    core.emitted(list(members.values()))
    script.at(11.2)
    for name in names[2:]:
        core.finished(members[name])
    script.at(20)
    waits = core.queued("waits")
    script.at(60)
    core.span(1, 12, 60)
    core.emitted([members["mine"], members["other"]])
    script.at(61)
    core.admitted(waits)
    core.step(2, [(members["mine"], 1, 9), (waits, 8, 0)], start_ms=61.5, end_ms=65)
    for index in (members["mine"], members["other"], waits):
        core.finished(index)
    finals = folded_alike(script)
    known = dict.fromkeys(names[:2], 40 / len(names))
    unknown = {None: 40 * num_ended / len(names)} if num_ended else {}
    expected = {name: pytest.approx(ms, abs=1e-5) for name, ms in (known | unknown).items()}
    assert blamed(finals, "waits", "queue") == expected
    shares_ns = blamed(finals, "mine", "decode_co_batched")
    assert shares_ns["other"] / sum(shares_ns.values()) == pytest.approx(
        1 / (1 + num_ended), rel=1e-3
    )


def test_each_unknown_member_has_its_own_blame_share() -> None:
    found = []
    for num_unknown in (0, 1, 3):
        script = Script()
        core = script.ring()
        mine, other = core.queued("mine"), core.queued("other")
        core.admitted(mine)
        core.admitted(other)
        rows = [(mine, 1, 100), (other, 1, 100)]
        rows += [(900 + number, 1, 100) for number in range(num_unknown)]  # of before the ring
        rows += [(950, 50, 0)]
        core.step(0, rows, start_ms=1, end_ms=11)
        core.finished(mine)
        core.finished(other)
        shares_ns = blamed(folded_alike(script), "mine", "decode_co_batched")
        found.append(shares_ns["other"] / sum(shares_ns.values()))
    assert found == [pytest.approx(1 / num, rel=1e-3) for num in (1, 2, 4)]


def test_the_queue_of_steps_that_overlap_is_blamed_up_to_the_admission() -> None:
    script = Script()
    core = script.ring()
    members = [core.queued(name) for name in "abd"]
    for index in members:
        core.admitted(index)
    for step, index in enumerate(members):
        script.at(1 + step)
        core.plan(step)
        core.slices(step, [(index, 8, 0)])
    script.at(3.5)
    waits = core.queued("waits")
    script.at(100)
    core.span(0, 1, 100)
    script.at(101)
    core.admitted(waits)
    core.plan(3)
    core.slices(3, [(waits, 8, 0)])
    for step, start_ms, end_ms in ((1, 2, 200), (2, 3, 300), (3, 102, 400)):
        script.at(end_ms)
        core.span(step, start_ms, end_ms)
    for index in (*members, waits):
        core.finished(index)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=1_000), random.Random(0))
    assert_all_closes(collector, finals)
    [final] = [final for final in finals.requests if final.request_id == "waits"]
    blamed_ns = {one.request_id: one.ns for one in final.blame if one.cause == "queue"}
    assert blamed_ns == {"a": 96.5 * MS, "b": 1 * MS}


def test_a_queued_request_has_blame_shares_before_its_admission() -> None:
    script = Script()
    core = script.ring()
    running = core.queued("running")
    core.admitted(running)
    core.queued("waiting")
    core.step(0, [(running, 8, 0)], start_ms=0, end_ms=10)
    core.step(1, [(running, 1, 8)], start_ms=10, end_ms=20)
    script.at(30)
    core.health()
    collector, _ = script.play(until_ms=400)
    view = snapshot(collector, window_ns=10**9, mode="live", focus="waiting")
    rows = {row.request_id: row for row in view.engines[0].requests}
    assert rows["waiting"].blame == (BlameShare("queue", "running", 20 * MS),)
    assert rows["running"].blame == ()


# --- the built-in engine --------------------------------------------------------------------------

Run = Callable[[Engine], dict[str, FinalRequest]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Step an engine until it has no work, and fold the records of its probe."""
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "4")

    def until_done(engine: Engine) -> dict[str, FinalRequest]:
        while engine.has_work:
            engine.step()
        engine.probe.close()
        finals = Finals()
        paths = sorted(tmp_path.glob("**/*.ring"))
        source = RingSource(lambda: paths, name="offline", sinks=(finals,))
        while not source.has_ended:
            source.advance()
        source.close()
        assert_all_closes(source.collector, finals)
        return {final.request_id: final for final in finals.requests}

    return until_done


def make_engine(**options: object) -> Engine:
    """Return an engine whose probe is on."""
    engine = load_engine("builtin", EngineOptions(dtype="float32", prefix_cache=False, **options))  # type: ignore[arg-type]
    engine.probe = Probe.open(describe(engine, name="builtin"))
    return engine


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    return [first + at % 50 for at in range(num_tokens)]


def test_waits_for_the_only_slot_blame_the_request_that_holds_it(run: Run) -> None:
    engine = make_engine(max_running=1, token_budget=64)
    engine.submit(prompt(20), Sampling(max_tokens=40, ignore_eos=True), request_id="long")
    for _ in range(2):
        engine.step()
    for name in ("second", "third"):
        engine.submit(prompt(5), Sampling(max_tokens=2, ignore_eos=True), request_id=name)
    finals = run(engine)
    for name in ("second", "third"):
        largest = most(finals[name], "queue")
        assert largest.request_id == "long"
        assert largest.ns > 0.8 * finals[name].ledger_ns["queue"]
    second = [one for one in finals["second"].blame if one.cause == "queue"]
    assert [one.request_id for one in second] == ["long"]
    third = [one.request_id for one in finals["third"].blame if one.cause == "queue"]
    assert third == ["long", "second"]
    exported = request_row(finals["second"])["blame"]
    assert exported[0] == {
        "cause": "queue",
        "request": "long",
        "ns": finals["second"].ledger_ns["queue"],
    }


def test_waits_for_blocks_and_preemptions_blame_the_request_that_holds_the_blocks(
    run: Run,
) -> None:
    engine = make_engine(max_running=8, token_budget=128, num_blocks=12, block_tokens=16)
    more = Sampling(max_tokens=60, ignore_eos=True)
    engine.submit(prompt(90), more, request_id="large")  # 6 blocks, up to 10 of the 12
    engine.submit(prompt(20), more, request_id="small")
    for _ in range(2):
        engine.step()
    engine.submit(prompt(80), Sampling(max_tokens=2, ignore_eos=True), request_id="waiting")
    finals = run(engine)
    assert most(finals["waiting"], "queue").request_id == "large"
    assert finals["small"].num_preemptions > 0
    largest = most(finals["small"], "preempted")
    assert (largest.request_id, largest.ns) == ("large", finals["small"].ledger_ns["preempted"])


def test_decodes_blame_the_oversized_prompt_that_delays_them(run: Run) -> None:
    engine = make_engine(max_running=8, token_budget=512)
    for number in range(3):
        sampling = Sampling(max_tokens=20, ignore_eos=True)
        engine.submit(prompt(8), sampling, request_id=f"decode-{number}")
    for _ in range(4):
        engine.step()
    for name, num_tokens in (("oversized", 700), ("harmless", 12)):
        one = Sampling(max_tokens=1, ignore_eos=True)
        engine.submit(prompt(num_tokens), one, request_id=name)
        for _ in range(4):
            engine.step()
    finals = run(engine)
    for number in range(3):
        final = finals[f"decode-{number}"]
        largest = most(final, "decode_interference")
        assert largest.request_id == "oversized"
        assert largest.ns > 0.7 * final.ledger_ns["decode_interference"]
        beside = {one.request_id for one in final.blame if one.cause == "decode_co_batched"}
        assert beside <= {f"decode-{other}" for other in range(3) if other != number} | {None}
