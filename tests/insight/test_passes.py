"""Forward-pass metrics: what they state, what they cannot, and which rules they decide.

`sglang.jsonl.gz` holds the messages that SGLang 0.5.23's own publisher sent over ZMQ, as JSON. Its
scheduler was a script: 160 passes of 8 decodes, 10 ms each; every fourth also computes a prompt of
512 tokens and takes 60 ms. One request that had begun to decode waits from the 100th on.
"""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from inferscope.errors import BadInput, NotFound
from inferscope.insight.findings import EngineFindings, Finding
from inferscope.insight.passes import (
    ForwardPass,
    passes_findings,
    passes_view,
    read_passes,
    receive_passes,
)
from inferscope.text.passes import LABEL, passes_text
from tests.cli.running import inferscope

FILE = Path(__file__).parent / "passes" / "sglang.jsonl.gz"


def by_id(found: tuple[EngineFindings, ...]) -> dict[str, Finding]:
    (engine,) = found
    return {finding.id: finding for finding in engine.findings or ()}


def test_the_view_counts_what_the_passes_state_and_leaves_the_rest_null() -> None:
    passes = read_passes(FILE)
    assert passes[-1].is_idle
    view = passes_view(passes, "sglang")
    assert (view.workers, view.num_ranks, view.num_missing) == (("sglang-0",), 1, 0)
    assert view.num_passes == 160
    assert view.decode is not None
    assert view.mixed is not None
    assert (view.decode.num, view.mixed.num, view.prefill) == (120, 40, None)
    assert (view.decode.p50_ns, view.mixed.p99_ns) == (10_000_000, 60_000_000)
    assert (view.num_running, view.num_waiting) == (0, 0), "the last message is a sign of life"
    assert view.prompt_tok_s is None, "bare messages have no time"
    document = json.loads(msgspec.json.encode(view))
    unknown = ("kv_share", "cached_share", "generated_tok_s", "ttft", "tbt", "e2e", "ledger")
    assert [document[key] for key in unknown] == [None] * len(unknown)
    assert LABEL in passes_text(view)
    busy = passes_view(passes[:-1], "sglang")
    assert (busy.num_running, busy.num_waiting, busy.num_preempted) == (8, 3, 1)


def test_starved_decodes_and_lost_blocks_are_found_with_the_shares_that_were_put_in() -> None:
    found = passes_findings(read_passes(FILE))
    findings = by_id(found)
    assert set(findings) == {"starved_decodes", "short_of_kv"}
    # 40 passes of 60 ms take 50 ms more than the 120 of 10 ms: 2.0 s of 3.6 s of each decode.
    evidence = {each.name: each.value for each in findings["starved_decodes"].evidence}
    assert evidence["decode_interference_share"] == pytest.approx(2.0 / 3.6)
    assert evidence["decode_pass_p99_ratio"] == pytest.approx(6.0)
    # 8 decodes and 2 in the queue for 3.6 s, 40 prefills of 60 ms, one that lost its blocks for
    # 15 passes of 60 ms and 45 of 10 ms.
    lost_s = 15 * 0.06 + 45 * 0.01
    whole_s = 10 * 3.6 + 40 * 0.06 + lost_s
    assert findings["short_of_kv"].lost_share == pytest.approx(lost_s / whole_s)
    reasons = {rule.id: rule.reason for rule in found[0].not_judged}
    assert reasons["bad_ttft"] == "forward passes have no single requests"


def test_passes_without_their_prompts_show_no_problem_and_too_few_are_not_judged() -> None:
    pure = [each for each in read_passes(FILE) if not each.scheduled_requests.num_prefill_requests]
    (engine,) = passes_findings(pure)
    assert engine.findings == ()
    reasons = {rule.id: rule.reason for rule in engine.not_judged}
    assert "fewer than 20 passes" in reasons["starved_decodes"]
    assert "may wait for transfers" in reasons["short_of_kv"]


def test_a_trace_of_dynamo_has_times_and_a_sampled_one_no_rates(tmp_path: Path) -> None:
    messages = list(map(json.loads, gzip.decompress(FILE.read_bytes()).splitlines()))
    for mode in ("full", "sampled"):
        path = tmp_path / f"{mode}.jsonl"
        with path.open("w") as file:
            for number, message in enumerate(messages):
                event = {"schema": "dynamo.fpm.trace.v1", "capture_mode": mode, "fpm": message}
                event["observed_at_unix_ms"] = 1_782_777_600_000 + 25 * number
                file.write(json.dumps({"timestamp": 25 * number, "event": event}) + "\n")
        view = passes_view(read_passes(path), str(path))
        assert view.window_ns == 160 * 25_000_000
        assert view.is_sampled is (mode == "sampled")
        if view.is_sampled:
            assert view.prompt_tok_s is None
        else:
            assert view.prompt_tok_s == pytest.approx(39 * 512 / 4.0)
    shown = inferscope("attach", str(path), "--json", rings=tmp_path)
    assert json.loads(shown.stdout)["source"] == "forward passes"
    found = inferscope("findings", str(path), "--json", rings=tmp_path)
    (engine,) = json.loads(found.stdout)["engines"]
    assert [each["id"] for each in engine["findings"]] == ["starved_decodes", "short_of_kv"]


def test_a_gap_in_the_counters_is_counted_and_takes_the_rate() -> None:
    passes = read_passes(FILE)
    timed = [
        msgspec.structs.replace(each, observed_real_ns=10**9 * number)
        for number, each in enumerate(passes)
    ]
    assert passes_view(timed, "x").prompt_tok_s is not None
    holed = passes_view([*timed[:50], *timed[57:]], "x")
    assert (holed.num_missing, holed.prompt_tok_s) == (7, None)


def test_what_a_scheduler_publishes_is_received(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/fpm.0"
    passes = read_passes(FILE)[:20]
    is_over = threading.Event()

    def publish() -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUB)
        socket.bind(endpoint)
        while not is_over.wait(0.01):
            for number, each in enumerate(passes):
                payload = msgspec.msgpack.encode(each)
                socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
        socket.close(linger=0)
        context.term()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        received = receive_passes(endpoint, 1.0)
    finally:
        is_over.set()
        thread.join()
    assert {each.counter_id for each in received} == {each.counter_id for each in passes}
    assert all(isinstance(each, ForwardPass) and each.observed_real_ns for each in received)


def test_what_is_no_source_of_passes_is_reported(tmp_path: Path) -> None:
    for content in ("", "{}\n", '{"event": 3}\n', "hello\n"):
        path = tmp_path / "x.jsonl"
        path.write_text(content)
        with pytest.raises(BadInput, match=r"not a forward pass|holds no forward pass"):
            read_passes(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_passes(tmp_path / "missing.jsonl.gz")
    with pytest.raises(NotFound, match=r"published nothing within 0\.2 s"):
        receive_passes(f"ipc://{tmp_path}/nothing", 0.2)
    with pytest.raises(BadInput, match="cannot connect to tcp://nowhere"):
        receive_passes("tcp://nowhere", 0.2)
