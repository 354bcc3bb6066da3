"""Sampling of the next token of each request.

A sampled request draws one uniform number per token from a hash of its seed and the token's
position, and inverts the cumulative distribution at it. No operation here waits for the device:
host data is pinned and copied asynchronously. Requests share no state, so a seed's output does not
depend on the batch or on preemptions. The exception: rounding of the logits can move an edge of the
distribution across the drawn number (seen once in 2,200 requests).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferscope.engine.request import Request

_MASK64 = (1 << 64) - 1


def choose_tokens(logits: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> Tensor:
    """Return one token for each row of `logits` [rows, vocab], as int64 [rows].

    The stop tokens of rows below `min_tokens` are overwritten in place.

    Args:
        logits: [rows, vocab].
        requests: [rows], request of each row; one that verifies drafts has several.
        positions: [rows], position of the chosen token in the request.
    """
    _forbid_early_stops(logits, requests, positions)
    # The same indices as `argmax`, which takes up to four times as long on a CPU.
    chosen = logits.max(dim=-1).indices
    plain: list[int] = []
    filtered: list[int] = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        if not sampling.is_greedy:
            (filtered if sampling.top_k or sampling.top_p < 1 else plain).append(row)
    for rows, narrows in ((plain, False), (filtered, True)):
        if rows:
            row_indices = _to_device(rows, torch.int64, logits.device)
            chosen[row_indices] = _draw(
                logits[row_indices],
                [requests[row] for row in rows],
                [positions[row] for row in rows],
                narrows=narrows,
            )
    return chosen


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments.

    Source: SplitMix64, Steele et al., "Fast splittable pseudorandom number generators" (2014).
    """
    mixed = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


def _forbid_early_stops(
    logits: Tensor, requests: Sequence[Request], positions: Sequence[int]
) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        if request.stop_ids and position - request.num_prompt < request.sampling.min_tokens:
            rows += [row] * len(request.stop_ids)
            tokens += request.stop_ids
    if rows:
        row_indices = (_to_device(column, torch.int64, logits.device) for column in (rows, tokens))
        # A number of Python's would be copied to the device, which waits for it.
        never = torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device)
        logits.index_put_(tuple(row_indices), never)


def _to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to the device without waiting for it."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _draw(
    logits: Tensor, requests: Sequence[Request], positions: Sequence[int], *, narrows: bool
) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return _to_device(values, torch.float32, logits.device).unsqueeze(1)

    order = None
    scaled = logits.float() / column([request.sampling.temperature for request in requests])
    probabilities = scaled.softmax(dim=-1)
    if narrows:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(probabilities.shape[-1], device=logits.device)
        top_k = column([request.sampling.top_k or logits.shape[-1] for request in requests])
        top_p = column([request.sampling.top_p for request in requests])
        before = probabilities.cumsum(dim=-1) - probabilities
        is_kept = (rank < top_k) & (before < top_p)
        is_kept[:, 0] = True
        probabilities = probabilities * is_kept
    # float64: over 150,000 float32 terms the sum's error would exceed a token's probability.
    cumulative = probabilities.double().cumsum(dim=-1)
    points = column(
        [uniform(request.seed, at) for request, at in zip(requests, positions, strict=True)]
    )
    targets = points.double() * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, targets, right=True)
    picked = picked.clamp_(max=logits.shape[-1] - 1)
    return (picked if order is None else order.gather(-1, picked)).squeeze(1)
