"""A metrics page as lines: apart from the other texts, which need no parser of such pages."""

from inferscope.text.page.lines import page_lines, page_text

__all__ = ["page_lines", "page_text"]
