"""Overlap: a step is launched before the outputs of the step before it are known.

    step loop   plan 1 │ launch 1 │ plan 2 │ launch 2 │ wait for 1, commit 1 │ plan 3 │ launch 3 │ …
    device                 └───────── step 1 ─────────┘└───────── step 2 ─────────┘└─── step 3 …

The input of a request's next step is the token that the step under way samples. Until that step is
committed, a placeholder stands for it in the request's tokens: -1 - its sequence slot. The device
keeps the last sampled token of each sequence slot, and replaces placeholders by it.

    tokens   12 │ 40 │ 7 │ -4          sequence slot 3; the -4 is sampled by the step under way
    device   latest = [ …, …, …, 25 ]  its input becomes 25

A request of known length has no placeholder for its last token, so no step is planned for it in
vain. A stop token is found one step late: what that step computed for the request is recorded as
computed, and the token it sampled is discarded. Preemption waits until all outputs are known, since
a request that is about to end need not lose its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferscope.engine.scheduler import Slice


class FutureTokens:
    """Last sampled token of each sequence slot, on the device."""

    def __init__(self, max_running: int, device: torch.device) -> None:
        self._latest = torch.zeros(max_running, dtype=torch.int64, device=device)

    def fill(self, ids: Tensor) -> Tensor:
        """Return `ids` [tokens] with the sampled tokens in place of placeholders."""
        return torch.where(ids < 0, self._latest[(-1 - ids).clamp_(min=0)], ids)

    def store(self, sampled: Sequence[Slice], tokens: Tensor) -> None:
        """Keep the tokens [slices] that the slices sampled, without waiting for the device."""
        device = self._latest.device
        slots = torch.tensor(
            [part.request.sequence_slot for part in sampled], pin_memory=device.type == "cuda"
        )
        self._latest[slots.to(device, non_blocking=True)] = tokens
