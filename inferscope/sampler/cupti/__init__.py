"""CUPTI by ctypes: loading, structures, sessions and the PM sampling source."""

from inferscope.sampler.cupti.library import (
    LIBRARY_VARIABLE,
    NOT_PERMITTED,
    PROFILERS,
    counter_holders,
    cuda_release,
    listed,
    may_profile,
)
from inferscope.sampler.cupti.pm import how_to_pass
from inferscope.sampler.cupti.search import NO_LIBRARY, Trial, candidates, trials

__all__ = [
    "LIBRARY_VARIABLE",
    "NOT_PERMITTED",
    "NO_LIBRARY",
    "PROFILERS",
    "Trial",
    "candidates",
    "counter_holders",
    "cuda_release",
    "how_to_pass",
    "listed",
    "may_profile",
    "trials",
]
