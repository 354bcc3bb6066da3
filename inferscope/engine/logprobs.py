"""Log probabilities of the chosen token and of the likeliest ones, for requests that ask for them.

They are the model's own: computed in float32 from the logits, before temperature, top-k, top-p and
`min_tokens` change the choice. The rows of other requests are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferscope.engine.request import Request, TokenLogprobs
from inferscope.engine.scheduler import Slice


class StepLogprobs:
    """Log probabilities of a step's rows of logits whose requests ask for them."""

    @classmethod
    def of(cls, sampled: Sequence[Slice]) -> StepLogprobs | None:
        """Return those of a step's sampled slices; None if no request asks for any."""
        if all(part.request.sampling.logprobs is None for part in sampled):
            return None
        return cls(sampled)

    def __init__(self, sampled: Sequence[Slice]) -> None:
        self._rows: list[int] = []
        self._requests: list[Request] = []
        """Request of each row; one that verifies drafts has several."""
        row = 0
        for part in sampled:
            num_rows = 1 + part.num_drafts
            if part.request.sampling.logprobs is not None:
                self._rows += range(row, row + num_rows)
                self._requests += [part.request] * num_rows
            row += num_rows

    def compute(self, logits: Tensor) -> None:
        """Compute them from `logits` [rows, vocab], before sampling overwrites some of these."""
        most = max(request.sampling.logprobs or 0 for request in self._requests)
        rows = torch.tensor(self._rows, pin_memory=logits.is_cuda)
        self._row_indices = rows.to(logits.device, non_blocking=True)
        self._all = logits[self._row_indices].float().log_softmax(dim=-1)
        self._top = self._all.topk(min(most, logits.shape[-1]), dim=-1)

    def select(self, chosen: Tensor) -> None:
        """Select those of the chosen tokens [rows], without waiting for the device."""
        self._tokens = chosen[self._row_indices]
        self._chosen = self._all.gather(-1, self._tokens.unsqueeze(1)).squeeze(1)
        del self._all

    def store(self) -> None:
        """Set the requests' `logprobs`; those of rejected drafts are behind the others."""
        columns = (self._tokens, self._chosen, self._top.indices, self._top.values)
        for request in self._requests:
            request.logprobs = []
        for request, token, logprob, tokens, logprobs in zip(
            self._requests, *(column.tolist() for column in columns), strict=True
        ):
            num = request.sampling.logprobs
            top = list(zip(tokens[:num], logprobs[:num], strict=True))
            request.logprobs.append(TokenLogprobs(token, logprob, top))
