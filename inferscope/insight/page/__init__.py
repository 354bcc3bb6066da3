"""Findings from the totals of a metrics page: apart, since they need a parser of such pages."""

from inferscope.insight.page.rules import page_findings

__all__ = ["page_findings"]
