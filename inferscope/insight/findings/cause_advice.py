"""Advice on a cause of breaches that differs from the advice on a large ledger row."""

from __future__ import annotations

_LARGE = "The requests are too large for the objective on this device: change either."

OF_OBJECTIVE = {
    "prefill_own": _LARGE,
    "decode_own": _LARGE,
    "shed": "Load exceeds capacity: add replicas, or raise the engine's queue limit.",
}
"""Advice that differs under an objective, and for causes that are not ledger rows."""
