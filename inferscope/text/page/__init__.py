"""A metrics page as lines: apart from the other texts, which need no parser of such pages."""

from inferscope.text.page.lines import Trends, page_lines, page_text, unknown_reasons

__all__ = ["Trends", "page_lines", "page_text", "unknown_reasons"]
