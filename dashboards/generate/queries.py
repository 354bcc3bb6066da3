"""PromQL builders: every selector applies the dashboard's variables, every counter is a rate.

Sums come before divisions, so that a ratio over several engines is that of their totals; if only
some engines have the numerator, the denominator covers only those.
"""

from __future__ import annotations

SCOPE = ('job=~"$job"', 'instance=~"$instance"', 'model_name=~"$model"', 'engine_id=~"$engine"')
"""Matchers of engines' series."""
TARGET_SCOPE = SCOPE[:2]
"""Matchers of Prometheus' own series of a target."""
MODEL_SCOPE = SCOPE[:3]
"""Matchers of a collector's series by model, over all its engines."""
RATE = "$__rate_interval"
ENGINE = "instance, engine_id"
"""Labels that identify engines on any host."""
WHOLE_ENGINE = "engine_id"
"""Label of engines whose ranks are on several hosts, each of which reports its own."""


def series(name: str, *matchers: str) -> str:
    """Return a selector of an engine's series."""
    return f"{name}{{{', '.join((*SCOPE, *matchers))}}}"


def of_target(name: str) -> str:
    """Return a selector of series that are not, or not only, an engine's."""
    return f"{name}{{{', '.join(TARGET_SCOPE)}}}"


def of_model(name: str, *matchers: str, by: str) -> str:
    """Return the sum of gauges that collectors have by model, for any selected engines."""
    return f"sum{_by(by)} ({name}{{{', '.join((*MODEL_SCOPE, *matchers))}}})"


def now(name: str, *matchers: str, by: str = "", how: str = "sum") -> str:
    """Return gauges, aggregated."""
    return f"{how}{_by(by)} ({series(name, *matchers)})"


def rate(name: str, *matchers: str, by: str = "", where: str = "", of: str = ENGINE) -> str:
    """Return a counter's rate per second.

    Args:
        name: the counter.
        *matchers: matchers besides the dashboard's own.
        by: labels to keep.
        where: another counter; only engines that have it are included.
        of: labels that identify these engines.
    """
    grows = f"rate({series(name, *matchers)}[{RATE}])"
    if where:
        grows += f" and on ({of}) rate({series(where)}[{RATE}])"
    return f"sum{_by(by)} ({grows})"


def growth(name: str, *matchers: str, by: str = "", over: str = "$__range") -> str:
    """Return a counter's growth over a window, by default the one on screen."""
    return f"sum{_by(by)} (increase({series(name, *matchers)}[{over}]))"


def quantile(share: float, histogram: str, *matchers: str, by: str = "") -> str:
    """Return a quantile of a histogram, named without `_bucket`."""
    buckets = rate(f"{histogram}_bucket", *matchers, by=f"le, {by}" if by else "le")
    return f"histogram_quantile({share}, {buckets})"


def buckets(histogram: str, *matchers: str) -> str:
    """Return a histogram for a heat map."""
    selector = series(f"{histogram}_bucket", *matchers)
    return f"sum by (le) (increase({selector}[{RATE}]))"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
