"""Meaning of each ledger row, and advice on a large one."""

from __future__ import annotations

from typing import NamedTuple


class CauseAdvice(NamedTuple):
    """Meaning and advice of one cause."""

    meaning: str
    advice: str


_HOST = "Give the engine's process and its front ends dedicated cores: the host is too slow."
_OTHERS = "Lower the batch limit, or prefill on separate workers (disaggregation)."
_MORE = "Load exceeds capacity: add replicas, or slots or KV blocks where those are short."
_LARGE = "The requests are too large for the objective on this device: change either."
_PROMPTS = (
    "Shorten prompts, serve shared prefixes from the prefix cache, or use a faster device "
    "or more of them: the time is the prompt's own computation."
)
_TOKENS = (
    "The time is each token's own computation: use a faster device, more of them, a "
    "smaller or quantised model, or speculative decoding."
)
_MEMORY = "Give the KV cache more memory, or admit fewer requests at once."

ROWS: dict[str, CauseAdvice] = {
    "upstream": CauseAdvice(
        "before the request reached this server",
        "Check the router or load balancer in front of this server: the time is spent there.",
    ),
    "frontend": CauseAdvice("parsing, chat template and tokenising", _HOST),
    "encode": CauseAdvice(
        "encoding images and audio", "Send smaller images, or encode on separate workers."
    ),
    "queue": CauseAdvice("waiting for admission", _MORE),
    "queue_idle": CauseAdvice("waiting for admission while the device was idle", _MORE),
    "kv_load": CauseAdvice(
        "loading cached KV from a slower tier",
        "Keep more of the KV cache on the device, or compute short prefixes again.",
    ),
    "prefill_own": CauseAdvice("computing the request's own prompt", _PROMPTS),
    "prefill_co_batched": CauseAdvice("other prompts computed in the same steps", _OTHERS),
    "prefill_interference": CauseAdvice(
        "decodes computed in the same steps as the prompt", _OTHERS
    ),
    "decode_own": CauseAdvice("decoding its own tokens", _TOKENS),
    "decode_co_batched": CauseAdvice(
        "other decodes in the same steps",
        "Lower the batch limit: batches are too large for the latency.",
    ),
    "decode_interference": CauseAdvice(
        "others' prompts computed in the same steps",
        "Lower the token budget of a step, so that prompts are computed in smaller chunks.",
    ),
    "draft": CauseAdvice(
        "drafting tokens for speculative decoding", "Propose fewer tokens, or use a smaller draft."
    ),
    "rank_wait": CauseAdvice(
        "waiting for the slowest rank",
        "Check that rank's device and host: clocks held down, cores shared, a slower link.",
    ),
    "slowdown": CauseAdvice(
        "steps slower than predicted",
        "Look for other processes on the device and for clock throttling.",
    ),
    "cold_start": CauseAdvice(
        "first uses of shapes, captures and compilation",
        "Warm the server up before it receives traffic.",
    ),
    "cpu_gap": CauseAdvice("the device waits for the scheduler and the host", _HOST),
    "not_scheduled": CauseAdvice(
        "admitted but skipped",
        "Raise the token budget of a step, or lower the batch limit.",
    ),
    "preempted": CauseAdvice("evicted from the KV cache, waiting to resume", _MEMORY),
    "recompute": CauseAdvice("recomputing tokens lost to an eviction", _MEMORY),
    "kv_transfer": CauseAdvice(
        "moving the KV cache between workers",
        "Check the link between prefill and decode workers, and at how many transfers share it.",
    ),
    "paused": CauseAdvice(
        "the engine was paused", "Remove a replica from the load balancer before pausing it."
    ),
    "engine_lost": CauseAdvice(
        "the engine ended with the request in flight",
        "Read the engine's log: it exited with requests in flight.",
    ),
    "output": CauseAdvice("sampling, detokenising and sending", _HOST),
    "delivery": CauseAdvice(
        "waiting for the client to read the response, and closing it",
        "Check the clients and the network to them: they read slower than tokens arrive.",
    ),
}

OF_OBJECTIVE = {
    "prefill_own": _LARGE,
    "decode_own": _LARGE,
    "shed": "Load exceeds capacity: add replicas, or raise the engine's queue limit.",
}
"""Advice that differs under an objective, and for causes that are not ledger rows."""


def advice_for(cause: str) -> CauseAdvice:
    """Return the meaning and advice of a cause, also of an unknown one."""
    return ROWS.get(
        cause, CauseAdvice("a cause of a newer version", "Update InferScope to read it.")
    )
