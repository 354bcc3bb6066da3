"""Split of the tokens that a step computes for a request into phases."""

from __future__ import annotations

from collections.abc import Iterator

from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED


def split_phases(
    start: int, end: int, *, seen: int, num_prompt: int
) -> Iterator[tuple[int, int, int, int]]:
    """Return phase, first token, end and flags of each row.

        tokens     0 ........... seen ........... num_prompt ........... end
                   recomputed (prefill)   prefill              decode

    Args:
        start: number of cached tokens before the step.
        end: number of cached tokens after it, without drafts.
        seen: number of tokens computed before: computing them again is recomputation.
        num_prompt: number of tokens of the prompt.
    """
    # Prefill ends where both the prompt and the lost tokens are computed.
    prefill_end = max(seen, num_prompt)
    for phase, flags, limit in (
        (PREFILL, RECOMPUTED, seen),
        (PREFILL, 0, num_prompt),
        (DECODE, 0, end),
    ):
        stop = min(end, limit)
        if stop > start:
            is_complete = phase == PREFILL and stop == prefill_end
            yield phase, start, stop, flags | LAST_CHUNK if is_complete else flags
            start = stop
