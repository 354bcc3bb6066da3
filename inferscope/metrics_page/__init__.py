"""A server's /metrics page over HTTP: totals and gauges of a server that is not observed."""

from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.discovery import find_pages
from inferscope.metrics_page.fetching import MetricsPage, fetch, page_url
from inferscope.metrics_page.reading import (
    BucketQuantiles,
    PageHistogram,
    PageTotals,
    beyond,
    read,
)
from inferscope.metrics_page.view import PageSource, PageView

__all__ = [
    "BucketQuantiles",
    "MetricsPage",
    "PageHistogram",
    "PageSource",
    "PageTotals",
    "PageView",
    "beyond",
    "dialect_of",
    "fetch",
    "find_pages",
    "page_url",
    "read",
]
