"""Numbers and conclusions as lines of text, for commands and screens."""

from inferscope.text.columns import (
    Column,
    column_at,
    columns_for,
    heading_line,
    order_rows,
    row_line,
)
from inferscope.text.explanation import why
from inferscope.text.findings import FindingsDocument, findings_brief, findings_json, findings_text
from inferscope.text.header_line import header, status_line
from inferscope.text.labels import STATE_MARKS, format_listed
from inferscope.text.lines import TRIANGLE, Line, Span, fit_line, frame, rule
from inferscope.text.once import once_text
from inferscope.text.report import WhyDocument, report_json, report_lines
from inferscope.text.scene import REFRESH_RATES_HZ, WINDOWS_NS, Scene
from inferscope.text.shares import SharesDocument, shares_json, shares_lines

__all__ = [
    "REFRESH_RATES_HZ",
    "STATE_MARKS",
    "TRIANGLE",
    "WINDOWS_NS",
    "Column",
    "FindingsDocument",
    "Line",
    "Scene",
    "SharesDocument",
    "Span",
    "WhyDocument",
    "column_at",
    "columns_for",
    "findings_brief",
    "findings_json",
    "findings_text",
    "fit_line",
    "format_listed",
    "frame",
    "header",
    "heading_line",
    "once_text",
    "order_rows",
    "report_json",
    "report_lines",
    "row_line",
    "rule",
    "shares_json",
    "shares_lines",
    "status_line",
    "why",
]
