"""KV blocks from another worker: the wait for them is a separate cause."""

from __future__ import annotations

from inferscope_jsonl.exporter import request_row

from inferscope.fold.final_records import KvTransfer
from tests.fold.scripts import MS, START_NS, Script, assert_all_closes


def test_the_wait_for_blocks_is_separate_from_the_queue() -> None:
    script = Script()
    core = script.ring()
    other = core.queued("other")
    core.admitted(other)
    mine = core.queued("mine")
    core.step(0, [(other, 8, 0)], start_ms=0, end_ms=10)
    script.at(20)
    core.transferred(mine, 4, 20, "prefill-0", "theirs")
    script.at(22)
    core.admitted(mine)
    core.step(1, [(other, 1, 8), (mine, 1, 8)], start_ms=24, end_ms=30)
    script.at(31)
    core.finished(other)
    core.finished(mine)
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    (request,) = [each for each in finals.requests if each.request_id == "mine"]
    assert request.ledger_ns["kv_transfer"] == 16 * MS
    assert request.ledger_ns["queue"] == 4 * MS
    assert request.ledger_ns["queue_idle"] == 2 * MS
    assert request.transfers == (
        KvTransfer(START_NS + 4 * MS, START_NS + 20 * MS, 4096, "prefill-0", "theirs"),
    )
    lines = {each.request_id: request_row(each) for each in finals.requests}
    assert lines["other"]["transfers"] is None
    assert lines["mine"]["transfers"] == [
        {
            "start_ns": START_NS + 4 * MS,
            "end_ns": START_NS + 20 * MS,
            "bytes": 4096,
            "peer": "prefill-0",
            "peer_request": "theirs",
        }
    ]


def test_transfers_in_turn_are_each_booked_once() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("mine")
    script.at(9)
    core.transferred(mine, 2, 5, "a")
    core.transferred(mine, 4, 8, "b")
    core.transferred(mine, 1, 7, "c")
    script.at(9)
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=9, end_ms=12)
    script.at(13)
    core.transferred(mine, 9, 12, "too late to wait for it")
    core.finished(mine)
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    request = finals.only()
    assert request.ledger_ns["kv_transfer"] == 6 * MS
    assert request.ledger_ns["queue_idle"] == 3 * MS
    assert [each.peer[:1] for each in request.transfers] == ["a", "c", "b", "t"]


def test_a_transfer_that_cannot_be_is_none() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("mine")
    script.at(5)
    core.transferred(mine, 4, 2, "ends before it begins")
    core.transferred(mine, 4, 9, "ends after its record")
    core.transferred(mine + 7, 1, 2, "unknown request")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=5, end_ms=6)
    script.at(7)
    core.finished(mine)
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    request = finals.only()
    assert request.transfers == ()
    assert "kv_transfer" not in request.ledger_ns
