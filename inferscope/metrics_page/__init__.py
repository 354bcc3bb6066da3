"""A server's /metrics page over HTTP: totals and gauges of a server that is not observed."""

from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.fetching import MetricsPage, fetch, page_url
from inferscope.metrics_page.reading import BucketQuantiles, read
from inferscope.metrics_page.view import PageSource, PageView

__all__ = [
    "BucketQuantiles",
    "MetricsPage",
    "PageSource",
    "PageView",
    "dialect_of",
    "fetch",
    "page_url",
    "read",
]
