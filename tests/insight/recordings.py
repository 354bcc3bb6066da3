"""Recordings to be compared: requests of a server with one queue, whose speed varies slowly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from inferscope.fold import FinalRequest
from inferscope.insight.compare import Columns, RecordingComparison, columns_of, compare_recordings
from tests.insight.test_compare import request
from tests.slo.requests import MS

NUM = 120


def recording(
    seed: int,
    *,
    load_seed: int | None = None,
    num: int = NUM,
    prefill: float = 1.0,
    gap: float = 1.0,
    prompt: float = 1.0,
    named: bool = False,
) -> list[FinalRequest]:
    """Return a recording's requests.

    Args:
        seed: seed of the server's noise.
        load_seed: seed of arrivals and lengths; None for one of its own.
        num: number of requests.
        prefill: factor of the time of a prompt's token.
        gap: factor of the time between tokens.
        prompt: factor of the lengths of prompts.
        named: whether the requests have names that another recording of the load has too.
    """
    load = np.random.default_rng([1, seed if load_seed is None else load_seed])
    draw = np.random.default_rng([2, seed])
    at_ns = np.cumsum(load.exponential(250 * MS, size=num)).round().astype(int).tolist()
    prompts = (prompt * load.lognormal(6, 0.5, size=num)).round().astype(int).tolist()
    answers = load.integers(4, 30, size=num).tolist()
    made: list[FinalRequest] = []
    free_ns, speed = 0, 0.0
    for number in range(num):
        speed = 0.8 * speed + draw.normal(0, 0.03)  # of the machine: it lasts for a few requests
        slowness = float(np.exp(speed))
        start_ns = max(at_ns[number], free_ns)
        prefill_ns = round(0.2 * MS * prompts[number] * prefill * slowness)
        noise = draw.lognormal(0, 0.2, size=answers[number] - 1)
        gaps_ns = (5 * MS * gap * slowness * noise).round().astype(int).tolist()
        free_ns = start_ns + prefill_ns
        one = request(
            at_ns=at_ns[number],
            queue_ns=start_ns - at_ns[number],
            prefill_ns=prefill_ns,
            gaps_ns=gaps_ns,
        )
        made.append(
            replace(
                one,
                external_id=f"load-{number:06d}" if named else None,
                prompt_tokens=prompts[number],
            )
        )
    return made


def scaled(requests: Sequence[FinalRequest], factor: int) -> list[FinalRequest]:
    """Return requests with all their times multiplied."""
    return [
        replace(
            one,
            arrived_ns=one.arrived_ns * factor,
            first_token_ns=None if one.first_token_ns is None else one.first_token_ns * factor,
            last_token_ns=None if one.last_token_ns is None else one.last_token_ns * factor,
            delivered_ns=one.delivered_ns * factor,
            ledger_ns={cause: ns * factor for cause, ns in one.ledger_ns.items()},
            ttft_ledger_ns={cause: ns * factor for cause, ns in one.ttft_ledger_ns.items()},
            token_times_ns=type(one.token_times_ns)(
                "q", [ns * factor for ns in one.token_times_ns]
            ),
            prefill_ns=one.prefill_ns * factor,
            decode_ns=one.decode_ns * factor,
        )
        for one in requests
    ]


def compared(
    a: Sequence[FinalRequest] | Columns, b: Sequence[FinalRequest] | Columns, *, level: float = 0.95
) -> RecordingComparison:
    """Compare two recordings."""
    columns = (each if isinstance(each, Columns) else columns_of(each) for each in (a, b))
    return compare_recordings(*columns, level=level, seed=0)
