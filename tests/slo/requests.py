"""A request that went well, to be changed."""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest

MS = 1_000_000

FINE = FinalRequest(
    engine_id="e", request_id="r", external_id=None, trace="", attributes={}, prompt_tokens=1,
    cached_tokens=0, output_tokens=3, arrived_ns=0, queued_ns=0, admitted_ns=0,
    first_token_ns=100 * MS, last_token_ns=300 * MS, delivered_ns=310 * MS,
    arrived_at="engine", delivered_at="engine", finish="stop", joined_late=False,
    num_preemptions=0, ledger_ns={"queue": 100 * MS, "decode_own": 210 * MS},
    ttft_ledger_ns={"queue": 100 * MS},
    token_times_ns=array("q", [100 * MS, 180 * MS, 300 * MS]), tokens_per_event=(1, 1, 1),
    prefill_ns=0, decode_ns=0, prefill_flops=None, decode_flops=None, is_alone=True, fit_id="",
    clock="host",
)  # fmt: skip
"""First token after 100 ms, gaps of 80 and 120 ms, 100 ms a token."""

IN_ONE_PIECE = replace(FINE, attributes={"stream": "false"})
ONE_TOKEN = replace(
    FINE,
    output_tokens=1,
    last_token_ns=100 * MS,
    token_times_ns=array("q", [100 * MS]),
    tokens_per_event=(1,),
)
NO_TOKEN = replace(
    FINE,
    output_tokens=0,
    first_token_ns=None,
    last_token_ns=None,
    token_times_ns=array("q"),
    tokens_per_event=(),
    ttft_ledger_ns={},
)
"""It lived as long."""
