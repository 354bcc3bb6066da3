"""Causes, to which a request's elapsed time is booked: one row for each.

Ledgers, screens, `why`, findings and exporters name causes by this table, and a test compares
docs/numbers.md with it. A new cause is a row here, the place in `inferscope.attribution.ledger`
that books it, and its tests.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

CausePhase = Literal["prefill", "decode", ""]
"""Phase that a cause belongs to; empty for time outside both."""


class Cause(NamedTuple):
    """One cause of latency."""

    name: str
    label: str
    """Meaning in a few words, for a row of a screen."""
    meaning: str
    """Meaning in a sentence of a finding."""
    advice: str
    """What to do if it is large."""
    phase: CausePhase = ""
    is_loss: bool = False
    """Whether it is work lost or a fault, rather than service or fair waiting."""
    is_own: bool = False
    """Whether it is the request's own computation, which no other request changes."""
    is_reserved: bool = False
    """Whether nothing books it yet."""
    blamed: str = ""
    """Requests that are blamed for it, and by what weight; empty if it lies with none."""


_HOST = "Give the engine's process and its front ends dedicated cores: the host is too slow."
_OTHERS = "Lower the batch limit, or prefill on separate workers (disaggregation)."
_MORE = "Load exceeds capacity: add replicas, or slots or KV blocks where those are short."
_MEMORY = "Give the KV cache more memory, or admit fewer requests at once."

CAUSE_ROWS: tuple[Cause, ...] = (
    Cause(
        "upstream",
        "before reaching this server",
        "before the request reached this server",
        "Check the router or load balancer in front of this server: the time is spent there.",
        is_reserved=True,
    ),
    Cause("frontend", "parse, template, tokenise", "parsing, chat template and tokenising", _HOST),
    Cause(
        "encode",
        "images and audio",
        "encoding images and audio",
        "Send smaller images, or encode on separate workers.",
        is_own=True,
        is_reserved=True,
    ),
    Cause(
        "queue",
        "waiting for admission",
        "waiting for admission",
        _MORE,
        blamed="by what the head of the queue lacked: slots, KV blocks, tokens or added time",
    ),
    Cause(
        "queue_idle",
        "waiting while the device was idle",
        "waiting for admission while the device was idle",
        _MORE,
    ),
    Cause(
        "kv_load",
        "loading cached KV",
        "loading cached KV from a slower tier",
        "Keep more of the KV cache on the device, or compute short prefixes again.",
        is_reserved=True,
    ),
    Cause(
        "prefill_own",
        "computing its own prompt",
        "computing the request's own prompt",
        "Shorten prompts, serve shared prefixes from the prefix cache, or use a faster device or "
        "more of them: the time is the prompt's own computation.",
        phase="prefill",
        is_own=True,
    ),
    Cause(
        "prefill_co_batched",
        "other prompts in the same steps",
        "other prompts computed in the same steps",
        _OTHERS,
        phase="prefill",
        blamed="other prefills in its steps, by time added to the prefills",
    ),
    Cause(
        "prefill_interference",
        "decodes in the same steps",
        "decodes computed in the same steps as the prompt",
        _OTHERS,
        phase="prefill",
        blamed="decodes in its prefill steps, by added time",
    ),
    Cause(
        "decode_own",
        "decoding its own tokens",
        "decoding its own tokens",
        "The time is each token's own computation: use a faster device, more of them, a smaller or "
        "quantised model, or speculative decoding.",
        phase="decode",
        is_own=True,
    ),
    Cause(
        "decode_co_batched",
        "other decodes in the same steps",
        "other decodes in the same steps",
        "Lower the batch limit: batches are too large for the latency.",
        phase="decode",
        blamed="other decodes in its steps, by time added to the decodes",
    ),
    Cause(
        "decode_interference",
        "prefills in the same steps",
        "others' prompts computed in the same steps",
        "Lower the token budget of a step, so that prompts are computed in smaller chunks.",
        phase="decode",
        blamed="prefills in its steps, by added time",
    ),
    Cause(
        "draft",
        "speculative drafts",
        "drafting tokens for speculative decoding",
        "Propose fewer tokens, or use a smaller draft.",
        phase="decode",
        is_own=True,
    ),
    Cause(
        "rank_wait",
        "waiting for the slowest rank",
        "waiting for the slowest rank",
        "Check that rank's device and host: clocks held down, cores shared, a slower link.",
    ),
    Cause(
        "slowdown",
        "steps slower than predicted",
        "steps slower than predicted",
        "Look for other processes on the device and for clock throttling.",
        is_loss=True,
    ),
    Cause(
        "cold_start",
        "first use of a shape, compilation",
        "first uses of shapes, captures and compilation",
        "Warm the server up before it receives traffic.",
    ),
    Cause(
        "cpu_gap",
        "scheduler and host between steps",
        "the device waits for the scheduler and the host",
        _HOST,
    ),
    Cause(
        "not_scheduled",
        "admitted but skipped",
        "admitted but skipped",
        "Raise the token budget of a step, or lower the batch limit.",
        is_loss=True,
    ),
    Cause(
        "preempted",
        "evicted, waiting to resume",
        "evicted from the KV cache, waiting to resume",
        _MEMORY,
        is_loss=True,
        blamed="holders of KV blocks when it lost its own, by blocks",
    ),
    Cause(
        "recompute",
        "recomputing lost tokens",
        "recomputing tokens lost to an eviction",
        _MEMORY,
        is_loss=True,
    ),
    Cause(
        "kv_transfer",
        "KV moving between workers",
        "moving the KV cache between workers",
        "Check the link between prefill and decode workers, and at how many transfers share it.",
    ),
    Cause(
        "paused",
        "engine paused",
        "the engine was paused",
        "Remove a replica from the load balancer before pausing it.",
    ),
    Cause(
        "engine_lost",
        "engine exited or crashed",
        "the engine ended with the request in flight",
        "Read the engine's log: it exited with requests in flight.",
        is_loss=True,
    ),
    Cause("output", "sampling, detokenise, send", "sampling, detokenising and sending", _HOST),
    Cause(
        "delivery",
        "waiting for the client to read",
        "waiting for the client to read the response, and closing it",
        "Check the clients and the network to them: they read slower than tokens arrive.",
    ),
)
CAUSES = tuple(row.name for row in CAUSE_ROWS)
"""Names of all causes, in the order of a request's life."""
CAUSE_BY_NAME = {row.name: row for row in CAUSE_ROWS}


def cause_named(name: str) -> Cause:
    """Return a cause's row, also for a name that only a newer version knows."""
    return CAUSE_BY_NAME.get(name) or Cause(
        name,
        "a cause of a newer version",
        "a cause of a newer version",
        "Update InferScope to read it.",
    )
