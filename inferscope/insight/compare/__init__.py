"""Comparison of two groups of runs: measures of their final requests, with resampled intervals."""

from inferscope.insight.compare.comparison import (
    HEADLINE_LEVEL,
    NO_DIFFERENCE,
    Comparison,
    ComparisonRow,
    compare,
)
from inferscope.insight.compare.intervals import fewest_pairs, paired_interval
from inferscope.insight.compare.measures import Limits, complete

__all__ = [
    "HEADLINE_LEVEL",
    "NO_DIFFERENCE",
    "Comparison",
    "ComparisonRow",
    "Limits",
    "compare",
    "complete",
    "fewest_pairs",
    "paired_interval",
]
