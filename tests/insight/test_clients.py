"""Files that load generators wrote against `inferscope serve builtin`, beside its recording.

`guidellm.json` is GuideLLM 0.8.1's report without its summaries, requests and outputs; `load.jsonl`
is as `inferscope load --out` wrote it. AIPerf 0.13.0 wrote `aiperf.jsonl`, of a run with warm-up
and cancelled requests, beside `aiperf.isr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from inferscope.errors import BadInput
from inferscope.fold import FinalRequest
from inferscope.insight.clients import ClientFile, JoinSink, join, read_client_file
from inferscope.insight.clients.joining import _CLOCKS_NS
from inferscope.probe import digits
from inferscope.readers import catch_up, open_source
from inferscope.text.joined import join_json, join_text
from tests.cli.documents import check_document

FOLDER = Path(__file__).parent / "clients"
FILES = {"guidellm.json": "GuideLLM", "load.jsonl": "inferscope load"}


def read(recording: Path) -> tuple[list[FinalRequest], int]:
    sink = JoinSink()
    source = open_source(recording, sinks=(sink,))
    catch_up(source, patience_s=60)
    source.close()
    assert source.collector.real_offset_ns is not None
    return sink.requests, source.collector.real_offset_ns


@pytest.fixture(scope="module")
def recorded() -> tuple[list[FinalRequest], int]:
    return read(FOLDER / "clients.isr")


@pytest.mark.parametrize("name", FILES)
def test_every_request_of_a_client_is_found_and_its_difference_is_the_sum_of_its_parts(
    name: str, recorded: tuple[list[FinalRequest], int]
) -> None:
    requests, offset_ns = recorded
    file = read_client_file(FOLDER / name)
    assert file.client == FILES[name]
    joined = join(file, requests, offset_ns)
    assert joined.num_matched == joined.num_client == len(file.requests) > 0
    assert joined.no_parts == ""
    assert {each.side for each in joined.unmatched} == {"server"}
    assert sum(each.num for each in joined.unmatched) == len(requests) - joined.num_matched
    seen = {request.request_id: request for request in requests}
    for row, sent in zip(joined.requests, file.requests, strict=True):
        final = seen[row.request_id]
        assert final.first_token_ns is not None
        assert row.server_ttft_ns == final.first_token_ns - final.arrived_ns
        assert row.client_ttft_ns == sent.ttft_ns
        assert row.before_ns is not None
        assert row.after_ns is not None
        assert row.client_ttft_ns == row.server_ttft_ns + row.before_ns + row.after_ns
        assert min(row.before_ns, row.after_ns) >= -_CLOCKS_NS
        assert sent.output_tokens == final.output_tokens
    assert joined.ttft is not None
    assert joined.ttft.num == joined.num_matched
    assert joined.ttft.difference_mean_ns == pytest.approx(
        joined.ttft.client_mean_ns - joined.ttft.server_mean_ns, abs=1
    )
    text = join_text(joined)
    assert f"{joined.num_matched} of {joined.num_client} requests of {FILES[name]}" in text
    check_document("join", join_json(joined, source="clients.isr", file=name))


def changed(file: ClientFile, idx: int, **fields: object) -> ClientFile:
    requests = list(file.requests)
    requests[idx] = msgspec.structs.replace(requests[idx], **fields)
    return msgspec.structs.replace(file, requests=tuple(requests))


def reasons(joined_unmatched: Sequence[object]) -> dict[str, int]:
    return {each.reason: each.num for each in joined_unmatched if each.side == "client"}  # type: ignore[attr-defined]


def test_requests_without_a_partner_are_counted_by_reason(
    recorded: tuple[list[FinalRequest], int],
) -> None:
    requests, offset_ns = recorded
    whole = read_client_file(FOLDER / "load.jsonl")
    file = changed(whole, 0, id=None)
    file = changed(file, 1, id="never-sent")
    file = changed(file, 2, id="refused", error="HTTP 503", ttft_ns=None)
    twin = next(each for each in requests if each.external_id == file.requests[3].id)
    joined = join(file, [*requests, msgspec.structs.replace(twin)], offset_ns)
    assert joined.num_matched == len(file.requests) - 4
    assert reasons(joined.unmatched) == {
        "the client's file has no ID for it": 1,
        "the recording has no request of this ID": 1,
        "the recording has no request of this ID; it failed at the client (HTTP 503)": 1,
        "the recording has several requests of this ID": 1,
    }
    assert "never-sent" in join_text(joined)


def test_clocks_that_differ_leave_the_difference_and_take_its_parts(
    recorded: tuple[list[FinalRequest], int],
) -> None:
    requests, offset_ns = recorded
    file = read_client_file(FOLDER / "load.jsonl")
    joined = join(file, requests, offset_ns - 3_600_000_000_000)
    same = join(file, requests, offset_ns)
    assert joined.ttft == same.ttft
    assert (joined.before_mean_ns, joined.after_mean_ns) == (None, None)
    assert "clocks of client and server differ by 35999" in joined.no_parts
    assert "parts are unknown" in " ".join(join_text(joined).split())
    assert join(file, requests, None).no_parts == "the recording has no wall clock"


def test_names_that_the_server_recorded_as_digits_are_found(
    recorded: tuple[list[FinalRequest], int],
) -> None:
    requests, offset_ns = recorded
    hidden = [
        msgspec.structs.replace(each, external_id=digits(each.external_id), attributes={})
        for each in requests
        if each.external_id is not None
    ]
    file = read_client_file(FOLDER / "load.jsonl")
    assert join(file, hidden, offset_ns).num_matched == len(file.requests)


def test_aiperfs_warm_up_is_left_out_and_its_cancelled_request_leaves_the_parts_known() -> None:
    requests, offset_ns = read(FOLDER / "aiperf.isr")
    path = FOLDER / "aiperf.jsonl"
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    warm_up = {line["metadata"]["x_request_id"] for line in lines[:2]}
    assert {line["metadata"]["benchmark_phase"] for line in lines[:2]} == {"warmup"}
    joined = join(read_client_file(path), requests, offset_ns)
    (unmatched,) = joined.unmatched
    assert (unmatched.side, set(unmatched.examples)) == ("client", warm_up)
    assert (joined.num_client, joined.num_server, joined.num_matched) == (14, 14, 12)
    assert joined.no_parts == ""
    (failed,) = [row for row in joined.requests if row.error]
    assert (failed.error, failed.finish) == ("RequestCancellationError", "client_cancel")
    assert (failed.client_ttft_ns, failed.client_e2e_ns, failed.before_ns) == (None, None, None)
    whole = [row for row in joined.requests if not row.error]
    for row in whole:
        assert row.client_ttft_ns is not None
        assert row.server_ttft_ns is not None
        assert row.before_ns is not None
        assert row.after_ns is not None
        assert row.client_ttft_ns == row.server_ttft_ns + row.before_ns + row.after_ns
        assert min(row.before_ns, row.after_ns) >= -_CLOCKS_NS
    assert joined.ttft is not None
    written_ms = [line["metrics"].get("time_to_first_token") for line in lines[2:]]
    known_ms = [metric["value"] for metric in written_ms if metric]
    assert len(known_ms) == joined.ttft.num == len(whole)
    assert joined.ttft.client_mean_ns == pytest.approx(1e6 * sum(known_ms) / len(known_ms), abs=1)
    text = join_text(joined)
    assert "1 of them did not finish at the client: 1 RequestCancellationError" in text
    assert "unmatched at the client: 2, warm-up" in text
    check_document("join", join_json(joined, source="aiperf.isr", file="aiperf.jsonl"))


def test_lines_of_aiperf_keep_their_units_and_need_no_id(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_text(
        '{"metadata":{"x_request_id":"a","request_start_ns":5,"was_cancelled":false},"metrics":'
        '{"time_to_first_token":{"value":4.5,"unit":"ms"},"request_latency":{"value":1,"unit":'
        '"sec"},"inter_chunk_latency":{"value":[1.0,2.0],"unit":"ms"},"output_sequence_length":'
        '{"value":9,"unit":"tokens"}},"error":null}\n'
        '{"metadata":{"x_request_id":null,"request_start_ns":7},"metrics":{}}\n'
    )
    file = read_client_file(path)
    first, second = file.requests
    assert (file.client, first.id, first.start_real_ns) == ("AIPerf", "a", 5)
    assert (first.ttft_ns, first.e2e_ns, first.itl_ns) == (4_500_000, 1_000_000_000, None)
    assert (first.output_tokens, first.error) == (9, "")
    assert (second.id, second.start_real_ns, second.error) == (None, 7, "")


@pytest.mark.parametrize("content", ["", "hello\n", "{}\n", '{"benchmarks": 3}', "[1, 2]", "\xff"])
def test_a_file_of_no_load_generator_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "client.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match="no file of a known load generator"):
        read_client_file(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_client_file(tmp_path / "missing.json")
