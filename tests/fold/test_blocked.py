"""Booking of a client's unread time as `delivery`, whatever the engine computed meanwhile."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest
from inferscope.records import Emitted, Record
from tests.fold.scripts import MS, START_NS, Script, assert_all_closes


def slow_stream(*, blocked_ms: float = 0.0, other_ms: float = 0.0) -> Script:
    """Serve two requests to 35 ms; one client reads on at 100 ms and has all at 101 ms."""
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = [front.received("slow"), front.received("quick")]
    mine = [core.queued("slow"), core.queued("quick")]
    script.at(5)
    for index in mine:
        core.admitted(index)
    for n in range(3):
        rows = [(index, 1, 8 + n) if n else (index, 8, 0) for index in mine]
        core.step(n, rows, start_ms=6 + 10 * n, end_ms=15 + 10 * n)
        script.at(15.5 + 10 * n)
        front.emitted(asked if n == 0 else asked[1:])
    script.at(36)
    for index in mine:
        core.finished(index)
    script.at(37)
    front.last_byte(asked[1])
    script.at(100)
    if blocked_ms or other_ms:
        front.emitted([asked[0]], [2], blocked_ms=[blocked_ms])
    else:
        front.emitted([asked[0]], [2])
    script.at(101)
    front.last_byte(asked[0])
    return script


def finals_of(script: Script) -> dict[str, FinalRequest]:
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    return {final.request_id: final for final in finals.requests}


def test_output_while_the_client_did_not_read_is_delivery() -> None:
    before, after = (finals_of(slow_stream(blocked_ms=ms)) for ms in (0, 75))
    assert before["slow"].ledger_ns["output"] >= 64 * MS
    # Blocked from 25 ms on; the engine computed until 36 ms, and that keeps its causes.
    assert after["slow"].ledger_ns["delivery"] == 64 * MS + 1 * MS
    moved = {"output", "delivery"}
    for name in ("slow", "quick"):
        rest = [
            {cause: ns for cause, ns in found[name].ledger_ns.items() if cause not in moved}
            for found in (before, after)
        ]
        assert rest[0] == rest[1]
    assert before["quick"].ledger_ns == after["quick"].ledger_ns
    assert before["slow"].ttft_ledger_ns == after["slow"].ttft_ledger_ns


def test_only_the_part_that_was_blocked_is_delivery() -> None:
    final = finals_of(slow_stream(blocked_ms=30))["slow"]
    assert final.ledger_ns["delivery"] == 31 * MS
    assert final.ledger_ns["output"] >= 34 * MS


def test_waits_without_tokens_and_between_several_pieces_add_up() -> None:
    script = slow_stream(blocked_ms=10)
    front = script.rings[1]
    script.at(60)
    front.emitted([0], [0], blocked_ms=[20])
    script.at(90)
    front.emitted([0], [0], blocked_ms=[40])  # overlaps the one before by 10 ms
    final = finals_of(script)["slow"]
    assert final.ledger_ns["delivery"] == (20 + 30 + 10) * MS + 1 * MS
    assert final.output_tokens == 3
    assert final.tokens_per_event == (1, 2)


def test_a_first_token_that_waited_for_its_client_is_delivery_in_ttft() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked, mine = front.received("whole"), core.queued("whole")
    script.at(5)
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=6, end_ms=15)
    script.at(16)
    core.finished(mine)
    script.at(80)
    front.emitted([asked], blocked_ms=[60])
    script.at(81)
    front.last_byte(asked)
    final = finals_of(script)["whole"]
    assert final.ttft_ledger_ns["delivery"] == 60 * MS
    assert final.ledger_ns["delivery"] == 61 * MS
    assert final.ttft_ledger_ns["output"] == final.ledger_ns["output"] == 5 * MS


@pytest.mark.parametrize("odd_ms", [-40.0, 10**9])
def test_an_impossible_length_changes_no_sum(odd_ms: float) -> None:
    final = finals_of(slow_stream(blocked_ms=odd_ms))["slow"]
    assert sum(final.ledger_ns.values()) == 101 * MS
    # Blocked for all of its first token's way, which begins at the end of the step that made it.
    assert final.ledger_ns["delivery"] == (1 if odd_ms < 0 else 65.5) * MS


def test_a_column_of_another_length_is_unread_and_its_tokens_count() -> None:
    script = slow_stream(blocked_ms=75)
    script.entries = [(number, _with_a_row_too_many(record)) for number, record in script.entries]
    collector, finals = script.play(until_ms=300)
    assert collector.num_unjoined == 1
    assert sorted(final.output_tokens for final in finals.requests) == [3, 3]


def _with_a_row_too_many(record: Record) -> Record:
    if isinstance(record, Emitted) and record.blocked_ns:
        return replace(record, blocked_ns=record.blocked_ns * 2)
    return record


def test_a_core_cannot_report_a_connection() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=6, end_ms=15)
    script.at(40)
    core.emitted([mine], blocked_ms=[20])
    core.finished(mine)
    final = finals_of(script)["a"]
    assert "delivery" not in final.ledger_ns
    assert final.delivered_ns == START_NS + 40 * MS
