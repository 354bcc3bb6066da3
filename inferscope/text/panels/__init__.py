"""Panels: pure functions from one engine's view and a size to lines of exactly that size."""

from inferscope.text.panels.brief import brief
from inferscope.text.panels.causes import causes
from inferscope.text.panels.kv import engine_and_kv
from inferscope.text.panels.lanes import lanes
from inferscope.text.panels.levels import service_levels
from inferscope.text.panels.phases import Unit, device_time
from inferscope.text.panels.problem import largest_problem
from inferscope.text.panels.request import breadcrumb, request_detail
from inferscope.text.panels.throughput import tokens_per_second

__all__ = [
    "Unit",
    "breadcrumb",
    "brief",
    "causes",
    "device_time",
    "engine_and_kv",
    "lanes",
    "largest_problem",
    "request_detail",
    "service_levels",
    "tokens_per_second",
]
