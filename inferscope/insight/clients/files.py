"""Files of load generators as requests, each with the ID by which the server knows it.

AIPerf            profile_export.jsonl   the X-Request-ID that it sent
GuideLLM          benchmarks.json        the id of the response; it sends none of its own
inferscope load   --out FILE             the X-Request-Id that it sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from inferscope.errors import BadInput

_MOST_BYTES = 1 << 30
_WARM_UP = "warmup"
"""AIPerf's name of the phase that its own figures leave out."""
_UNIT_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}


class ClientRequest(msgspec.Struct, frozen=True):
    """One request as its client measured it; unknown is None."""

    id: str | None
    """ID that the server knows too; None where the client has none."""
    start_real_ns: int | None
    """Wall time at which the request was sent, since the Unix epoch."""
    ttft_ns: int | None
    e2e_ns: int | None
    """Time from sending to the last token."""
    itl_ns: int | None
    """Mean time per token after the first."""
    output_tokens: int | None
    error: str = ""
    """Reason why the request did not finish; empty if it did."""
    is_warm_up: bool = False
    """Whether the client leaves the request out of its own figures."""


class ClientFile(msgspec.Struct, frozen=True):
    """Requests of one load."""

    client: str
    """Name of the load generator."""
    requests: tuple[ClientRequest, ...]


def read_client_file(path: Path) -> ClientFile:
    """Read the file of a load generator.

    Raises:
        BadInput: the file cannot be read, or is of no known load generator.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}. Give another file.") from error
    if len(content) > _MOST_BYTES:
        raise BadInput(f"{path} is larger than {_MOST_BYTES >> 30} GiB. Split it.")
    for client, parse in _PARSERS.items():
        requests = parse(content)
        if requests is not None:
            return ClientFile(client, tuple(requests))
    raise BadInput(
        f"{path} is no file of a known load generator. Give AIPerf's profile_export.jsonl, "
        "GuideLLM's JSON report, or what `inferscope load --out` wrote."
    )


class _Timings(msgspec.Struct):
    request_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None


class _Info(msgspec.Struct):
    timings: _Timings
    error: str | None = None


class _Tokens(msgspec.Struct):
    text_tokens: int | None = None


class _GuidellmRequest(msgspec.Struct):
    info: _Info
    response_id: str | None = None
    output_metrics: _Tokens = msgspec.field(default_factory=_Tokens)


class _GuidellmRequests(msgspec.Struct):
    successful: list[_GuidellmRequest] | None
    errored: list[_GuidellmRequest] | None
    incomplete: list[_GuidellmRequest] | None


class _GuidellmBenchmark(msgspec.Struct):
    requests: _GuidellmRequests


class _GuidellmReport(msgspec.Struct):
    benchmarks: list[_GuidellmBenchmark]


def _guidellm(content: bytes) -> list[ClientRequest] | None:
    try:
        report = msgspec.json.decode(content, type=_GuidellmReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = []
    for benchmark in report.benchmarks:
        requests = benchmark.requests
        for status in ("successful", "errored", "incomplete"):
            reason = "" if status == "successful" else status
            found += [_of_guidellm(each, reason) for each in getattr(requests, status) or ()]
    return found


def _of_guidellm(request: _GuidellmRequest, reason: str) -> ClientRequest:
    times, tokens = request.info.timings, request.output_metrics.text_tokens
    start_s, first_s = times.request_start, times.first_token_iteration
    ttft_ns, e2e_ns = _apart_ns(start_s, first_s), _apart_ns(start_s, times.last_token_iteration)
    return ClientRequest(
        request.response_id,
        None if start_s is None else round(1e9 * start_s),
        ttft_ns,
        e2e_ns,
        _per_token_ns(ttft_ns, e2e_ns, tokens),
        tokens,
        reason and (request.info.error or reason),
    )


class _Metadata(msgspec.Struct):
    request_start_ns: int
    x_request_id: str | None = None
    benchmark_phase: str = ""
    was_cancelled: bool = False


class _Metric(msgspec.Struct):
    value: Any = None
    unit: str = ""


class _Failure(msgspec.Struct):
    type: str | None = None
    message: str | None = None


class _AiperfLine(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric]
    error: _Failure | None = None


def _aiperf(content: bytes) -> list[ClientRequest] | None:
    lines = _lines(content, msgspec.json.Decoder(_AiperfLine).decode)
    return None if lines is None else [_of_aiperf(line) for line in lines]


def _of_aiperf(line: _AiperfLine) -> ClientRequest:
    error, metadata = line.error, line.metadata
    reason = "" if error is None else error.type or error.message or "failed"
    reason = reason or ("cancelled" if metadata.was_cancelled else "")
    tokens = line.metrics.get("output_sequence_length")
    return ClientRequest(
        metadata.x_request_id,
        # As the start of a failed request, AIPerf writes the time at which it noted the failure.
        None if reason else metadata.request_start_ns,
        _metric_ns(line, "time_to_first_token"),
        _metric_ns(line, "request_latency"),
        _metric_ns(line, "inter_token_latency"),
        None if tokens is None or not isinstance(tokens.value, int | float) else int(tokens.value),
        reason,
        is_warm_up=metadata.benchmark_phase == _WARM_UP,
    )


def _metric_ns(line: _AiperfLine, name: str) -> int | None:
    metric = line.metrics.get(name)
    if metric is None or not isinstance(metric.value, int | float) or metric.unit not in _UNIT_NS:
        return None
    return round(metric.value * _UNIT_NS[metric.unit])


class _LoadLine(msgspec.Struct):
    name: str
    sent_ns: int
    sent_at_unix_ns: int
    outcome: str
    tokens: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    output_tokens: int | None = None
    error: str = ""


def _load(content: bytes) -> list[ClientRequest] | None:
    lines = _lines(content, msgspec.json.Decoder(_LoadLine).decode)
    return None if lines is None else [_of_load(line) for line in lines]


def _of_load(line: _LoadLine) -> ClientRequest:
    first_ns, last_ns = line.first_token_ns, line.last_token_ns
    ttft_ns = None if first_ns is None else first_ns - line.sent_ns
    e2e_ns = None if last_ns is None else last_ns - line.sent_ns
    tokens = line.tokens if line.output_tokens is None else line.output_tokens
    return ClientRequest(
        line.name,
        line.sent_at_unix_ns,
        ttft_ns,
        e2e_ns,
        _per_token_ns(ttft_ns, e2e_ns, tokens),
        tokens,
        "" if line.outcome == "finished" else line.error or line.outcome,
    )


_PARSERS: dict[str, Callable[[bytes], list[ClientRequest] | None]] = {
    "GuideLLM": _guidellm,
    "AIPerf": _aiperf,
    "inferscope load": _load,
}
"""Parsers by the load generator's name; each returns None for another's file."""


def _lines(content: bytes, decode: Callable[[bytes], Any]) -> list[Any] | None:
    """Return a file's lines; None if one is of another type, or if there is none."""
    try:
        return list(map(decode, _full_lines(content))) or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _full_lines(content: bytes) -> Iterator[bytes]:
    return (line for line in content.splitlines() if line.strip())


def _apart_ns(start_s: float | None, end_s: float | None) -> int | None:
    return None if start_s is None or end_s is None else round(1e9 * (end_s - start_s))


def _per_token_ns(ttft_ns: int | None, e2e_ns: int | None, tokens: int | None) -> int | None:
    if ttft_ns is None or e2e_ns is None or tokens is None or tokens < 2:
        return None
    return round((e2e_ns - ttft_ns) / (tokens - 1))
