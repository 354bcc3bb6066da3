"""What each row of the ledger means, and what to do about a large one."""

from __future__ import annotations

from typing import NamedTuple


class CauseAdvice(NamedTuple):
    """One cause of the ledger, in words."""

    meaning: str
    advice: str


_HOST = "Give the engine's process and its front ends cores of their own: the host is too slow."
_OTHERS = "Let fewer requests run at once, or prefill on workers of their own (disaggregation)."
_MORE = "More comes than is served: add replicas, or more slots or KV blocks where those are short."
_LARGE = "The requests are larger than the objective allows on this device: change one of them."
_PROMPTS = (
    "Shorten prompts, serve their common beginnings from the prefix cache, or use a faster device "
    "or more of them: computing the prompt itself takes that long here."
)
_TOKENS = (
    "A token takes that long on this device even alone: use a faster device, more of them, a "
    "smaller or quantised model, or speculative decoding."
)
_MEMORY = "Give the KV cache more memory, or admit fewer requests at once."

ROWS: dict[str, CauseAdvice] = {
    "upstream": CauseAdvice(
        "before the request reached this server",
        "Look at the router or load balancer in front of this server: the time is spent there.",
    ),
    "frontend": CauseAdvice("parsing, chat template and tokenising", _HOST),
    "encode": CauseAdvice(
        "encoding images and audio", "Send smaller images, or encode on workers of their own."
    ),
    "queue": CauseAdvice("waiting to be admitted", _MORE),
    "queue_idle": CauseAdvice("waiting to be admitted while the device idled", _MORE),
    "kv_load": CauseAdvice(
        "loading cached KV from a slower tier",
        "Keep more of the KV cache on the device, or compute short prefixes again.",
    ),
    "prefill_own": CauseAdvice("computing the request's own prompt", _PROMPTS),
    "prefill_co_batched": CauseAdvice("other prompts computed in the same steps", _OTHERS),
    "prefill_interference": CauseAdvice(
        "decodes computed in the same steps as the prompt", _OTHERS
    ),
    "decode_own": CauseAdvice("what its tokens take without any other request", _TOKENS),
    "decode_co_batched": CauseAdvice(
        "other requests that decode in the same steps",
        "Let fewer requests run at once: batches are too large for it.",
    ),
    "decode_interference": CauseAdvice(
        "others' prompts computed in the same steps",
        "Lower the token budget of a step: prompts come in smaller chunks then.",
    ),
    "draft": CauseAdvice(
        "drafting tokens for speculative decoding", "Propose fewer tokens, or use a smaller draft."
    ),
    "rank_wait": CauseAdvice(
        "waiting for the slowest rank",
        "Look at that rank's device and host: clocks held down, cores shared, a slower link.",
    ),
    "slowdown": CauseAdvice(
        "steps that took longer than their model",
        "Look for others on the device and for what holds its clock down.",
    ),
    "cold_start": CauseAdvice(
        "first uses of shapes, captures and compilation",
        "Warm the server up before it takes traffic.",
    ),
    "cpu_gap": CauseAdvice("the device waits for the scheduler and the host", _HOST),
    "not_scheduled": CauseAdvice(
        "admitted, but left out of steps",
        "Raise the token budget of a step, or let fewer requests run at once.",
    ),
    "preempted": CauseAdvice("evicted from the KV cache, waiting to resume", _MEMORY),
    "recompute": CauseAdvice("computing tokens again that an eviction lost", _MEMORY),
    "kv_transfer": CauseAdvice(
        "moving the KV cache between workers",
        "Look at the link between prefill and decode workers, and at how many transfers share it.",
    ),
    "paused": CauseAdvice(
        "the engine was paused", "Take a replica out of the load balancer before it is paused."
    ),
    "engine_lost": CauseAdvice(
        "the engine ended with the request in flight",
        "Read the engine's log: it went with requests in flight.",
    ),
    "output": CauseAdvice("sampling, detokenising and sending", _HOST),
    "delivery": CauseAdvice(
        "waiting until the client reads what was written, and closing the answer",
        "Look at the clients and the network to them: they read slower than tokens come.",
    ),
}

OF_OBJECTIVE = {
    "prefill_own": _LARGE,
    "decode_own": _LARGE,
    "shed": "More comes than is served: add replicas, or raise the engine's limit of the queue.",
}
"""Advice that differs where an objective says how long requests may take, and for causes that are
no row of the ledger."""


def advice_for(cause: str) -> CauseAdvice:
    """Return a cause in words, also one of a newer version."""
    return ROWS.get(
        cause, CauseAdvice("a cause of a newer version", "Update InferScope to read it.")
    )
