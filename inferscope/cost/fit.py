"""The online fit, which learns step times from a running server.

Steps of different make-up are observations of one linear model with non-negative coefficients.
The fit weighs relative errors, forgets slowly, bounds the pull of outliers (Huber), and bounds that
of slow steps most, so that a co-tenant is not learned as normal: a healthy step is modelled.
The first step with a given token count has little weight, because much of it may be compilation for
its size.

    T = c0 + f-pieces(N) + c·M + c·[any singles] + c·Σ visible (singles)
      + c·singles·longest visible + c·chunks + c·Σ pairs + c·Σ visible (chunks)
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.model import ENOUGH_STEPS, MAX_TOKENS, StepModel, Tables
from inferscope.cost.step_table import StepTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

REMEMBERED_STEPS = 2048
REFRESH_STEPS = 512
PROVISIONAL_STEPS = (1, 2, 4, 8, 16, 32)
"""Refreshes near the first model: they correct its scale at once, its proportions step by step."""
FIRST_STEPS = (ENOUGH_STEPS, 128, 256)
"""A first rough fit is better than the roofline, so the first refreshes come sooner."""
_FIRST_OF_KIND = 4
"""Steps of a kind that no fit knows yet, of which the next must know: it can only guess at them."""
_HALF_LIFE_STEPS = 1024
_CAPS = (8, 64)
"""f bends down here (threads and tiles fill up) …"""
_HINGES = (128, 512)
"""… and up here (arithmetic overtakes the reading of weights)."""
_NUM_TOKENS: Floats = np.arange(MAX_TOKENS + 1, dtype=np.float64)
"""All that a table holds."""
_NUM_F = 2 + len(_CAPS) + len(_HINGES)
_NUM_FEATURES = _NUM_F + 7
_CHUNKS = 5
"""Column of an observation: the number of chunks."""
_SIZES = tuple(2**bits for bits in range(14))
"""Tokens at which a first model is read."""
_NUM_KEPT = 1 + _NUM_FEATURES - _NUM_F
"""Number of columns of an observation; f's features follow from its tokens."""
_HUBER = 0.1
"""Relative residual from which an observation's pull no longer grows."""
_SLOW_PULL = 0.25
"""Pull of a step slower than modelled, against a faster one. Only a wrong model explains a step
that is too fast; a co-tenant explains a slow one, more so where arithmetic counts most."""
_FIRST_PULL = 0.1
"""Pull of the first step of a token count, against those that follow it. If products are compiled
by size (oneDNN: 2 ms of 7) it reflects that more than its work; if sizes rarely repeat, it is the
only source."""
_ROUNDS = 4
_ROUNDS_AGAIN = 2
"""Rounds of weighing by residuals that start from the last fit's, which the new ones resemble."""
_KNOWN = 2.0
"""A line is trusted this far beyond what it was fitted to: contexts grow from step to step."""
_PRIOR_WEIGHT = 1e-3
_FIRST_WEIGHT = 0.02
"""Weight of a first model's coefficient that is wrong by all of itself, against a step that is."""
_LEAST_PART = 0.5
"""Part of a step by which a coefficient may be wrong that the first model has near zero."""
_RECENCY = 0.5 ** (np.arange(REMEMBERED_STEPS) / _HALF_LIFE_STEPS)
"""The weight of an observation, by the number of those since."""


class _Room(threading.local):
    """Room to work in: arrays of this length, made anew, are pages from the system each.

    One for all fits of a thread: of a hundred engines each has half a megabyte less.
    """

    def __init__(self) -> None:
        self.rows: Floats = np.empty((REMEMBERED_STEPS, _NUM_FEATURES))
        self.design: Floats = np.empty((REMEMBERED_STEPS, _NUM_FEATURES))
        self.weighted: Floats = np.empty((REMEMBERED_STEPS, _NUM_FEATURES))
        self.table: Floats = np.empty_like(_NUM_TOKENS)


_room = _Room()


def features(table: StepTable) -> Floats:
    """Return steps as observations: [steps, kept].

    Tokens, sampled rows, whether there are singles, Σ visible of these, singles · longest visible,
    chunks, Σ pairs and Σ visible of these.
    """
    columns = (
        table.num_tokens,
        table.num_rows,
        table.num_single > 0,
        table.sum_visible,
        table.num_single * table.longest,
        table.num_chunks,
        table.by_step(table.chunk_pairs),
        table.by_step(table.chunk_visible),
    )
    return np.stack(columns, axis=1).astype(np.float64)


class OnlineFit:
    """Observations of one execution mode, and the coefficients they give.

    Attributes:
        is_due: the last step that was taken in makes a refresh due.
    """

    def __init__(self, name: str) -> None:
        """Start empty; `name` is the mode's, for the fit's id."""
        self._name = name
        self._rows = np.zeros((REMEMBERED_STEPS, _NUM_KEPT))
        self._times = np.zeros(REMEMBERED_STEPS)
        self._is_first: Flags = np.zeros(REMEMBERED_STEPS, dtype=np.bool_)
        """[steps], whether the step is the first with its token count."""
        self._has_seen = bytearray(1)
        """Whether each token count up to the largest has occurred; MAX_TOKENS for all beyond."""
        self._seen = 0
        self._num_chunked = 0
        self._num_unknown = 0
        """Number of steps since the last fit of kinds that it does not know."""
        self.is_due = False
        self._first: Floats | None = None
        """Coefficients of the first model if it is provisional; None otherwise."""
        self._first_id = self._first_source = ""
        self._coefficients: Floats | None = None
        self._most: Floats = np.zeros(_NUM_FEATURES)
        """Largest value of each feature in a step of a known kind."""

    def begin_with(self, model: StepModel) -> None:
        """Restart from a model; if provisional, the first fits stay near it."""
        self._first = _coefficients(model) if model.is_provisional else None
        self._first_id, self._first_source = model.fit_id, model.source
        self._coefficients = None

    @property
    def is_provisional(self) -> bool:
        """Return whether the first model still counts: too few steps determine a model alone."""
        return self._first is not None and self._seen < FIRST_STEPS[0]

    def observe(self, rows: Floats, measured_ns: Ints | int) -> int:
        """Add healthy steps, up to one that makes a refresh due; return the number added.

        Args:
            rows: [steps, kept], rows from `features`.
            measured_ns: [steps].
        """
        num = self._num_to_refresh(rows)
        self.is_due = num <= len(rows)
        rows = rows[:num]
        at = np.arange(self._seen, self._seen + len(rows)) % REMEMBERED_STEPS
        self._rows[at] = rows
        self._times[at] = measured_ns if isinstance(measured_ns, int) else measured_ns[:num]
        is_first, has_seen = [], self._has_seen
        for size in np.minimum(rows[:, 0], MAX_TOKENS).astype(np.int64).tolist():
            if size >= len(has_seen):
                has_seen.extend(bytes(size + 1 - len(has_seen)))
            is_first.append(not has_seen[size])
            has_seen[size] = True
        self._is_first[at] = is_first
        self._seen += len(rows)
        self._num_chunked += np.count_nonzero(rows[:, _CHUNKS])
        return len(rows)

    def _num_to_refresh(self, rows: Floats) -> int:
        """Return the number of steps after which a refresh is due; more than given if it is not."""
        seen, is_provisional = self._seen, self.is_provisional
        marks = (*PROVISIONAL_STEPS, *FIRST_STEPS) if is_provisional else FIRST_STEPS
        due_at = min((mark for mark in marks if mark > seen), default=0)
        num = due_at - seen if due_at else REFRESH_STEPS - seen % REFRESH_STEPS
        if self._coefficients is not None and not (is_known := self.knows(rows[:num])).all():
            num_unknown = self._num_unknown + (~is_known).cumsum()
            most = 1 if is_provisional else _FIRST_OF_KIND
            num = min(num, int(num_unknown.searchsorted(most)) + 1)
            self._num_unknown = num_unknown.item(min(num, len(rows)) - 1)
        return num

    def knows(self, rows: Floats) -> Flags:
        """Return which steps are of a kind that the fit has learned from: [steps]."""
        observed = _observed(rows, out=np.empty((len(rows), _NUM_FEATURES)))
        known: Flags = np.logical_and.reduce(observed <= self._most, axis=1)
        return known

    def solve(self) -> StepModel | None:
        """Fit the remembered steps; return None if they do not determine a model."""
        num = min(self._seen, REMEMBERED_STEPS)
        if not num:
            return None
        self._num_unknown = 0
        weights = _RECENCY[(self._seen - 1 - np.arange(num)) % REMEMBERED_STEPS]
        weights[self._is_first[:num]] *= _FIRST_PULL
        design, weighted = _room.design[:num], _room.weighted[:num]
        rows = _observed(self._rows[:num], out=_room.rows[:num])
        np.divide(rows, self._times[:num, None], out=design)
        most = rows.max(axis=0)
        scale = design.max(axis=0)
        scale[most == 0.0] = 1.0
        design /= scale
        prior, ridge = self._prior(rows, self._times[:num], scale)
        has_fit = self._coefficients is not None and not self.is_provisional
        solution = np.zeros(_NUM_FEATURES) if prior is None else prior
        for _ in range(_ROUNDS_AGAIN if has_fit else _ROUNDS):
            bounded = weights
            if solution.any():
                residual = 1.0 - design @ solution
                bounded = weights * np.minimum(1.0, _HUBER / np.maximum(np.abs(residual), 1e-9))
                bounded[residual > 0] *= _SLOW_PULL
            np.multiply(design, bounded[:, None], out=weighted)
            gram = design.T @ weighted
            target = design.T @ bounded
            if prior is not None:
                pull = _PRIOR_WEIGHT * np.diag(gram) if ridge is None else ridge
                gram = gram + np.diag(pull)
                target = target + pull * prior
            solution = _non_negative(gram, target, solution)
        if not solution.any():
            return None
        if prior is not None:  # no step has these
            solution[most == 0.0] = prior[most == 0.0]
        self._coefficients = solution / scale
        self._most = np.maximum(self._most, _KNOWN * most)
        return self._model(self._coefficients, int(min(most.item(1), MAX_TOKENS)))

    def _prior(
        self, rows: Floats, times: Floats, scale: Floats
    ) -> tuple[Floats | None, Floats | None]:
        """Return the target and weights of the pull on the solution; None for the default pull."""
        if self.is_provisional:
            assert self._first is not None
            modelled = np.maximum(rows @ self._first, 1.0)
            prior = self._first * (float(np.median(times / modelled)) * scale)
            return prior, _FIRST_WEIGHT / np.maximum(prior, _LEAST_PART) ** 2
        return (None if self._coefficients is None else self._coefficients * scale), None

    def ratios(self, num: int) -> Floats:
        """Return measured over modelled time of the last `num` observations, oldest first."""
        if self._coefficients is None:
            return np.zeros(0)
        newest = np.arange(max(0, self._seen - min(num, REMEMBERED_STEPS)), self._seen)
        at = newest % REMEMBERED_STEPS
        rows = _observed(self._rows[at], out=_room.rows[: len(at)])
        modelled = np.maximum(rows @ self._coefficients, 1.0)
        ratios: Floats = self._times[at] / modelled
        return ratios

    def _model(self, coefficients: Floats, num_tokens: int) -> StepModel:
        of_slices = coefficients[_NUM_F + 1 :].tolist()
        decoding, single, padded, chunk, pair, context = of_slices
        tables_of = partial(_tables, coefficients[: _NUM_F + 1].tolist())
        f, g = tables_of(num_tokens)
        fit_id, source = f"{self._name}-{self._seen}", "fit"
        if self.is_provisional:
            fit_id, source = f"{self._first_id}+{fit_id}", self._first_source
        return StepModel(
            fit_id,
            source,
            f,
            g,
            single_ns=single,
            padded_ns=padded,
            chunk_ns=chunk,
            pair_ns=pair,
            context_ns=context,
            decoding_ns=decoding,
            num_learned=self._seen,
            num_chunked=self._num_chunked,
            tables_of=tables_of,
        )


def _coefficients(model: StepModel) -> Floats:
    """Return a model in the fit's features: its attention as is, f and g by the nearest bends."""
    sizes = [(n, m) for n in _SIZES for m in sorted({1, min(n, 8), min(n, 64)})]
    tokens, sampled = np.array(sizes, dtype=np.float64).T
    rows = np.zeros((len(sizes), 1 + _NUM_FEATURES - _NUM_F))
    rows[:, 0], rows[:, 1] = tokens, sampled
    design = _observed(rows, out=np.empty((len(sizes), _NUM_FEATURES)))[:, : _NUM_F + 1]
    design /= np.array([[model.f(n) + model.g(m)] for n, m in sizes])
    scale = design.max(axis=0)
    design /= scale
    start = np.zeros(_NUM_F + 1)
    tables = _non_negative(design.T @ design, design.sum(axis=0), start) / scale
    of_slices = (
        model.decoding_ns,
        model.single_ns,
        model.padded_ns,
        model.chunk_ns,
        model.pair_ns,
        model.context_ns,
    )
    return np.concatenate([tables, of_slices])


def _observed(kept: Floats, *, out: Floats) -> Floats:
    """Return the full feature matrix of rows from `features`: [steps, features]."""
    tokens = kept[:, 0]
    out[:, 0], out[:, 1] = 1.0, tokens
    for column, cap in enumerate(_CAPS, 2):
        np.minimum(tokens, cap, out=out[:, column])
    for column, hinge in enumerate(_HINGES, 2 + len(_CAPS)):
        np.maximum(tokens - hinge, 0.0, out=out[:, column])
    out[:, _NUM_F:] = kept[:, 1:]
    return out


def _tables(coefficients: list[float], num_tokens: int) -> Tables:
    """Return f and g for token counts up to a bound, which does not change their values."""
    constant, per_token, *bends, per_row = coefficients
    numbers, room = _NUM_TOKENS[: num_tokens + 1], _room.table[: num_tokens + 1]
    f = np.empty_like(numbers)
    f[0], f[1:] = 0.0, constant
    f += np.multiply(numbers, per_token, out=room)
    for cap, weight in zip(_CAPS, bends, strict=False):
        if weight:
            f[:cap] += numbers[:cap] * weight
            f[cap:] += cap * weight
    for hinge, weight in zip(_HINGES, bends[len(_CAPS) :], strict=True):
        beyond = len(f) - hinge
        if weight and beyond > 0:
            f[hinge:] += np.multiply(numbers[:beyond], weight, out=room[:beyond])
    return f, per_row * numbers


def _non_negative(gram: Floats, target: Floats, start: Floats) -> Floats:
    """Minimise ½xᵀGx - tᵀx over x ≥ 0 (Lawson and Hanson's active sets, on the normal equations).

    From `start`, whose coefficients above zero are tried first: from one solve to the next they
    seldom change. Others enter one at a time, the one that would help most first; those that an
    entry drives below zero leave again, at the point where they reach it.
    """
    num = len(target)
    x: Floats = start.copy()
    is_free = x > 0
    tolerance = 1e-9 * max(float(np.abs(target).max()), 1e-300)
    for _ in range(4 * num):
        while is_free.any():
            free = is_free.nonzero()[0]
            solved = np.linalg.lstsq(gram[free[:, None], free], target[free], rcond=None)[0]
            if (solved > 0).all():
                x[:] = 0.0
                x[free] = solved
                break
            falling = solved <= 0
            steps = x[free][falling] / np.maximum(x[free][falling] - solved[falling], 1e-300)
            x[free] += float(steps.min()) * (solved - x[free])
            is_free[free[x[free] <= tolerance * 1e-3]] = False
            is_free[free[int(np.flatnonzero(falling)[np.argmin(steps)])]] = False
            x[~is_free] = 0.0
        gain = np.where(is_free, -np.inf, target - gram @ x)
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        is_free[best] = True
    return x
