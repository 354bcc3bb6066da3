"""Conclusions from final steps and requests: findings, facts of a request, shares of time."""

from inferscope.insight.cache_tally import (
    CacheBy,
    CacheGroup,
    CacheReport,
    CacheTally,
    ClassUse,
    Divergence,
    EngineCache,
    cache_reports,
    in_order,
)
from inferscope.insight.facts import Facts, OddStep, Overlap
from inferscope.insight.judged_source import JudgedSource
from inferscope.insight.kernels import (
    KERNEL,
    KernelTime,
    ProfileDocument,
    kernel_times,
    slowdown,
    stall_ns,
    steps_of,
    with_steps,
)
from inferscope.insight.request_source import RequestSource
from inferscope.insight.roofline import (
    Ceiling,
    Load,
    Point,
    ceilings,
    compute_bound_from,
    load_of,
    point_of,
    speedup,
    total,
)
from inferscope.insight.service_levels import LevelsWatch
from inferscope.insight.shares import NO_AMOUNTS, Amounts, By, ShareRow, Shares, SharesSink

__all__ = [
    "KERNEL",
    "NO_AMOUNTS",
    "Amounts",
    "By",
    "CacheBy",
    "CacheGroup",
    "CacheReport",
    "CacheTally",
    "Ceiling",
    "ClassUse",
    "Divergence",
    "EngineCache",
    "Facts",
    "JudgedSource",
    "KernelTime",
    "LevelsWatch",
    "Load",
    "OddStep",
    "Overlap",
    "Point",
    "ProfileDocument",
    "RequestSource",
    "ShareRow",
    "Shares",
    "SharesSink",
    "cache_reports",
    "ceilings",
    "compute_bound_from",
    "in_order",
    "kernel_times",
    "load_of",
    "point_of",
    "slowdown",
    "speedup",
    "stall_ns",
    "steps_of",
    "total",
    "with_steps",
]
