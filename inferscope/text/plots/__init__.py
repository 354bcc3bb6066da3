"""Pure plots: numbers to lines of text of an exact width, independent of any terminal."""

from inferscope.text.plots.bars import bar, offset_bar, split_bar
from inferscope.text.plots.braille import Dots
from inferscope.text.plots.charts import columns, resample, sparkline
from inferscope.text.plots.formatting import (
    UNKNOWN,
    clock,
    closed,
    count,
    duration,
    milliseconds,
    moment,
    per_second,
    seconds,
    share,
)
from inferscope.text.plots.stacked import EMPTY, stacked
from inferscope.text.plots.text import fit, fit_name, plain, to_ascii

__all__ = [
    "EMPTY",
    "UNKNOWN",
    "Dots",
    "bar",
    "clock",
    "closed",
    "columns",
    "count",
    "duration",
    "fit",
    "fit_name",
    "milliseconds",
    "moment",
    "offset_bar",
    "per_second",
    "plain",
    "resample",
    "seconds",
    "share",
    "sparkline",
    "split_bar",
    "stacked",
    "to_ascii",
]
