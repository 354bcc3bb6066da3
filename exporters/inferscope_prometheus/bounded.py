"""Bound on the page's size: engines that would exceed it are left out as a whole.

Engines are admitted oldest first, so that a new engine never displaces an earlier one. The engines
of one other user get at most half of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from prometheus_client.core import Metric

from inferscope_prometheus.metric import family_of
from inferscope_prometheus.metric_table import OF_ALL
from inferscope_prometheus.page import HistogramFamily

_ENGINE = "engine_id"


def bounded(
    families: Iterable[Metric], *, order: Sequence[str], guests: Mapping[str, int], most: int
) -> Iterator[Metric]:
    """Return the families without the excess engines, and the number of series left out.

    Args:
        families: families of a page.
        order: engine IDs, oldest first.
        guests: user IDs of engines of other users.
        most: maximum number of series.
    """
    kept_families = list(families)
    by_engine: Counter[str] = Counter()
    for family in kept_families:
        if isinstance(family, HistogramFamily):
            by_engine.update(family.num_series())
        else:
            by_engine.update(sample.labels[_ENGINE] for sample in family.samples)
    refused = _too_many(by_engine, order, guests, most)
    if refused:
        for family in kept_families:
            if isinstance(family, HistogramFamily):
                family.leave_out(refused)
            else:
                family.samples = [s for s in family.samples if s.labels[_ENGINE] not in refused]
    num_left_out = float(sum(by_engine[engine_id] for engine_id in refused))
    left_out = family_of("series_left_out", [(OF_ALL, num_left_out)])
    return chain(kept_families, (left_out,))


def _too_many(
    by_engine: Mapping[str, int], order: Sequence[str], guests: Mapping[str, int], most: int
) -> set[str]:
    """Return the engines that do not fit."""
    in_sight = set(order)
    total = sum(num for engine_id, num in by_engine.items() if engine_id not in in_sight)
    by_guest: Counter[int] = Counter()
    refused = set()
    for engine_id in order:
        num, guest = by_engine.get(engine_id, 0), guests.get(engine_id)
        is_beyond_half = guest is not None and 2 * (by_guest[guest] + num) > most
        if total + num > most or is_beyond_half:
            refused.add(engine_id)
            continue
        total += num
        if guest is not None:
            by_guest[guest] += num
    return refused
