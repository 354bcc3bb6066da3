"""PromQL as panels need it: every selector obeys the dashboard's variables, every counter a rate.

Sums come before divisions, so that a ratio over several engines is theirs together; and where not
every engine has what is above the line, only those that do are below it.
"""

from __future__ import annotations

SCOPE = ('job=~"$job"', 'instance=~"$instance"', 'model_name=~"$model"', 'engine_id=~"$engine"')
"""Of the series of engines."""
TARGET_SCOPE = SCOPE[:2]
"""Of what Prometheus itself says of a target."""
MODEL_SCOPE = SCOPE[:3]
"""Of the series that a collector has of all its engines of a model."""
RATE = "$__rate_interval"
ENGINE = "instance, engine_id"
"""Labels that tell engines apart, on whatever host."""
WHOLE_ENGINE = "engine_id"
"""The same of engines whose ranks are on several hosts, each of which tells of its own."""


def series(name: str, *matchers: str) -> str:
    """Return a selector of an engine's series."""
    return f"{name}{{{', '.join((*SCOPE, *matchers))}}}"


def of_target(name: str) -> str:
    """Return a selector of series that no engine has for itself, or not only engines have."""
    return f"{name}{{{', '.join(TARGET_SCOPE)}}}"


def of_model(name: str, *matchers: str, by: str) -> str:
    """Return the sum of gauges that collectors have by model, whichever engines are chosen."""
    return f"sum{_by(by)} ({name}{{{', '.join((*MODEL_SCOPE, *matchers))}}})"


def now(name: str, *matchers: str, by: str = "", how: str = "sum") -> str:
    """Return gauges, aggregated."""
    return f"{how}{_by(by)} ({series(name, *matchers)})"


def rate(name: str, *matchers: str, by: str = "", where: str = "", of: str = ENGINE) -> str:
    """Return a counter's growth per second.

    Args:
        name: the counter.
        *matchers: besides the dashboard's own.
        by: the labels that are kept.
        where: another counter; of engines that have it, no others.
        of: the labels that tell these engines apart.
    """
    grows = f"rate({series(name, *matchers)}[{RATE}])"
    if where:
        grows += f" and on ({of}) rate({series(where)}[{RATE}])"
    return f"sum{_by(by)} ({grows})"


def growth(name: str, *matchers: str, by: str = "", over: str = "$__range") -> str:
    """Return a counter's growth over a window, the one on screen unless another is named."""
    return f"sum{_by(by)} (increase({series(name, *matchers)}[{over}]))"


def quantile(share: float, histogram: str, *matchers: str, by: str = "") -> str:
    """Return a quantile of a histogram, whose name is without `_bucket`."""
    buckets = rate(f"{histogram}_bucket", *matchers, by=f"le, {by}" if by else "le")
    return f"histogram_quantile({share}, {buckets})"


def buckets(histogram: str, *matchers: str) -> str:
    """Return a histogram as a heat map takes it."""
    selector = series(f"{histogram}_bucket", *matchers)
    return f"sum by (le) (increase({selector}[{RATE}]))"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
