"""Parts of prompts, from the rings' records to the exported rows."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from inferscope_jsonl import JsonlExporter

from inferscope.fold.final_records import FinalRequest
from tests.fold.scripts import Finals, Ring, Script, assert_all_closes

CHAT = (("system", 5), ("retrieved", 2), ("user", 1))


def serve(core: Ring, index: int, chunks: Sequence[int], *, cached: int = 0) -> float:
    """Serve a prompt of 8 tokens in chunks, one step every 10 ms, and a second token."""
    core.event(index, 3, cached_tokens=cached)
    at, num_steps = cached, 0
    for tokens in [*chunks, 1]:
        start_ms = 10 * num_steps + 1
        core.step(num_steps, [(index, tokens, at)], start_ms=start_ms, end_ms=start_ms + 9)
        at, num_steps = at + tokens, num_steps + 1
    core.script.at(10 * num_steps + 1)
    core.finished(index)
    return 10 * num_steps + 1


def row_of(final: FinalRequest) -> Any:
    out = io.BytesIO()
    JsonlExporter(out).on_request(final)
    return json.loads(out.getvalue())


def test_labelled_prompt_is_divided_by_part_and_cached_tokens_are_free() -> None:
    script = Script()
    core = script.ring()
    serve(core, core.queued("a", prompt_parts=CHAT), [3], cached=5)
    collector, finals = script.play(until_ms=300)
    final = finals.only()
    system, retrieved, user = final.parts
    assert [(part.name, part.tokens, part.cached_tokens) for part in final.parts] == [
        ("system", 5, 5),
        ("retrieved", 2, 0),
        ("user", 1, 0),
    ]
    assert (system.compute_ns, system.ttft_ns) == (0, 0)
    assert retrieved.compute_ns == 6_000_000, "two of three tokens of 9 ms, for no shape is known"
    assert user.compute_ns == 3_000_000
    assert sum(part.ttft_ns or 0 for part in final.parts) == final.ttft_ledger_ns["prefill_own"]
    assert {part.flops for part in final.parts} == {None}
    assert_all_closes(collector, finals)
    row = row_of(final)
    assert row["prompt_parts"][1] == {
        "name": "retrieved",
        "tokens": 2,
        "cached_tokens": 0,
        "recomputed_tokens": 0,
        "compute_ns": 6_000_000,
        "ttft_ns": retrieved.ttft_ns,
        "flops": None,
    }
    assert row["provenance"]["prompt_parts"]["method"] == "modelled"


def test_an_unlabelled_prompt_has_no_parts() -> None:
    script = Script()
    core = script.ring()
    serve(core, core.queued("a"), [4, 4])
    _, finals = script.play(until_ms=300)
    assert finals.only().parts == ()
    assert row_of(finals.only())["prompt_parts"] is None


def test_labels_that_come_after_the_first_chunk_are_ignored() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 4, 0)], start_ms=1, end_ms=9)
    asked = front.received("a", prompt_parts=CHAT)
    core.step(1, [(mine, 4, 4)], start_ms=11, end_ms=19)
    core.finished(mine)
    script.at(30)
    front.last_byte(asked)
    script.at(40)
    core.health()
    _, finals = script.play_in_report_order()
    assert finals.only().prefill_ns > 0
    assert finals.only().parts == ()


def test_labels_of_a_front_end_meet_the_chunks_of_a_core() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a", prompt_parts=(("retrieved", 600),))
    mine = core.queued("a")
    ends_ms = serve(core, mine, [4, 4])
    script.at(ends_ms + 1)
    front.last_byte(asked)
    collector, finals = script.play(until_ms=300)
    (retrieved,) = finals.only().parts
    assert retrieved.tokens == 8, "no more than the prompt has"
    assert retrieved.compute_ns == finals.only().prefill_ns == 18_000_000
    assert_all_closes(collector, finals)


def test_a_request_that_was_never_computed_still_states_what_it_brought() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a", prompt_parts=CHAT)
    script.at(5)
    core.finished(mine, "client_cancel")
    _, finals = script.play(until_ms=300)
    assert [(part.name, part.compute_ns, part.ttft_ns) for part in finals.only().parts] == [
        ("system", 0, None),
        ("retrieved", 0, None),
        ("user", 0, None),
    ]


def test_the_digest_distinguishes_parts_and_replays_alike() -> None:
    digests = []
    for parts in (CHAT, CHAT, CHAT[:1], ()):
        script = Script()
        core = script.ring()
        serve(core, core.queued("a", prompt_parts=parts), [4, 4])
        digests.append(script.play(until_ms=300)[0].digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_requests_that_are_gone_are_not_labelled_any_more() -> None:
    script = Script()
    core = script.ring()
    for number in range(50):
        script.at(10 * number)
        core.finished(core.queued(f"r{number}", prompt_parts=CHAT if number % 2 else ()))
    collector, finals = script.play(until_ms=1000)
    assert isinstance(finals, Finals)
    assert len(finals.requests) == 50
    assert collector.engines["engine"].lives.table.num_labelled == 0
