"""Device time by request, tenant, phase or model: each step's time divided by a rule and summed.

A `SharesSink` is a sink of the fold; when the fold is done it returns the table. Its rows, padding,
idle steps and unattributed time sum to the steps' measured time in whole nanoseconds under every
rule. The columns `standalone` and `marginal` are not divisions and do not sum to anything: a
request's standalone time minus its share is what batching saved it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import Components, column_ns, price_steps, rule_shares_ns
from inferscope.fold import Collector, EngineFold, FinalRequest, FinalStep
from inferscope.records import PREFILL

Ints = NDArray[np.int64]
By = Literal["request", "tenant", "phase", "model"]

_Key = tuple[str, str]
"""Engine ID and request ID."""
_PREFILL, _DECODE = range(2)
_Waiting = tuple[FinalStep, Components, Ints]
"""A step, the components it is divided with, and the table rows of its requests."""
_TENANT = "tenant"
_FIRST_ROOM = 256
_BATCH_STEPS = 256
"""Maximum number of steps divided at once; dividing each alone takes several times as long."""


@dataclass(frozen=True)
class Amounts:
    """Device time of one row, in one phase or both."""

    share_ns: int
    """Apportioned time."""
    standalone_ns: int
    """Modelled time of the same work without other requests, scaled to the measured time."""
    marginal_ns: int
    """Modelled time that the steps would have saved without it, scaled likewise."""
    tokens: int
    """Tokens computed."""

    @property
    def discount_ns(self) -> int:
        """Return the time that batching saved."""
        return self.standalone_ns - self.share_ns

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.share_ns + other.share_ns,
            self.standalone_ns + other.standalone_ns,
            self.marginal_ns + other.marginal_ns,
            self.tokens + other.tokens,
        )


NO_AMOUNTS = Amounts(0, 0, 0, 0)


@dataclass(frozen=True)
class ShareRow:
    """Device time of one request, tenant, phase or model."""

    name: str | None
    """Name of the row; None where the records do not hold it."""
    engine: str | None
    """Engine of a request; None for rows that span engines."""
    external_id: str | None
    prefill: Amounts
    decode: Amounts

    @property
    def whole(self) -> Amounts:
        """Return the sum of both phases."""
        return self.prefill + self.decode


@dataclass(frozen=True)
class Shares:
    """Table of device time, with its sums and method."""

    rule: str
    by: By
    rows: tuple[ShareRow, ...]
    """Rows, the largest first."""
    padding_ns: int
    """Time of padding tokens, which belong to no request."""
    idle_ns: int
    """Time of dummy steps, which keep a data-parallel rank in step with the others."""
    unattributed_ns: int
    """Time of steps without a known request."""
    measured_ns: int
    """Measured time of all steps: the sum of the rows and the three fields above."""
    alone_ns: int
    """Part of the rows from steps of a single request: measured, not apportioned."""
    num_steps: int
    """Number of steps, each rank's counted."""
    num_unjoined: int
    """Number of steps whose records are missing or inconsistent; they are in no row."""
    clocks: tuple[str, ...]
    """Clocks that timed the steps: device, host."""
    source_shares: dict[str, float]
    """Share of the time by the source of the cost model's coefficients."""
    residuals: tuple[float, float, float] | None
    """Measured over modelled time, minus one: 10th percentile, median, 90th; None without steps."""
    synthetic: tuple[str, ...] = ()
    """Engines whose records are marked as synthetic."""


class SharesSink:
    """Sink that sums the shares of all steps by request and phase."""

    def __init__(self, rule: str) -> None:
        """Start empty; `rule` is one of `attribution.rules.RULES`."""
        self._rule = rule
        self._index: dict[_Key, int] = {}
        self._cells = np.zeros((_FIRST_ROOM, 2, 4), dtype=np.int64)
        """Sums in ns and tokens, [requests, phases, amounts]."""
        self._names: dict[_Key, tuple[str | None, str | None]] = {}
        """External ID and tenant by request."""
        self._team: tuple[str, tuple[str, ...]] = ("", ())
        self._at: Ints = np.zeros(0, dtype=np.int64)
        """Row indices of the current batch's requests."""
        self._steps: defaultdict[int, list[_Waiting]] = defaultdict(list)
        """Steps not divided yet, by model."""
        self._num_waiting = 0
        self._padding_ns = self._idle_ns = self._unattributed_ns = self._measured_ns = 0
        self._alone_ns = 0
        self._clocks: set[str] = set()
        self._by_source: defaultdict[str, int] = defaultdict(int)
        self._residuals = array("d")
        self._num_steps = 0

    # --- a sink ---------------------------------------------------------------------------------

    def on_step(self, step: FinalStep) -> None:
        """Add one rank's step."""
        self._num_steps += 1
        self._measured_ns += step.measured_ns
        self._padding_ns += step.padding_ns
        self._clocks.add(step.clock)
        if step.is_dummy:
            self._idle_ns += step.unattributed_ns
        else:
            self._unattributed_ns += step.unattributed_ns
        of, busy_ns = step.components, step.busy_ns
        if step.unnamed is not None:  # requests known on another host
            self._unattributed_ns += busy_ns
        if of is None or not busy_ns:
            return
        self._steps[id(of.model)].append((step, of, self._places(step)))
        self._num_waiting += 1
        if self._num_waiting == _BATCH_STEPS:
            self._divide()
        if of.num_requests == 1:
            self._alone_ns += busy_ns
        self._by_source[of.model.source] += busy_ns
        self._residuals.append(step.model_residual)

    def _divide(self) -> None:
        """Divide the pending steps, those of one model at once."""
        for waiting in self._steps.values():
            steps, components, places = zip(*waiting, strict=True)
            priced, busy_ns = price_steps(components), np.array([step.busy_ns for step in steps])
            if self._rule == "fair":
                divided_ns = np.concatenate([step.shares_ns for step in steps])
            else:
                divided_ns = rule_shares_ns(self._rule, priced, busy_ns)
            columns = [
                divided_ns,
                column_ns("standalone", priced, busy_ns),
                column_ns("marginal", priced, busy_ns),
                np.concatenate([step.tokens for step in steps]),
            ]
            is_decode = np.concatenate([step.phases != PREFILL for step in steps]).astype(np.int64)
            np.add.at(self._cells, (np.concatenate(places), is_decode), np.stack(columns, axis=1))
        self._steps.clear()
        self._num_waiting = 0

    def on_request(self, request: FinalRequest) -> None:
        """Record a request's name and tenant."""
        self._note((request.engine_id, request.request_id), request.external_id, request.attributes)

    def _note(self, key: _Key, external_id: str | None, attributes: Mapping[str, str]) -> None:
        if external_id is not None or _TENANT in attributes:
            self._names[key] = (external_id, attributes.get(_TENANT))

    def _places(self, step: FinalStep) -> Ints:
        team = (step.engine_id, step.request_ids)
        if team != self._team:
            self._team = team
            index = self._index
            places = [
                index.setdefault((step.engine_id, request_id), len(index))
                for request_id in step.request_ids
            ]
            self._at = np.array(places, dtype=np.int64)
            if len(index) > len(self._cells):
                more = np.zeros((len(index), *self._cells.shape[1:]), dtype=np.int64)
                self._cells = np.concatenate([self._cells, more])
        return self._at

    # --- the table ------------------------------------------------------------------------------

    def table(self, by: By, collector: Collector) -> Shares:
        """Return the table.

        Args:
            by: dimension to group by.
            collector: the fold, which knows the unfinished requests and the models.
        """
        self._divide()
        for engine in collector.engines.values():
            for alive in engine.lives.table.alive():
                key = (engine.engine_id, alive.request_id)
                self._note(key, alive.external_id, alive.attributes)
        return Shares(
            rule=self._rule,
            by=by,
            rows=tuple(sorted(self._rows(by, collector.engines), key=_largest_first)),
            padding_ns=self._padding_ns,
            idle_ns=self._idle_ns,
            unattributed_ns=self._unattributed_ns,
            measured_ns=self._measured_ns,
            alone_ns=self._alone_ns,
            num_steps=self._num_steps,
            num_unjoined=collector.num_unjoined,
            clocks=tuple(sorted(self._clocks)),
            source_shares=_normalised(self._by_source),
            residuals=_spread(self._residuals),
            synthetic=tuple(
                name for name, engine in collector.engines.items() if engine.is_synthetic
            ),
        )

    def _rows(self, by: By, engines: Mapping[str, EngineFold]) -> list[ShareRow]:
        cells = self._cells[: len(self._index)]
        if by == "phase":
            sums = cells.sum(axis=0)
            prefill, decode = Amounts(*sums[_PREFILL].tolist()), Amounts(*sums[_DECODE].tolist())
            return [
                ShareRow("prefill", None, None, prefill, NO_AMOUNTS),
                ShareRow("decode", None, None, NO_AMOUNTS, decode),
            ]
        if by == "request":
            return [
                ShareRow(key[1], key[0], self._names.get(key, (None,))[0], *_amounts(cells[at]))
                for key, at in self._index.items()
            ]
        if by == "tenant":
            return self._grouped(lambda key: self._names.get(key, (None, None))[1])
        served = {name: _served(engine) for name, engine in engines.items()}
        return self._grouped(lambda key: served.get(key[0]))

    def _grouped(self, name_of: Callable[[_Key], str | None]) -> list[ShareRow]:
        groups: defaultdict[str | None, list[int]] = defaultdict(list)
        for key, at in self._index.items():
            groups[name_of(key)].append(at)
        return [
            ShareRow(name, None, None, *_amounts(self._cells[places].sum(axis=0)))
            for name, places in groups.items()
        ]


def _amounts(cells: Ints) -> tuple[Amounts, Amounts]:
    prefill, decode = cells.tolist()
    return Amounts(*prefill), Amounts(*decode)


def _served(engine: EngineFold) -> str | None:
    info = engine.info
    return (info.served_name or info.model or None) if info is not None else None


def _largest_first(row: ShareRow) -> tuple[int, str, str]:
    return -row.whole.share_ns, row.name or "", row.engine or ""


def _normalised(amounts: Mapping[str, int]) -> dict[str, float]:
    whole = sum(amounts.values())
    return {name: amount / whole for name, amount in sorted(amounts.items())} if whole else {}


def _spread(values: array[float]) -> tuple[float, float, float] | None:
    if not values:
        return None
    low, middle, high = np.quantile(np.frombuffer(values), (0.1, 0.5, 0.9)).tolist()
    return low, middle, high
