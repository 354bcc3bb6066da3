"""Panels: pure functions from one engine's view and a size to lines of exactly that size."""

from inferscope.tui.panels.brief import brief
from inferscope.tui.panels.causes import causes
from inferscope.tui.panels.kv import engine_and_kv
from inferscope.tui.panels.levels import service_levels
from inferscope.tui.panels.phases import device_time
from inferscope.tui.panels.problem import largest_problem
from inferscope.tui.panels.throughput import tokens_per_second

__all__ = [
    "brief",
    "causes",
    "device_time",
    "engine_and_kv",
    "largest_problem",
    "service_levels",
    "tokens_per_second",
]
