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
    "ClassUse",
    "Divergence",
    "EngineCache",
    "Facts",
    "JudgedSource",
    "KernelTime",
    "LevelsWatch",
    "OddStep",
    "Overlap",
    "ProfileDocument",
    "RequestSource",
    "ShareRow",
    "Shares",
    "SharesSink",
    "cache_reports",
    "in_order",
    "kernel_times",
    "slowdown",
    "stall_ns",
    "steps_of",
    "with_steps",
]
