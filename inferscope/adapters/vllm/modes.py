"""Launch mode of a vLLM step by its size: a captured graph, pieces of one, or eager.

Which it was is decided deep inside the model runner; the rule is repeated here from configuration:
a batch whose requests all have the decode's number of tokens may have a graph of its own, and a
graph is used up to the largest captured size, its batch padded to the next captured one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple

EAGER = "eager"
_NAMES = {"NONE": EAGER, "PIECEWISE": "piecewise", "FULL": "graph"}


class Modes(NamedTuple):
    """What is captured.

    Attributes:
        decode: mode of a batch in which every request has `decode_tokens` tokens.
        mixed: mode of any other.
        sizes: captured, in tokens, ascending.
        decode_tokens: of a request that decodes: one, and its draft tokens.
    """

    decode: str = EAGER
    mixed: str = EAGER
    sizes: tuple[int, ...] = ()
    decode_tokens: int = 1

    def of(self, tokens: Iterable[int]) -> tuple[str, int]:
        """Return a step's mode, and to how many tokens it is padded (0: not at all)."""
        if not self.sizes:
            return EAGER, 0
        counts = list(tokens)
        is_decode = all(count == self.decode_tokens for count in counts)
        mode = self.decode if is_decode else self.mixed
        at = bisect_left(self.sizes, sum(counts))
        if mode == EAGER or at == len(self.sizes):
            return EAGER, 0
        return mode, self.sizes[at]


def modes_of(config: Any) -> Modes:
    """Read a `VllmConfig`; where it is of another version, everything is called eager."""
    try:
        compilation = config.compilation_config
        mode = compilation.cudagraph_mode
        return Modes(
            _NAMES[mode.decode_mode().name],
            _NAMES[mode.mixed_mode().name],
            tuple(sorted(compilation.cudagraph_capture_sizes or ())),
            1 + int(config.num_speculative_tokens),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return Modes()
