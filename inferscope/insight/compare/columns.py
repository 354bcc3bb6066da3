"""Final requests as columns, which the measures of a comparison read."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import Metric, breakdown
from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.compare.longest_gaps import LongestGaps
from inferscope.records import CAUSES

Floats = NDArray[np.float64]

_COMPLETE = ("stop", "length")
_NOT_THE_SERVER = ("client_cancel", "rejected")
"""Finish reasons of requests that the client gave up, or that had an error of the client's."""
COMPARED: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e")
"""Latencies that are compared."""
LEDGERS: tuple[Metric, ...] = ("ttft", "tbt", "e2e", "delivered")
"""Latencies whose time is compared by cause; `delivered` is the whole ledger."""
PHASES = ("prefill", "recomputed", "decode", "drafted", "rejected")
_FACTS = ("arrived_ns", "delivered_ns", "prompt_tokens", "cached_tokens", "output_tokens")


class Values(NamedTuple):
    """Values of one latency; a request may have none or several."""

    ns: Floats
    """[values], in nanoseconds."""
    owner: NDArray[np.int64]
    """[values], index of the request of each."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Requests that were observed from their arrival, in the order of it.

    Latencies, phases and ledgers are zero or without values for requests that are not complete.
    """

    names: tuple[str, ...]
    """Client's name of each request, empty without one."""
    facts: dict[str, Floats]
    """[requests] by name: times and token counts."""
    is_complete: Floats
    """[requests], 1 where the request was answered, else 0."""
    is_failed: Floats
    """[requests], 1 where the server did not answer it as a whole, else 0."""
    latencies: dict[Metric, Values]
    phases_ns: dict[str, Floats]
    """[requests] by name: device time."""
    ledgers_ns: dict[Metric, Floats]
    """[requests, causes] of the time that a latency covers."""
    longest_gaps_ns: Floats
    """[requests, GAP_CAUSES] of each request's longest gap between tokens; zeros if unknown."""


def complete(request: FinalRequest) -> bool:
    """Return whether a request has finished and its whole life was observed."""
    return request.finish in _COMPLETE and not request.joined_late and not request.ledger_missing


class ColumnsBuilder:
    """Columns in the making.

    They take about a kilobyte for each request, 16 bytes for each token and 32 for each step.

    Attributes:
        num_left_out: number of requests that were observed in part, which no column holds.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self._names: list[str] = []
        self._rows: list[tuple[int, ...]] = []
        self._ns: dict[Metric, array[float]] = {metric: array("d") for metric in COMPARED}
        self._owner: dict[Metric, array[int]] = {metric: array("q") for metric in COMPARED}
        self._ledgers_ns: dict[Metric, array[int]] = {metric: array("q") for metric in LEDGERS}
        self._gaps = LongestGaps()

    def on_step(self, step: FinalStep) -> None:
        """Keep what the longest gaps of its requests need of a step."""
        self._gaps.on_step(step)

    def add(self, request: FinalRequest) -> None:
        """Add a request, unless it was observed in part."""
        is_complete = complete(request)
        if request.joined_late or (request.finish in _COMPLETE and not is_complete):
            self.num_left_out += 1
            self._gaps.forget(request)
            return
        is_failed = not is_complete and request.finish not in _NOT_THE_SERVER
        number = len(self._rows)
        self._names.append(request.external_id or "")
        self._rows.append(
            (
                request.arrived_ns,
                request.delivered_ns,
                request.prompt_tokens or 0,
                request.cached_tokens,
                request.output_tokens,
                is_complete,
                is_failed,
                *(_phases_ns(request) if is_complete else (0,) * len(PHASES)),
            )
        )
        for metric in LEDGERS:
            part = breakdown(request, metric) if is_complete else None
            by_cause = {} if part is None else part.by_cause
            self._ledgers_ns[metric].extend([by_cause.get(cause, 0) for cause in CAUSES])
        for metric in COMPARED if is_complete else ():
            values = _latency(request, metric)
            self._ns[metric].extend(values)
            self._owner[metric].extend([number] * len(values))
        if is_complete:
            self._gaps.add(number, request)
        self._gaps.forget(request)

    def columns(self) -> Columns:
        """Return the requests so far."""
        width = len(_FACTS) + 2 + len(PHASES)
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, width)
        order = np.lexsort(rows.T[::-1])
        place = np.argsort(order)
        facts = rows[order, : len(_FACTS)].T
        is_complete, is_failed, *phases_ns = rows[order, len(_FACTS) :].T
        return Columns(
            names=tuple(self._names[at] for at in order.tolist()),
            facts=dict(zip(_FACTS, facts, strict=True)),
            is_complete=is_complete,
            is_failed=is_failed,
            latencies={
                metric: Values(np.array(ns), place[np.array(self._owner[metric], dtype=np.int64)])
                for metric, ns in self._ns.items()
            },
            phases_ns=dict(zip(PHASES, phases_ns, strict=True)),
            ledgers_ns={
                metric: np.array(ns, dtype=np.float64).reshape(-1, len(CAUSES))[order]
                for metric, ns in self._ledgers_ns.items()
            },
            longest_gaps_ns=self._gaps.rows_ns(len(rows))[order],
        )


def columns_of(requests: Iterable[FinalRequest]) -> Columns:
    """Return requests as columns."""
    builder = ColumnsBuilder()
    for request in requests:
        builder.add(request)
    return builder.columns()


def _latency(request: FinalRequest, metric: Metric) -> Sequence[float]:
    if metric == "tbt":
        return request.tbt_ns
    found = breakdown(request, metric)
    return () if found is None else (found.whole_ns / found.num_gaps,)


def _phases_ns(request: FinalRequest) -> tuple[int, ...]:
    return (
        request.prefill_ns,
        request.recomputed.ns,
        request.decode_ns,
        request.drafted.ns,
        request.rejected.ns,
    )
