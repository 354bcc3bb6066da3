"""Reports as self-contained HTML: pages of sections, tables and plots, without any network use.

The page is general; what a run's report shows is in `inferscope.report.run`.
"""

from inferscope.report.blocks import (
    Bar,
    Block,
    Code,
    Column,
    Details,
    Figure,
    Number,
    Prose,
    Section,
    Table,
)
from inferscope.report.diff import diff_report
from inferscope.report.page import Page, render
from inferscope.report.plots import draw

__all__ = [
    "Bar",
    "Block",
    "Code",
    "Column",
    "Details",
    "Figure",
    "Number",
    "Page",
    "Prose",
    "Section",
    "Table",
    "diff_report",
    "draw",
    "render",
]
