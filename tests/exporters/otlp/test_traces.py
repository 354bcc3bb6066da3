"""What arrives at a real receiver from a real recording."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from inferscope_otlp import OtlpExporter
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest
from inferscope.readers.source import catch_up, open_source
from inferscope.records import PREFILL, QUEUED
from tests.exporters.otlp.conftest import DEMO, Finals
from tests.exporters.otlp.sink import INTERNAL, Received, Sink, receiving
from tests.fold.scripts import Script

_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def sent(finals: Finals) -> Iterator[Sink]:
    """Export the recording as `collect` would: the exporter is the fold's sink."""
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "service_name": "chat"})
        exporter.open()
        source = open_source(DEMO, sinks=(exporter,))
        catch_up(source)
        exporter.on_snapshot(source.snapshot(10**10))
        source.close()
        exporter.close()
        assert (exporter.num_sent, exporter.num_left_out) == (len(finals.requests), 0)
        assert not any(exporter.num_dropped.values())
        yield sink


def export(finals: Finals, requests: list[FinalRequest], **settings: object) -> list[Received]:
    """Export these requests, with all steps, to a receiver of their own."""
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, **settings})
        exporter.open()
        for step in finals.steps:
            exporter.on_step(step)
        for request in requests:
            exporter.on_request(request)
        assert finals.view is not None
        exporter.on_snapshot(finals.view)
        exporter.close()
        assert exporter.num_sent == len(requests) - exporter.num_left_out
        return sink.spans()


def of_request(sink: Sink, request: FinalRequest) -> tuple[Received, dict[str, Received]]:
    (root,) = [
        root
        for root in sink.roots()
        if root.attributes["inferscope.request.id"] == request.request_id
    ]
    children = sink.children(root)
    by_name = {child.name: child for child in children}
    assert len(by_name) == len(children)
    return root, by_name


@pytest.mark.thorough
def test_every_request_is_one_root_and_every_other_span_lies_below_one(
    sent: Sink, finals: Finals
) -> None:
    roots = sent.roots()
    assert sorted(root.attributes["inferscope.request.id"] for root in roots) == sorted(
        request.request_id for request in finals.requests
    )
    ids = {(each.span.trace_id, each.span.span_id) for each in sent.spans()}
    assert len(ids) == len(sent.spans())
    for each in sent.spans():
        assert len(each.span.trace_id) == 16
        assert len(each.span.span_id) == 8
        assert any(each.span.trace_id)
        assert any(each.span.span_id)
        if each.span.kind == INTERNAL:
            assert (each.span.trace_id, each.span.parent_span_id) in ids
        else:
            assert each.span.parent_span_id == b""


def test_children_lie_within_their_root_one_phase_after_another(sent: Sink, finals: Finals) -> None:
    for request in finals.requests:
        root, children = of_request(sent, request)
        phases = ("inferscope.queue", "inferscope.prefill", "inferscope.decode")
        assert [name for name in children if name != "inferscope.preempted"] == list(phases)
        at_ns = root.span.start_time_unix_nano
        for phase in phases:
            span = children[phase].span
            assert at_ns <= span.start_time_unix_nano <= span.end_time_unix_nano
            at_ns = span.end_time_unix_nano
        assert at_ns <= root.span.end_time_unix_nano
        for child in children.values():
            span = child.span
            assert root.span.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.span.end_time_unix_nano
            for event in span.events:
                assert span.start_time_unix_nano <= event.time_unix_nano
                assert event.time_unix_nano <= span.end_time_unix_nano


def test_spans_stand_on_the_wall_clock_at_the_recorded_times(sent: Sink, finals: Finals) -> None:
    assert finals.view is not None
    offset_ns = finals.view.real_ns - finals.view.mono_ns
    assert offset_ns > 0

    def times(each: Received) -> tuple[int, int]:
        span = each.span
        return span.start_time_unix_nano - offset_ns, span.end_time_unix_nano - offset_ns

    for request in finals.requests:
        root, children = of_request(sent, request)
        assert times(root) == (request.arrived_ns, request.delivered_ns)
        assert times(children["inferscope.queue"]) == (request.queued_ns, request.admitted_ns)
        prefill = (request.admitted_ns, request.first_token_ns)
        assert times(children["inferscope.prefill"]) == prefill
        decode = (request.first_token_ns, request.last_token_ns)
        assert times(children["inferscope.decode"]) == decode


def test_the_ledger_sums_to_the_roots_length(sent: Sink) -> None:
    for root in sent.roots():
        causes = [
            seconds
            for name, seconds in root.attributes.items()
            if name.startswith("inferscope.ledger.")
        ]
        length_ns = root.span.end_time_unix_nano - root.span.start_time_unix_nano
        assert all(seconds > 0 for seconds in causes)
        assert sum(causes) == pytest.approx(length_ns / 1e9, abs=1e-9)


def test_the_phases_compute_sums_to_the_requests(sent: Sink, finals: Finals) -> None:
    for request in finals.requests:
        root, children = of_request(sent, request)
        by_phase = {
            name: child.attributes["inferscope.gpu.seconds"]
            for name, child in children.items()
            if "inferscope.phase" in child.attributes
        }
        assert by_phase == {
            "inferscope.prefill": request.prefill_ns / 1e9,
            "inferscope.decode": request.decode_ns / 1e9,
        }
        whole = root.attributes["inferscope.gpu.seconds"]
        assert whole == pytest.approx(sum(by_phase.values()), abs=1e-9)
        assert children["inferscope.prefill"].attributes["inferscope.flops"] > 0


def test_steps_and_batches_are_those_of_the_recording(sent: Sink, finals: Finals) -> None:
    """Counted again here in the plainest way."""
    for request in finals.requests[::7]:
        _, children = of_request(sent, request)
        for name, is_prefill in (("inferscope.prefill", True), ("inferscope.decode", False)):
            mine = [
                step
                for step in finals.steps
                if any(
                    request_id == request.request_id and bool(phase == PREFILL) is is_prefill
                    for request_id, phase in zip(step.request_ids, step.phases, strict=True)
                )
            ]
            found = children[name].attributes
            assert found["inferscope.steps"] == len(mine) > 0
            sizes = [len(set(step.request_ids)) for step in mine]
            assert found["inferscope.batch.size_mean"] == pytest.approx(sum(sizes) / len(mine))
            tokens = sum(int(step.tokens.sum()) for step in mine)
            assert found["inferscope.batch.tokens_mean"] == pytest.approx(tokens / len(mine))


def test_prefill_has_an_event_per_chunk_and_decode_none_per_token(
    sent: Sink, finals: Finals
) -> None:
    num_chunked = 0
    for request in finals.requests:
        _, children = of_request(sent, request)
        prefill, decode = children["inferscope.prefill"], children["inferscope.decode"]
        chunks = [
            {pair.key: pair.value.int_value for pair in event.attributes}
            for event in prefill.span.events
        ]
        again = len(decode.span.events)
        assert prefill.attributes["inferscope.prefill.chunks"] == len(chunks) + again
        assert request.num_preemptions or again == 0
        assert request.prompt_tokens is not None
        computed = sum(chunk["inferscope.chunk.tokens"] for chunk in chunks)
        assert computed == request.prompt_tokens - request.cached_tokens
        num_chunked += len(chunks) > 1
        assert len(decode.span.events) < request.output_tokens
    assert num_chunked > 5


def test_chunks_compute_sums_to_the_prefills(sent: Sink, finals: Finals) -> None:
    for request in finals.requests:
        _, children = of_request(sent, request)
        shares = [
            pair.value.double_value
            for child in children.values()
            for event in child.span.events
            for pair in event.attributes
            if pair.key == "inferscope.gpu.seconds"
        ]
        assert sum(shares) == pytest.approx(request.prefill_ns / 1e9, abs=1e-8)


def test_a_preemption_is_a_span_of_its_length(sent: Sink, finals: Finals) -> None:
    preempted = [request for request in finals.requests if request.num_preemptions]
    assert preempted
    for request in preempted:
        root, children = of_request(sent, request)
        span = children["inferscope.preempted"].span
        ((since_ns, until_ns),) = request.preempted_ns
        assert span.end_time_unix_nano - span.start_time_unix_nano == until_ns - since_ns > 0
        assert root.attributes["inferscope.preemptions"] == 1


def test_tokens_latencies_and_names_are_the_requests(sent: Sink, finals: Finals) -> None:
    for request in finals.requests:
        root, children = of_request(sent, request)
        found = root.attributes
        assert root.name == "text_completion builtin"
        assert found["gen_ai.operation.name"] == "text_completion"
        assert found["gen_ai.provider.name"] == "inferscope"
        assert found["gen_ai.response.model"] == "builtin"
        assert found["gen_ai.usage.input_tokens"] == request.prompt_tokens
        assert found["gen_ai.usage.output_tokens"] == request.output_tokens
        assert found["gen_ai.usage.cache_read.input_tokens"] == request.cached_tokens
        assert found["gen_ai.response.finish_reasons"] == [request.finish]
        assert found["inferscope.request.external_id"] == request.external_id
        assert request.first_token_ns is not None
        ttft_s = (request.first_token_ns - request.arrived_ns) / 1e9
        assert found["gen_ai.latency.time_to_first_token"] == ttft_s
        decode = children["inferscope.decode"].attributes
        gaps = sorted(request.tbt_ns)
        assert decode["inferscope.tbt.max"] == gaps[-1] / 1e9
        assert gaps[0] / 1e9 <= decode["inferscope.tbt.p50"] <= decode["inferscope.tbt.p99"]
        assert decode["inferscope.tbt.p99"] <= decode["inferscope.tbt.max"]
        assert "error.type" not in found


def test_phase_lists_blamed_requests_in_order(sent: Sink, finals: Finals) -> None:
    num_named = 0
    for request in finals.requests:
        _, children = of_request(sent, request)
        for phase in ("queue", "prefill", "decode"):
            waited_ns: dict[str, int] = {}
            for cause, other, ns in request.blame:
                if other is not None and cause.startswith(phase):
                    waited_ns[other] = waited_ns.get(other, 0) + ns
            found = children[f"inferscope.{phase}"].attributes
            if not waited_ns:
                assert "inferscope.blame.requests" not in found
                continue
            num_named += 1
            named = found["inferscope.blame.requests"]
            assert len(named) == min(3, len(waited_ns))
            assert found["inferscope.blame.seconds"] == [waited_ns[one] / 1e9 for one in named]
            assert waited_ns[named[0]] == max(waited_ns.values())
            assert request.request_id not in named
    assert num_named > 50


def test_uncertainty_and_method_are_attributes(finals: Finals) -> None:
    assert finals.view is not None
    (engine,) = finals.view.engines
    assert engine.model_residual is not None
    alone = replace(finals.requests[0], is_alone=True)
    shared = replace(finals.requests[1], is_alone=False, reasoning_tokens=3)
    by_id = {
        each.attributes["inferscope.request.id"]: each.attributes
        for each in export(finals, [alone, shared])
        if not each.span.parent_span_id
    }
    assert by_id[alone.request_id]["inferscope.attribution.uncertainty"] == 0
    span_attributes = by_id[shared.request_id]
    assert span_attributes["inferscope.attribution.uncertainty"] == abs(engine.model_residual)
    assert span_attributes["gen_ai.usage.reasoning.output_tokens"] == 3


def test_a_breach_names_its_cause_and_is_no_goodput(finals: Finals) -> None:
    late = replace(
        finals.requests[0],
        ttft_ledger_ns={"queue": 9 * 10**9},
        first_token_ns=finals.requests[0].arrived_ns + 9 * 10**9,
    )
    failed = replace(finals.requests[1], finish="error")
    spans = export(finals, [late, failed, finals.requests[2]], ttft_ms=8000, keep_share=1)
    roots = [each.attributes for each in spans if not each.span.parent_span_id]
    assert [root["inferscope.slo.goodput"] for root in roots] == ["bad", "bad", "good"]
    assert [root["inferscope.slo.ttft"] for root in roots] == ["bad", "good", "good"]
    assert [root.get("inferscope.slo.cause") for root in roots] == ["queue", None, None]


def test_what_the_metrics_link_to_is_what_is_kept(finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "keep_share": 0.3})
        exporter.open()
        linked = {exporter.kept_trace(request) for request in finals.requests} - {None}
        finals.export_to(exporter)
        exporter.close()
        assert linked == {root.span.trace_id.hex() for root in sink.roots()}
    assert 0 < len(linked) < len(finals.requests)


def test_the_resource_is_the_engine(sent: Sink, finals: Finals) -> None:
    (engine_id,) = {request.engine_id for request in finals.requests}
    for each in sent.spans():
        assert each.resource["service.name"] == "chat"
        assert each.resource["service.instance.id"] == engine_id
        assert each.resource["host.name"]
        assert each.resource["hw.name"] == "cpu"


def test_bodies_are_compressed_by_default(sent: Sink, finals: Finals) -> None:
    assert {headers["Content-Encoding"] for headers in sent.headers} == {"gzip"}
    with receiving() as sink:
        exporter = OtlpExporter(
            {"endpoint": sink.url, "compression": "none", "headers": {"x-scope-orgid": "a"}}
        )
        exporter.open()
        finals.export_to(exporter)
        exporter.close()
        assert len(sink.roots()) == len(finals.requests)
        assert all("Content-Encoding" not in headers for headers in sink.headers)
        assert {headers["x-scope-orgid"] for headers in sink.headers} == {"a"}


def test_exporting_again_gives_the_same_ids_and_times(sent: Sink, finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "service_name": "chat"})
        exporter.open()
        finals.export_to(exporter)
        exporter.close()

        def by_id(which: Sink) -> dict[bytes, bytes]:
            return {
                each.span.span_id: each.span.SerializeToString(deterministic=True)
                for each in which.spans()
            }

        assert by_id(sink) == by_id(sent)


def test_the_clients_trace_is_continued(finals: Finals) -> None:
    request = replace(finals.requests[0], trace=_PARENT)
    spans = export(finals, [request])
    assert len(spans) >= 3
    assert {each.span.trace_id.hex() for each in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    (root,) = [each for each in spans if each.span.kind != INTERNAL]
    assert root.span.parent_span_id.hex() == "b7ad6b7169203331"


def test_traceparent_survives_the_fold(finals: Finals) -> None:
    script = Script()
    front, core = script.ring("frontend"), script.ring()
    asked = front.received("a", trace=_PARENT)
    script.at(1)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=2, end_ms=9)
    script.at(10)
    front.emitted([asked])
    core.finished(mine)
    front.last_byte(asked)
    _, folded = script.play(until_ms=300)
    spans = export(finals, [folded.only()])
    root = spans[0]
    assert root.span.trace_id.hex() == _PARENT[3:35]
    assert root.span.parent_span_id.hex() == _PARENT[36:52]
    # One token needs no decoding: there is no such span.
    assert [each.name for each in spans[1:]] == ["inferscope.queue", "inferscope.prefill"]


@pytest.mark.parametrize("trace", ["", _PARENT])
def test_a_transfer_is_linked_to_the_request_on_the_worker_that_sent_it(
    finals: Finals, trace: str
) -> None:
    script = Script()
    prefill, decode = (script.ring(engine_id=name) for name in ("prefill-0", "decode-0"))
    theirs = prefill.enter(QUEUED, "theirs", prompt_tokens=8, trace=trace)
    prefill.admitted(theirs)
    prefill.step(0, [(theirs, 8, 0)], start_ms=1, end_ms=9)
    prefill.finished(theirs, "length")
    mine = decode.enter(QUEUED, "mine", prompt_tokens=8, trace=trace)
    script.at(12)
    decode.transferred(mine, 9, 12, "prefill-0", "theirs")
    decode.admitted(mine)
    for number, end_ms in enumerate((14, 16)):
        decode.step(number, [(mine, 1, 8 + number)], start_ms=end_ms - 1, end_ms=end_ms)
    decode.finished(mine)
    _, folded = script.play(until_ms=300)
    spans = export(finals, folded.requests)
    (moved,) = [each for each in spans if each.name == "inferscope.kv_transfer"]
    (sent_by,) = [
        each for each in spans if each.attributes.get("inferscope.request.id") == "theirs"
    ]
    (link,) = moved.span.links
    assert (link.trace_id, link.span_id) == (sent_by.span.trace_id, sent_by.span.span_id)
    assert (moved.span.trace_id == sent_by.span.trace_id) is bool(trace)
    assert moved.span.end_time_unix_nano - moved.span.start_time_unix_nano == 3_000_000
    assert moved.attributes == {
        "inferscope.transfer.bytes": 4096,
        "inferscope.transfer.peer": "prefill-0",
    }
    (mine_root,) = [
        each for each in spans if each.attributes.get("inferscope.request.id") == "mine"
    ]
    assert moved.span.parent_span_id == mine_root.span.span_id
    assert mine_root.attributes["inferscope.ledger.kv_transfer"] == 0.003


def test_two_requests_of_one_client_span_are_two_roots_in_one_trace(finals: Finals) -> None:
    both = [replace(request, trace=_PARENT) for request in finals.requests[:2]]
    spans = export(finals, both)
    roots = [each for each in spans if each.span.kind != INTERNAL]
    assert len({each.span.span_id for each in roots}) == 2
    assert len({each.span.trace_id for each in spans}) == 1


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/elsewhere", "text_completion"),
    ],
)
def test_the_endpoint_names_the_operation(finals: Finals, endpoint: str, operation: str) -> None:
    given = {"endpoint": endpoint, "stream": "true", "tenant": "t", "server.port": "8000"}
    spans = export(finals, [replace(finals.requests[0], attributes=given)])
    found = spans[0].attributes
    assert spans[0].name == f"{operation} builtin"
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.request.stream"] is True
    assert found["inferscope.request.tenant"] == "t"
    assert found["server.port"] == 8000


def test_sampling_attributes_have_the_conventions_types(finals: Finals) -> None:
    given = {
        *(("max_tokens", "64"), ("temperature", "0.5"), ("top_p", "1"), ("top_k", "20")),
        *(("seed", "-3"), ("n", "2"), ("frequency_penalty", "0.1"), ("presence_penalty", "0")),
    }
    root = export(finals, [replace(finals.requests[0], attributes=dict(given))])[0]
    settings = {k: v for k, v in root.attributes.items() if k.startswith("gen_ai.request.")}
    settings = {k.removeprefix("gen_ai.request."): v for k, v in settings.items()}
    assert {k: v for k, v in settings.items() if isinstance(v, float)} == {
        **{"temperature": 0.5, "top_p": 1.0, "top_k": 20.0},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.0},
    }
    whole = {k: v for k, v in settings.items() if isinstance(v, int)}
    assert whole == {"max_tokens": 64, "seed": -3, "choice.count": 2}


def test_what_is_no_number_is_no_setting(finals: Finals) -> None:
    secret = "a prompt, by mistake"
    given = {"max_tokens": secret, "seed": "9" * 30, "temperature": "nan", "top_p": "", "n": "1"}
    root = export(finals, [replace(finals.requests[0], attributes=given)])[0]
    keys = {k for k in root.attributes if k.startswith("gen_ai.request.")}
    assert keys == {"gen_ai.request.id", "gen_ai.request.model"}
    assert secret not in root.attributes.values()


def test_a_failure_is_an_error_and_a_clients_leaving_is_none(finals: Finals) -> None:
    failed = replace(finals.requests[0], finish="engine_lost")
    left = replace(finals.requests[1], finish="client_cancel")
    spans = export(finals, [failed, left])
    roots = {
        each.attributes["inferscope.finish"]: each for each in spans if not each.span.parent_span_id
    }
    assert roots["engine_lost"].span.status.code == 2
    assert roots["engine_lost"].attributes["error.type"] == "engine_lost"
    assert roots["client_cancel"].span.status.code == 0
    for root in roots.values():
        assert "gen_ai.response.finish_reasons" not in root.attributes
    assert "error.type" not in roots["client_cancel"].attributes


def test_a_request_cut_short_shows_how_far_it_came(finals: Finals) -> None:
    whole = finals.requests[0]
    none_yet = {
        "first_token_ns": None, "last_token_ns": None, "token_times_ns": type(
            whole.token_times_ns)("q"), "tokens_per_event": (), "output_tokens": 0,
        "finish": "timeout",
    }  # fmt: skip
    in_prefill = replace(whole, **none_yet)
    in_queue = replace(finals.requests[1], admitted_ns=None, **none_yet)
    refused = replace(in_queue, request_id="refused", queued_ns=None, finish="rejected")
    spans = export(finals, [in_prefill, in_queue, refused])
    by_root: dict[str, list[Received]] = {}
    names = {each.span.span_id: each.attributes.get("inferscope.request.id") for each in spans}
    for each in spans:
        by_root.setdefault(names.get(each.span.parent_span_id, ""), []).append(each)
    (root,) = [each for each in spans if each.attributes.get("error.type") == "timeout"][:1]
    queue, prefill = by_root[whole.request_id]
    assert (queue.name, prefill.name) == ("inferscope.queue", "inferscope.prefill")
    assert prefill.span.end_time_unix_nano == root.span.end_time_unix_nano
    (queue,) = by_root[in_queue.request_id]
    assert queue.name == "inferscope.queue"
    assert "refused" not in by_root
    for each in spans:
        assert not any("tbt" in name or "first_token" in name for name in each.attributes)


def test_what_is_not_known_is_absent(finals: Finals) -> None:
    """A request that was under way before the records began has no totals."""
    late = replace(
        finals.requests[0],
        joined_late=True,
        prompt_tokens=None,
        admitted_ns=None,
        external_id=None,
        prefill_flops=None,
        decode_flops=None,
    )
    spans = export(finals, [late])
    root = spans[0]
    assert root.attributes["inferscope.joined_late"] is True
    for each in spans:
        for name in each.attributes:
            assert not name.startswith(("inferscope.ledger.", "inferscope.tbt.", "gen_ai.usage."))
            assert name not in (
                "inferscope.gpu.seconds",
                "inferscope.flops",
                "inferscope.steps",
                "inferscope.interference.seconds",
                "inferscope.preemptions",
                "inferscope.request.external_id",
                "gen_ai.latency.time_in_queue",
            )


def test_attributes_of_the_engines_choice_go_nowhere(finals: Finals) -> None:
    secret = "the prompt, by mistake"
    request = replace(finals.requests[0], attributes={"prompt": secret, "note": secret})
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        exporter.on_request(request)
        assert finals.view is not None
        exporter.on_snapshot(finals.view)
        exporter.close()
        (post,) = sink.posts
        assert secret.encode() not in post.SerializeToString()
        assert request.request_id.encode() in post.SerializeToString()


def test_synthetic_recordings_are_marked_and_unknown_engines_have_no_model(finals: Finals) -> None:
    from dataclasses import replace as changed

    assert finals.view is not None
    (engine,) = finals.view.engines
    unknown = replace(finals.requests[0], engine_id="another")
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        exporter.on_request(finals.requests[0])
        exporter.on_request(unknown)
        exporter.on_snapshot(changed(finals.view, engines=(changed(engine, is_synthetic=True),)))
        exporter.close()
        synthetic, real = sink.roots()
    assert synthetic.resource["inferscope.synthetic"] is True
    assert "inferscope.synthetic" not in real.resource
    assert real.name == "text_completion"
    assert real.resource["service.instance.id"] == "another"
    assert not any("model" in name for name in real.attributes if name.startswith("gen_ai.re"))
    assert synthetic.span.trace_id != real.span.trace_id


def test_environment_may_name_the_resource(finals: Finals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-1,host.name=node-7")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "by-environment")
    resource = export(finals, finals.requests[:1])[0].resource
    assert resource["k8s.pod.name"] == "pod-1"
    assert resource["host.name"] == "node-7"
    assert resource["service.name"] == "by-environment"


def test_no_span_grows_with_the_number_of_tokens(sent: Sink) -> None:
    for each in sent.spans():
        assert len(json.dumps(each.attributes)) < 4000
        assert len(each.span.events) <= 128
