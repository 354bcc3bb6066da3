"""Tests of the records of HTTP requests in both processes' rings, and of their privacy."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.engine import load_tokenizer
from inferscope.records import (
    ADMITTED,
    FINISHED,
    FIRST_BYTE,
    LAST_BYTE,
    QUEUED,
    RECEIVED,
    SALT,
    TOKENISED,
    EngineInfo,
    PromptLikeness,
    Record,
    RequestEvent,
    decode,
)
from inferscope.ring.reader import Frame, RingReader
from tests.engine.server.running import Server, Stream


def records(server: Server, role: str) -> Iterator[Record]:
    """Yield all records in the rings of a role."""
    for path in sorted(server.rings.glob(f"served/{role}-*.ring")):
        reader = RingReader(path)
        while frames := reader.read():
            for frame in frames:
                if isinstance(frame, Frame):
                    yield decode(frame.code, frame.payload)
        reader.close()


def request_events(server: Server, role: str, external_id: str) -> dict[str, list[RequestEvent]]:
    """Return the events of a client's requests in one role, by internal id."""
    by_index: dict[int, list[RequestEvent]] = defaultdict(list)
    for record in records(server, role):
        if isinstance(record, RequestEvent):
            by_index[record.index].append(record)
    return {
        events[0].request_id: events
        for events in by_index.values()
        if events[0].external_id == external_id
    }


def wait_for_end(server: Server, external_id: str) -> None:
    """Wait until the front end has written the last byte."""
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        found = request_events(server, "frontend", external_id)
        if found and all(events[-1].kind == LAST_BYTE for events in found.values()):
            return
        time.sleep(0.02)
    raise AssertionError(f"{external_id} has no end")


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.thorough
def test_each_process_records_its_part_under_one_internal_id(server: Server) -> None:
    headers = {"X-Request-Id": "joined", "traceparent": TRACE}
    before_ns = time.monotonic_ns()
    status, body, answered = server.post(
        "/v1/completions", {"prompt": "def f", "max_tokens": 4, "temperature": 0}, headers
    )
    assert status == 200
    assert answered["x-request-id"] == "joined"
    wait_for_end(server, "joined")
    ((request_id, front),) = request_events(server, "frontend", "joined").items()
    ((same_id, core),) = request_events(server, "core", "joined").items()
    assert request_id == same_id
    kinds = [event.kind for event in front]
    assert kinds == [RECEIVED, TOKENISED, FIRST_BYTE, LAST_BYTE]
    assert [event.kind for event in core] == [QUEUED, ADMITTED, FINISHED]
    received = front[0]
    assert received.trace == TRACE
    assert received.attributes == {
        "endpoint": "/v1/completions",
        "stream": "false",
        "response_id": body["id"],
        "server.address": "127.0.0.1",
        "server.port": str(server.port),
        "max_tokens": "4",
        "temperature": "0.0",
    }
    assert before_ns < received.at_ns < front[1].at_ns < core[0].at_ns < core[1].at_ns
    assert core[-1].at_ns < front[2].at_ns <= front[3].at_ns
    assert front[1].prompt_tokens == core[0].prompt_tokens
    assert core[-1].reason == "length"


@pytest.mark.thorough
@pytest.mark.parametrize(("sent", "name"), [("na\u00efve-\u6f22", None), ("caf\xe9", "caf\xe9")])
def test_a_requests_own_name_may_be_utf_8(server: Server, sent: str, name: str | None) -> None:
    raw = sent.encode("utf-8" if name is None else "latin-1").decode("latin-1")
    body = {"prompt": "def f", "max_tokens": 1}
    assert server.post("/v1/completions", body, {"X-Request-Id": raw})[2]["x-request-id"] == raw
    assert server.final(sent).finish == "length"


def test_further_choices_name_the_first_as_their_parent(server: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 2, "n": 3}
    server.post("/v1/completions", body, {"X-Request-Id": "three"})
    core = request_events(server, "core", "three")
    first, *others = core
    assert len(others) == 2
    assert [events[0].parent for events in core.values()] == ["", first, first]


def test_a_stream_ledger_closes_at_the_clients_edge(server: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 20, "ignore_eos": True}
    with Stream(server.port, "/v1/completions", body, headers={"X-Request-Id": "edge"}) as stream:
        events = stream.events()
        next(events)
        seen_ns = time.monotonic_ns()
        assert [*events][-1] == "[DONE]"
    final = server.final("edge")
    assert (final.arrived_at, final.delivered_at, final.finish) == ("http", "http", "length")
    assert final.output_tokens == 20
    assert not final.joined_late
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert min(final.ledger_ns.values()) >= 0
    assert final.first_token_ns is not None
    # Recorded deliveries precede the client's reads; a busy machine may delay that client.
    assert -2_000_000 < seen_ns - final.first_token_ns < 10_000_000_000
    assert final.ledger_ns["frontend"] > 0


def test_disconnected_client_is_cancelled_in_the_engine(server: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 3900, "ignore_eos": True}
    with Stream(server.port, "/v1/completions", body, headers={"X-Request-Id": "left"}) as stream:
        next(stream.events())
    deadline_s = time.monotonic() + 90
    reasons: list[str] = []
    while not any(reasons) and time.monotonic() < deadline_s:
        (core,) = request_events(server, "core", "left").values()
        reasons = [event.reason for event in core if event.kind == FINISHED]
        time.sleep(0.02)
    assert reasons == ["client_cancel"]
    final = server.final("left")
    assert final.finish == "client_cancel"
    assert 0 < final.output_tokens < 3900
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


def test_a_waiting_whole_answer_is_cancelled_too(server: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 3900, "ignore_eos": True}
    stream = Stream(server.port, "/v1/completions", body, headers={"X-Request-Id": "left-2"})
    while not request_events(server, "core", "left-2"):
        time.sleep(0.01)
    stream.close()
    assert server.final("left-2").finish == "client_cancel"


def test_a_request_that_is_refused_is_recorded_as_rejected(server: Server) -> None:
    for name, body in (("bad-json", b"{"), ("too-long", {"prompt": [1] * 5000})):
        assert server.post("/v1/completions", body, {"X-Request-Id": name})[0] == 400
        final = server.final(name)
        assert final.finish == "rejected"
        assert final.output_tokens == 0
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


def test_a_stop_string_ends_the_request_as_stop_in_both_rings(server: Server) -> None:
    body = {"prompt": "def main(argv", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    _, answer, _ = server.post("/v1/completions", {**body, "max_tokens": 20})
    stop = answer["choices"][0]["text"][-6:]
    server.post("/v1/completions", {**body, "stop": [stop]}, {"X-Request-Id": "cut"})
    final = server.final("cut")
    assert final.finish == "stop"
    assert final.output_tokens <= 20
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    (core,) = request_events(server, "core", "cut").values()
    assert core[-1].kind == FINISHED
    assert core[-1].reason == "stop"


def test_rings_describe_the_served_model(server: Server) -> None:
    for role in ("core", "frontend"):
        info = next(record for record in records(server, role) if isinstance(record, EngineInfo))
        assert info.served_name == "tiny"
        assert info.model == "builtin"


def test_a_cache_salt_keeps_an_equal_prompt_apart_and_is_not_stored(server: Server) -> None:
    salt = "salt-of-a-mine-77c0"
    body = {"prompt": [200 + at for at in range(80)], "max_tokens": 2, "temperature": 0}
    names = ["unsalted", "salted", "salted-again"]
    texts, hits = [], []
    for name in names:
        sent = body if name == "unsalted" else {**body, "cache_salt": salt}
        status, answer, _ = server.post("/v1/completions", sent, {"X-Request-Id": name})
        assert status == 200
        texts.append(answer["choices"][0]["text"])
        hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert hits == [0, 0, 64]
    assert len(set(texts)) == 1
    for name in names:
        wait_for_end(server, name)
    front = list(records(server, "frontend"))
    name_by_index = {
        event.index: event.external_id
        for event in front
        if isinstance(event, RequestEvent) and event.external_id
    }
    differs = {
        name_by_index[record.index]: (record.diverged_at, record.differs)
        for record in front
        if isinstance(record, PromptLikeness) and name_by_index.get(record.index) in names
    }
    assert differs == {"salted": (80, SALT), "salted-again": (80, 0)}
    for ring in server.rings.glob("**/*.ring"):
        assert salt.encode() not in ring.read_bytes()
    assert salt not in server.said()


def test_prompts_and_outputs_are_not_stored(server: Server, tmp_path: Path) -> None:
    canary = "canary-51aa-in-a-coal-mine"
    bodies: list[object] = [
        {"prompt": canary, "max_tokens": 12, "temperature": 0},
        {"prompt": canary, "max_tokens": canary},
        {"prompt": canary, "temperature": -1},
        {"prompt": [canary, 1]},
        f'{{"prompt": "{canary}'.encode(),
    ]
    answers = [server.post("/v1/completions", body)[1] for body in bodies]
    messages = [{"role": "user", "content": canary}]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3})
    server.post("/tokenize", {"prompt": canary})
    with Stream(server.port, "/v1/completions", {"prompt": canary, "max_tokens": 9}) as stream:
        next(stream.events())
    text = answers[0]["choices"][0]["text"]
    assert len(text) > 5
    ids = array("I", load_tokenizer("builtin").encode(canary)).tobytes()
    for answer in answers[1:]:
        assert canary not in answer["error"]["message"]
    assert canary not in server.said()
    rings = list(server.rings.glob("**/*.ring"))
    assert len(rings) == 2
    for ring in rings:
        content = ring.read_bytes()
        assert b"api-0-1" in content  # the ring has requests
        assert not any(secret in content for secret in (canary.encode(), text.encode(), ids))
