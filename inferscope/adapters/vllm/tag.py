"""The tag: what the core attaches to a step's output for the workers, and what both sign it with.

A tag is a plain tuple, pickled with vLLM's `SchedulerOutput`: a worker without inferscope, on
another host, must be able to read what it is sent. It is made before the step is dispatched, so it
carries the step's number alone. Core and workers each compute the step's digest from the output
itself, off that path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferscope.probe import column, digest64

NAME = "_inferscope"
"""Attribute of a `SchedulerOutput`."""


NO_ROWS: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)
"""Fields of a tag behind the step's number. Workers with an older inferscope compute the digest of
these: it is 0, so they report spans that any slices fit."""


def attach(output: Any, step: int) -> None:
    """Attach the number of a step to its output."""
    setattr(output, NAME, (step, *NO_ROWS))


def step_of(output: Any) -> int | None:
    """Return the number of a step; None where the output has no tag."""
    fields = getattr(output, NAME, None)
    return None if fields is None else fields[0]


def is_signed_by_ids(output: Any) -> bool:
    """Return whether the core that tagged this output has the digest that `step_digest` returns.

    An older core's digest is of its own request indices, which its tags hold.
    """
    fields = getattr(output, NAME, None)
    return fields is not None and not fields[1]


def step_digest(num_tokens_by_id: Mapping[str, int]) -> int:
    """Return the digest of a step: of its requests' ids and tokens, in the scheduler's order."""
    ids = "\0".join(num_tokens_by_id).encode("utf-8", "surrogatepass")
    return digest64(ids, column("I", tuple(num_tokens_by_id.values())))
