"""Attributes of spans; unknown values are left out.

A total of a request that was observed only in part (`joined_late`) is unknown.
"""

from __future__ import annotations

import math
import re
from typing import TypeAlias

from inferscope.fold import FinalRequest, RequestCounters
from inferscope.records import CAUSES
from inferscope_otlp import names
from inferscope_otlp.facts import PhaseSteps
from inferscope_otlp.finished import EngineResource, Finished
from inferscope_otlp.trace_sampling import FAILURES

Value: TypeAlias = "str | bool | int | float | tuple[str, ...] | tuple[float, ...]"
Attributes: TypeAlias = "dict[str, Value]"
_NS_PER_S = 1e9
_COUNTED = {
    "sm_active_ns": (names.SM_ACTIVE, _NS_PER_S),
    "hbm_read_bytes": (names.HBM_READ_BYTES, 0),
    "hbm_write_bytes": (names.HBM_WRITE_BYTES, 0),
    "energy_uj": (names.ENERGY, 1e6),
}
"""Attribute and divisor by counter; counts stay integers."""
_WHOLE_NUMBERS = {
    "max_tokens": names.REQUEST_MAX_TOKENS,
    "seed": names.REQUEST_SEED,
    "n": names.REQUEST_CHOICE_COUNT,
}
_NUMBERS = {
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
    "top_k": names.REQUEST_TOP_K,
    "frequency_penalty": names.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": names.REQUEST_PRESENCE_PENALTY,
}
"""Sampling parameters recorded by front ends; the conventions use doubles for each, also top_k."""
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_MOST_BLAMED = 3
_BEGINNING_WITH = {
    word: frozenset(cause for cause in CAUSES if cause.startswith(word))
    for word in ("queue", "prefill", "decode")
}
_PORT = re.compile(r"[0-9]{1,5}")


def operation_of(request: FinalRequest) -> str:
    """Return the operation of the request's endpoint."""
    endpoint = request.attributes.get("endpoint", "").rstrip("/")
    for ending, operation in names.OPERATION_OF_ENDPOINT.items():
        if endpoint.endswith(ending):
            return operation
    return names.DEFAULT_OPERATION


def root_attributes(
    finished: Finished, engine: EngineResource, operation: str, residual: float | None
) -> Attributes:
    """Return the attributes of the whole request.

    Only these few of the engine's attributes are passed on: none can hold a prompt.
    """
    request, given = finished.request, finished.request.attributes
    is_whole = not request.joined_late
    has_ledger = is_whole and not request.ledger_missing
    is_failure = request.finish in FAILURES
    port = given.get(names.SERVER_PORT, "")
    stream = given.get("stream", "").lower()
    attributes = _known(
        {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: engine.kind or None,
            names.REQUEST_MODEL: engine.model or None,
            names.CONVERSATION_ID: request.conversation or None,
            names.RESPONSE_ID: given.get("response_id"),
            names.RESPONSE_MODEL: engine.model or None,
            names.REQUEST_STREAM: {"true": True, "false": False}.get(stream),
            names.FINISH_REASONS: (
                (request.finish,) if request.finish in ("stop", "length") else None
            ),
            names.INPUT_TOKENS: request.prompt_tokens,
            names.OUTPUT_TOKENS: request.output_tokens if is_whole else None,
            names.CACHED_TOKENS: None if request.admitted_ns is None else request.cached_tokens,
            names.REASONING_TOKENS: request.reasoning_tokens,
            names.SERVER_ADDRESS: given.get(names.SERVER_ADDRESS),
            names.SERVER_PORT: int(port) if _PORT.fullmatch(port) else None,
            names.ERROR_TYPE: request.finish if is_failure else None,
            names.REQUEST_ID_OF_ENGINES: request.request_id,
            names.REQUEST_ID: request.request_id,
            names.EXTERNAL_ID: request.external_id,
            names.TENANT: given.get("tenant"),
            names.PRIORITY: given.get("priority"),
            names.ADAPTER: request.adapter or None,
            names.ENDPOINT: given.get("endpoint"),
            names.FINISH: request.finish,
            names.ARRIVED_AT: request.arrived_at,
            names.DELIVERED_AT: request.delivered_at,
            names.JOINED_LATE: True if request.joined_late else None,
            names.LEDGER_MISSING: request.ledger_missing or None,
            names.PREEMPTIONS: request.num_preemptions if has_ledger else None,
            names.METHOD: _method(request),
            names.UNCERTAINTY: _uncertainty(request, residual),
            names.CLOCK: request.clock,
            names.SLO_CAUSE: finished.cause,
        }
    )
    attributes |= _sampling_attributes(given)
    attributes |= _latencies(request)
    for name, is_good in finished.verdicts.items():
        attributes[names.SLO + name] = "good" if is_good else "bad"
    if finished.verdicts and "goodput" not in finished.verdicts:
        is_good = all(finished.verdicts.values()) and not is_failure
        attributes[names.SLO + "goodput"] = "good" if is_good else "bad"
    if has_ledger:
        attributes[names.GPU_SECONDS] = (request.prefill_ns + request.decode_ns) / _NS_PER_S
        energy_uj = [each.get("energy_uj") for each in _by_phase(request)]
        if None not in energy_uj:
            attributes[names.ENERGY] = sum(filter(None, energy_uj)) / 1e6
        for cause, spent_ns in request.ledger_ns.items():
            if spent_ns:
                attributes[names.LEDGER + cause] = spent_ns / _NS_PER_S
    return attributes


def _method(request: FinalRequest) -> str | None:
    """Return how the request's compute is known; None if it is not."""
    if request.ledger_missing:
        return None
    return "measured" if request.is_alone else "apportioned"


def _sampling_attributes(given: dict[str, str]) -> Attributes:
    """Return the client's sampling parameters; a non-numeric text is not passed on.

    A choice count of one is the default, which the conventions leave out.
    """
    found: Attributes = {
        name: int(given[word])
        for word, name in _WHOLE_NUMBERS.items()
        if word in given and _WHOLE.fullmatch(given[word])
    }
    if found.get(names.REQUEST_CHOICE_COUNT) == 1:
        del found[names.REQUEST_CHOICE_COUNT]
    for word, name in _NUMBERS.items():
        if word not in given:
            continue
        number = _number(given[word])
        if number is not None:
            found[name] = number
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _uncertainty(request: FinalRequest, residual: float | None) -> float | None:
    """Return the relative uncertainty of its share of shared steps: that of their model.

    The share of a step without other requests is measured.
    """
    if request.ledger_missing:
        return None
    if request.is_alone:
        return 0.0
    return None if residual is None else abs(residual)


def blame_attributes(request: FinalRequest, causes: str) -> Attributes:
    """Return the three requests that it waited for most, for causes with this prefix.

    Args:
        request: the waiting request.
        causes: queue, prefill or decode.
    """
    waited_ns: dict[str, int] = {}
    of_word = _BEGINNING_WITH[causes]
    for cause, other, ns in request.blame:
        if cause in of_word and other is not None:
            waited_ns[other] = waited_ns.get(other, 0) + ns
    if not waited_ns:
        return {}
    most = sorted(waited_ns.items(), key=lambda item: (-item[1], item[0]))[:_MOST_BLAMED]
    return {
        names.BLAMED_REQUESTS: tuple(other for other, _ in most),
        names.BLAMED_SECONDS: tuple(ns / _NS_PER_S for _, ns in most),
    }


def _by_phase(request: FinalRequest) -> tuple[dict[str, int], dict[str, int]]:
    return request.counters.prefill, request.counters.decode


def _latencies(request: FinalRequest) -> Attributes:
    """Return the latencies of the engines' own traces, in seconds."""
    queued, admitted = request.queued_ns, request.admitted_ns
    first, last = request.first_token_ns, request.last_token_ns
    return _known(
        {
            names.LATENCY_QUEUE: _seconds(queued, admitted),
            names.LATENCY_TTFT: (
                None if request.is_in_one_piece else _seconds(request.arrived_ns, first)
            ),
            names.LATENCY_E2E: _seconds(request.arrived_ns, last),
            names.LATENCY_PREFILL: _seconds(admitted, first),
            names.LATENCY_DECODE: _seconds(first, last),
            names.LATENCY_INFERENCE: _seconds(admitted, last),
        }
    )


def prefill_attributes(finished: Finished) -> Attributes:
    """Return the cost of the prefill, and the number of its chunks."""
    request, facts = finished.request, finished.facts
    attributes = _phase_attributes(
        finished,
        "prefill",
        spent_ns=request.prefill_ns,
        flops=request.prefill_flops,
        steps=facts.prefill if facts else None,
    )
    if facts is not None and not request.joined_late:
        attributes[names.NUM_CHUNKS] = facts.num_chunks
    return attributes


def decode_attributes(finished: Finished) -> Attributes:
    """Return the cost of decoding, and the distribution of its gaps."""
    request, facts, gaps = finished.request, finished.facts, finished.gaps
    attributes = _phase_attributes(
        finished,
        "decode",
        spent_ns=request.decode_ns,
        flops=request.decode_flops,
        steps=facts.decode if facts else None,
    )
    if gaps is not None:
        attributes[names.TBT_P50] = gaps.p50_ns / _NS_PER_S
        attributes[names.TBT_P99] = gaps.p99_ns / _NS_PER_S
        attributes[names.TBT_MAX] = gaps.max_ns / _NS_PER_S
    return attributes


def _phase_attributes(
    finished: Finished, phase: str, *, spent_ns: int, flops: int | None, steps: PhaseSteps | None
) -> Attributes:
    attributes: Attributes = {names.PHASE: phase}
    if finished.request.joined_late or finished.request.ledger_missing:
        return attributes
    waited_ns = finished.request.ledger_ns.get(f"{phase}_interference", 0)
    attributes[names.GPU_SECONDS] = spent_ns / _NS_PER_S
    attributes[names.INTERFERENCE] = waited_ns / _NS_PER_S
    if flops is not None:
        attributes[names.FLOPS] = flops
    attributes |= _counted(finished.request.counters, phase)
    attributes |= blame_attributes(finished.request, phase)
    if steps is not None:
        attributes[names.STEPS] = steps.num_steps
        if steps.num_steps:
            attributes[names.BATCH_SIZE_MEAN] = steps.sum_requests / steps.num_steps
            attributes[names.BATCH_TOKENS_MEAN] = steps.sum_tokens / steps.num_steps
    return attributes


def _counted(counters: RequestCounters, phase: str) -> Attributes:
    """Return the sampled counters of a phase, with their provenance."""
    sampled = counters.prefill if phase == "prefill" else counters.decode
    attributes: Attributes = {}
    for counted, (name, scale) in _COUNTED.items():
        if counted in sampled:
            attributes[name] = sampled[counted] / scale if scale else sampled[counted]
            how = counters.provenance[counted]
            attributes[names.COUNTERS_METHOD + counted] = how.method
            if how.error is not None:
                attributes[names.COUNTERS_ERROR + counted] = how.error
    return attributes


def _seconds(since_ns: int | None, until_ns: int | None) -> float | None:
    if since_ns is None or until_ns is None:
        return None
    return max(0, until_ns - since_ns) / _NS_PER_S


def _known(attributes: dict[str, Value | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
