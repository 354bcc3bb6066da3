"""Comparison of runs or recordings: measures of their final requests, with resampled intervals."""

from inferscope.insight.compare.change_limits import LimitOutcome, parse_limit
from inferscope.insight.compare.columns import Columns, ColumnsBuilder, columns_of, complete
from inferscope.insight.compare.comparison import (
    HEADLINE_LEVEL,
    NO_DIFFERENCE,
    Comparison,
    ComparisonRow,
    Difference,
    compare,
)
from inferscope.insight.compare.finding_changes import FindingChange, finding_changes
from inferscope.insight.compare.intervals import fewest_pairs, paired_interval
from inferscope.insight.compare.measures import Limits
from inferscope.insight.compare.recordings import (
    RECORDING_HEADLINES,
    Explanation,
    RecordingComparison,
    check_enough,
    compare_recordings,
)

__all__ = [
    "HEADLINE_LEVEL",
    "NO_DIFFERENCE",
    "RECORDING_HEADLINES",
    "Columns",
    "ColumnsBuilder",
    "Comparison",
    "ComparisonRow",
    "Difference",
    "Explanation",
    "FindingChange",
    "LimitOutcome",
    "Limits",
    "RecordingComparison",
    "check_enough",
    "columns_of",
    "compare",
    "compare_recordings",
    "complete",
    "fewest_pairs",
    "finding_changes",
    "paired_interval",
    "parse_limit",
]
