"""Numbers and conclusions as lines of text, for commands and screens.

Names are imported on first use: commands that need the plots alone need no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.lazy import lazy_names

if TYPE_CHECKING:
    from inferscope.text.cache import CacheDocument, cache_json, cache_lines
    from inferscope.text.columns import (
        Column,
        column_at,
        columns_for,
        heading_line,
        order_rows,
        row_line,
    )
    from inferscope.text.comparison import (
        GROUPS,
        ComparisonDocument,
        comparison_page,
        label,
        number,
        verdict_sentence,
    )
    from inferscope.text.diff import (
        DiffDocument,
        DiffEngine,
        DiffSide,
        diff_document,
        diff_engines,
        diff_method,
        diff_page,
        explanation_sentence,
        finding_sentence,
        outcome_sentence,
    )
    from inferscope.text.evidence import many
    from inferscope.text.explanation import why
    from inferscope.text.findings import (
        FindingsDocument,
        findings_brief,
        findings_json,
        findings_text,
        provenance_sentence,
        run_verdict,
    )
    from inferscope.text.header_line import header, status_line
    from inferscope.text.joined import JoinDocument, join_json, join_text
    from inferscope.text.labels import (
        BAD_FINISHES,
        CAUSE_MEANINGS,
        STATE_MARKS,
        SYNTHETIC,
        cause_role,
        format_listed,
        more_or_less,
        view_verdict,
    )
    from inferscope.text.lines import TRIANGLE, Line, Span, fit_line, frame, rule
    from inferscope.text.once import once_text
    from inferscope.text.passes import passes_text
    from inferscope.text.report import WhyDocument, report_json, report_lines
    from inferscope.text.scene import REFRESH_RATES_HZ, WINDOWS_NS, Scene
    from inferscope.text.shares import SharesDocument, shares_json, shares_lines

__all__ = [
    "BAD_FINISHES",
    "CAUSE_MEANINGS",
    "GROUPS",
    "REFRESH_RATES_HZ",
    "STATE_MARKS",
    "SYNTHETIC",
    "TRIANGLE",
    "WINDOWS_NS",
    "CacheDocument",
    "Column",
    "ComparisonDocument",
    "DiffDocument",
    "DiffEngine",
    "DiffSide",
    "FindingsDocument",
    "JoinDocument",
    "Line",
    "Scene",
    "SharesDocument",
    "Span",
    "WhyDocument",
    "cache_json",
    "cache_lines",
    "cause_role",
    "column_at",
    "columns_for",
    "comparison_page",
    "diff_document",
    "diff_engines",
    "diff_method",
    "diff_page",
    "explanation_sentence",
    "finding_sentence",
    "findings_brief",
    "findings_json",
    "findings_text",
    "fit_line",
    "format_listed",
    "frame",
    "header",
    "heading_line",
    "join_json",
    "join_text",
    "label",
    "many",
    "more_or_less",
    "number",
    "once_text",
    "order_rows",
    "outcome_sentence",
    "passes_text",
    "provenance_sentence",
    "report_json",
    "report_lines",
    "row_line",
    "rule",
    "run_verdict",
    "shares_json",
    "shares_lines",
    "status_line",
    "verdict_sentence",
    "view_verdict",
    "why",
]

__getattr__ = lazy_names(
    __name__,
    {
        "cache": ["CacheDocument", "cache_json", "cache_lines"],
        "columns": ["Column", "column_at", "columns_for", "heading_line", "order_rows", "row_line"],
        "comparison": [
            "ComparisonDocument",
            "GROUPS",
            "comparison_page",
            "label",
            "number",
            "verdict_sentence",
        ],
        "diff": [
            "DiffDocument",
            "DiffEngine",
            "DiffSide",
            "diff_document",
            "diff_engines",
            "diff_method",
            "diff_page",
            "explanation_sentence",
            "finding_sentence",
            "outcome_sentence",
        ],
        "explanation": ["why"],
        "evidence": ["many"],
        "findings": [
            "FindingsDocument",
            "findings_brief",
            "findings_json",
            "findings_text",
            "provenance_sentence",
            "run_verdict",
        ],
        "header_line": ["header", "status_line"],
        "joined": ["JoinDocument", "join_json", "join_text"],
        "labels": [
            "BAD_FINISHES",
            "CAUSE_MEANINGS",
            "STATE_MARKS",
            "SYNTHETIC",
            "cause_role",
            "format_listed",
            "more_or_less",
            "view_verdict",
        ],
        "lines": ["Line", "Span", "TRIANGLE", "fit_line", "frame", "rule"],
        "once": ["once_text"],
        "passes": ["passes_text"],
        "report": ["WhyDocument", "report_json", "report_lines"],
        "scene": ["REFRESH_RATES_HZ", "Scene", "WINDOWS_NS"],
        "shares": ["SharesDocument", "shares_json", "shares_lines"],
    },
)
