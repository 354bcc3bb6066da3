"""Token lengths: a number or a distribution, in the notation of the command line.

    512                 always 512
    128..2048           every length from 128 to 2048 equally likely, both included
    normal:512,100      mean 512, standard deviation 100
    lognormal:512,0.5   median 512; 0.5 is the standard deviation of the logarithm, so that two
                        thirds lie between 512/e^0.5 and 512*e^0.5 and the mean is 512*e^(0.5²/2)

Draws are rounded and clamped to 1..1,000,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from inferscope.errors import BadInput

MOST_TOKENS = 1_000_000
FORMS = "512, 128..2048, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    Attributes:
        text: its notation.
    """

    text: str
    _sample: Callable[[Random], float]

    def draw(self, random: Random) -> int:
        """Draw a length, at least 1."""
        # Clamped before rounding: a wide lognormal draws values beyond any integer.
        return round(min(max(self._sample(random), 1.0), float(MOST_TOKENS)))


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution.

    Raises:
        BadInput: it is invalid, or has values that no length can have.
    """
    name, colon, numbers = text.strip().partition(":")
    try:
        if colon:
            first, second = map(float, numbers.split(","))
            if not (1 <= first <= MOST_TOKENS and math.isfinite(second) and second >= 0):
                raise ValueError
            return Lengths(text, _SHAPES[name](first, second))
        low, dots, high = name.partition("..")
        lowest, highest = int(low), int(high if dots else low)
        if not 1 <= lowest <= highest <= MOST_TOKENS:
            raise ValueError
        return Lengths(text, lambda random: random.randint(lowest, highest))
    except (ValueError, KeyError):
        raise BadInput(
            f"{text!r} is not a token length. Give {FORMS}, within 1..{MOST_TOKENS}."
        ) from None


def _normal(mean: float, deviation: float) -> Callable[[Random], float]:
    return lambda random: random.normalvariate(mean, deviation)


def _lognormal(median: float, sigma: float) -> Callable[[Random], float]:
    # The exponent is bounded: e^700 is the largest that a float holds.
    return lambda random: median * math.exp(min(random.normalvariate(0, sigma), 500.0))


_SHAPES = {"normal": _normal, "lognormal": _lognormal}
