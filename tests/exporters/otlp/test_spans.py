"""Whatever times a broken engine tells, its spans are spans: in bounds, in order, of valid ids."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from inferscope_otlp.facts import PhaseSteps, PrefillChunk, RequestFacts
from inferscope_otlp.finished import EngineResource, Finished
from inferscope_otlp.identity import Parent
from inferscope_otlp.spans import trace_of
from inferscope_otlp.wire import resource_bytes, resource_spans, scope_bytes, trace_bytes, varint
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from inferscope.fold.final_records import FinalRequest, KvTransfer
from inferscope.records import FINISHES
from tests.exporters.otlp.sink import attributes

_OFFSET_NS = 1_700_000_000_000_000_000
times = st.integers(0, 100)
maybe = st.none() | times
counts = st.integers(0, 5)
names = st.text(max_size=3)
transfers = st.builds(KvTransfer, times, times, counts, names, names)


@st.composite
def finished(draw: st.DrawFn) -> Finished:
    """Draw a request whose times are in no order."""
    request = FinalRequest(
        engine_id="engine",
        request_id=draw(st.text(max_size=5)),
        external_id=None,
        trace="",
        attributes=draw(st.dictionaries(st.sampled_from(["endpoint", "stream"]), st.text())),
        prompt_tokens=draw(maybe),
        cached_tokens=0,
        output_tokens=draw(counts),
        arrived_ns=draw(times),
        queued_ns=draw(maybe),
        admitted_ns=draw(maybe),
        first_token_ns=draw(maybe),
        last_token_ns=draw(maybe),
        delivered_ns=draw(times),
        arrived_at="http",
        delivered_at="http",
        finish=draw(st.sampled_from(FINISHES)),
        joined_late=draw(st.booleans()),
        num_preemptions=0,
        ledger_ns={},
        ttft_ledger_ns={},
        token_times_ns=array("q"),
        tokens_per_event=(),
        prefill_ns=draw(counts),
        decode_ns=draw(counts),
        prefill_flops=draw(maybe),
        decode_flops=draw(maybe),
        is_alone=draw(st.booleans()),
        fit_id="",
        clock="host",
        preempted_ns=tuple(draw(st.lists(st.tuples(times, times), max_size=3))),
        transfers=tuple(draw(st.lists(transfers, max_size=2))),
    )
    chunks = [
        PrefillChunk(at_ns, at_ns + 5, 1, 0, 1, False)
        for at_ns in draw(st.lists(times, max_size=4))
    ]
    steps = PhaseSteps(draw(counts), 5, 5)
    facts = RequestFacts(steps, steps, chunks, len(chunks))
    parent = st.none() | st.just(Parent(7, 8, is_sampled=True))
    return Finished(request, None, draw(st.none() | st.just(facts)), draw(parent), {})


@given(finished())
def test_children_lie_within_the_root_and_phases_follow_each_other(given_: Finished) -> None:
    trace = trace_of(given_, EngineResource("engine"), _OFFSET_NS)
    root = trace.root
    assert root.start_ns == given_.request.arrived_ns + _OFFSET_NS
    assert root.start_ns <= root.end_ns
    through_ns = root.start_ns
    for child in trace.children:
        assert root.start_ns <= child.start_ns <= child.end_ns <= root.end_ns
        if child.name not in ("inferscope.preempted", "inferscope.kv_transfer"):
            assert through_ns <= child.start_ns
            through_ns = child.end_ns
        for event in child.events:
            assert child.start_ns <= event.at_ns <= child.end_ns
    ids = [root.span_id, *(child.span_id for child in trace.children)]
    assert len(set(ids)) == len(ids)
    assert trace.trace_id == (given_.parent.trace_id if given_.parent else trace.trace_id)
    assert all(0 < span_id < 1 << 64 for span_id in ids)


@given(finished())
def test_every_chunk_that_was_kept_is_one_event(given_: Finished) -> None:
    trace = trace_of(given_, EngineResource("engine"), _OFFSET_NS)
    names = [child.name for child in trace.children]
    num_events = sum(len(child.events) for child in trace.children)
    num_chunks = len(given_.facts.chunks) if given_.facts else 0
    assert num_events <= num_chunks
    if {"inferscope.prefill", "inferscope.decode"} <= set(names):
        assert num_events == num_chunks


@given(finished())
def test_no_value_is_none_and_nothing_unknown_is_a_number(given_: Finished) -> None:
    request = given_.request
    trace = trace_of(given_, EngineResource("engine"), _OFFSET_NS)
    for span in (trace.root, *trace.children):
        assert None not in span.attributes.values()
        flops = {"prefill": request.prefill_flops, "decode": request.decode_flops}
        expected_flops = (
            None if request.joined_late else flops.get(span.name.removeprefix("inferscope."))
        )
        assert span.attributes.get("inferscope.flops") == expected_flops
    if request.prompt_tokens is None:
        assert "gen_ai.usage.input_tokens" not in trace.root.attributes


@given(finished())
def test_on_the_wire_it_is_what_protobuf_reads(given_: Finished) -> None:
    trace = trace_of(given_, EngineResource("engine"), _OFFSET_NS)
    message = resource_spans(
        resource_bytes({"a": "b"}), scope_bytes("scope", "1"), [trace_bytes(trace)]
    )
    read = ExportTraceServiceRequest.FromString(message)
    (group,) = read.resource_spans
    assert attributes(group.resource.attributes) == {"a": "b"}
    (scope,) = group.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("scope", "1")
    assert len(scope.spans) == 1 + len(trace.children)
    for span, sent in zip(scope.spans, (trace.root, *trace.children), strict=True):
        assert int.from_bytes(span.trace_id, "big") == trace.trace_id
        assert int.from_bytes(span.span_id, "big") == sent.span_id
        assert span.name == sent.name
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (sent.start_ns, sent.end_ns)
        expected = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sent.attributes.items()
        }
        assert attributes(span.attributes) == expected
        assert [event.time_unix_nano for event in span.events] == [e.at_ns for e in sent.events]
        for event, noted in zip(span.events, sent.events, strict=True):
            assert attributes(event.attributes) == noted.attributes
        links = [
            (int.from_bytes(x.trace_id, "big"), int.from_bytes(x.span_id, "big"))
            for x in span.links
        ]
        assert links == ([] if sent.link is None else [(sent.link.trace_id, sent.link.span_id)])
    assert scope.spans[0].status.message == (trace.failure or "")


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_numbers_of_any_size_are_read_back(number: int) -> None:
    read, shift = 0, 0
    for byte in varint(number):
        read |= (byte & 0x7F) << shift
        shift += 7
    assert read == number & (1 << 64) - 1
