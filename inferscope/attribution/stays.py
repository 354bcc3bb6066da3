"""The batch as others see it who wait: what its members hold, how far it has come, who stays."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST_BLOCK_TOKENS = 1 << 24
"""A block of more, or of less than one, is damage."""
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Grip(msgspec.Struct, frozen=True, gc=False):
    """What the members of a step hold that keeps others out of it.

    Attributes:
        binding: the scheduler's word on what is scarce.
        block_tokens: tokens in a KV block, 0 where the engine does not say.
        tokens: [members], computed in the step.
        contexts: [members], before it.
        dp_rank: whose step it was; those of another one are nobody's companions.
    """

    binding: str
    block_tokens: int
    tokens: Ints
    contexts: Ints
    dp_rank: int = 0

    def blocks(self) -> Floats:
        """Return the KV blocks that each member holds, or its tokens in them: [members]."""
        per_block = self.block_tokens if 0 < self.block_tokens <= _MOST_BLOCK_TOKENS else 1
        blocks = -(-(self.contexts + self.tokens) // per_block)
        return blocks.astype(np.float64)


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a rank has come to on every scale.

    Attributes:
        scales: as `roster` numbers them.
        co_batched_ns: what a decode has waited for all others; likewise a prompt for decodes.
    """

    scales: tuple[float, float, float, float]
    co_batched_ns: float
    beside_ns: float


class Course(msgspec.Struct, eq=False):
    """The steps of one data-parallel rank: how far they have come, and the last one.

    Attributes:
        decoding: on the scale of this name; likewise the others.
        co_batched_ns: see `Place`.
        members: [members] of the last step, and what they hold.
        num_left: requests that had left any batch by then.
    """

    dp_rank: int
    decoding: float = 0.0
    beside_prompts: float = 0.0
    prompts: float = 0.0
    beside_other_prompts: float = 0.0
    co_batched_ns: float = 0.0
    beside_ns: float = 0.0
    members: Ints = _NOBODY
    grip: Grip | None = None
    num_left: int = 0

    def scales(self) -> tuple[float, float, float, float]:
        """Return how far it has come, in the order of the scales."""
        return self.decoding, self.beside_prompts, self.prompts, self.beside_other_prompts

    def place(self) -> Place:
        """Return where it has come to."""
        return Place(self.scales(), self.co_batched_ns, self.beside_ns)


class Stay(msgspec.Struct):
    """A request's stay in the batch; its prompt is computed first, if it is."""

    row: int
    course: Course
    entered: Place
    promoted: Place | None
    """Where it began to decode."""
    left: Place | None = None
