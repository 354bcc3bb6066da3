"""Panels: pure functions from one engine's view and a size to lines of exactly that size."""

from inferscope.text.panels.brief import brief
from inferscope.text.panels.causes import causes
from inferscope.text.panels.fleet import outlier_sentence
from inferscope.text.panels.groups import GROUP_KEYS, group_term, grouped, groups
from inferscope.text.panels.kernels import kernels
from inferscope.text.panels.kv import engine_and_kv
from inferscope.text.panels.lanes import SPANS_NS, Sight, lanes, newest_ns
from inferscope.text.panels.levels import service_levels
from inferscope.text.panels.objectives import burn_sentence
from inferscope.text.panels.pair import pair
from inferscope.text.panels.phases import Unit, device_time
from inferscope.text.panels.problem import largest_problem
from inferscope.text.panels.provenance import number_sources
from inferscope.text.panels.request import breadcrumb, request_detail
from inferscope.text.panels.roofline import (
    Roof,
    provenance,
    roof_of,
    roofline_chart,
)
from inferscope.text.panels.steps import (
    SORTS,
    client_names,
    decomposition,
    order_steps,
    slice_table,
    step_named,
    step_table,
)
from inferscope.text.panels.throughput import tokens_per_second
from inferscope.text.panels.waited import blamed

__all__ = [
    "GROUP_KEYS",
    "SORTS",
    "SPANS_NS",
    "Roof",
    "Sight",
    "Unit",
    "blamed",
    "breadcrumb",
    "brief",
    "burn_sentence",
    "causes",
    "client_names",
    "decomposition",
    "device_time",
    "engine_and_kv",
    "group_term",
    "grouped",
    "groups",
    "kernels",
    "lanes",
    "largest_problem",
    "newest_ns",
    "number_sources",
    "order_steps",
    "outlier_sentence",
    "pair",
    "provenance",
    "request_detail",
    "roof_of",
    "roofline_chart",
    "service_levels",
    "slice_table",
    "step_named",
    "step_table",
    "tokens_per_second",
]
