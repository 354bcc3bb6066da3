"""Other rules for the same step: views over the components that the fair split is made of.

The fold computes `fair` alone. Whoever asks for another rule gets it from what the step was split
with: its model, who was in it, and each one's attention.

    fair        Shapley value      what a request adds, averaged over all orders     `split.fair`
    phase       Owen value         likewise, but each phase comes as one: no phase pays more than it
                                   would alone, as long as phases are cheaper together
    token       Aumann-Shapley     one price per token: a request cut in two pays the same, and
                                   nobody else's price changes
    marginal    T(S) - T(S - i)    what the step would have saved without it
    standalone  T({i})             what it would have taken alone           `cost.alone`

The first three sum to the step. The other two do not, and are never scaled to: standalone - fair is
the discount that batching gives a request; of a batch that is cheaper together, marginals sum to
less than the step. All parts are nanoseconds of the model, to be scaled to what was measured.

g(M) goes by sampled rows. That is exact where nobody samples more than one row, or g is linear, as
a fitted g is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.padding import padding, padding_after
from inferscope.attribution.split import NOTHING_NS, fair, round_ns, split_f, to_whole_ns
from inferscope.cost.alone import alone
from inferscope.cost.batch import Batch, Line
from inferscope.cost.model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RULES = ("fair", "phase", "token")
"""They sum to the step."""
COLUMNS = ("marginal", "standalone")
"""They do not."""


class Components(msgspec.Struct, frozen=True, gc=False):
    """What a step's split was made of; nothing in it is a copy."""

    model: StepModel
    """In force when the step was split."""
    batch: Batch
    own: Line
    """Attention, as `model.own` gives it."""
    prefills: list[int]
    """Positions of the requests that prefill; the others decode."""
    row_tokens: Ints
    """[rows]; a request in two phases has two."""
    member_of_row: Ints | None
    """[rows], positions of the requests; None where rows and requests are the same."""

    def by_row(self, parts: Floats) -> Floats:
        """Divide the requests' parts over their rows, by tokens."""
        if self.member_of_row is None:
            return parts
        per_token = parts / self.batch.team.tokens
        divided: Floats = per_token[self.member_of_row] * self.row_tokens
        return divided


def parts(rule: str, of: Components) -> Line:
    """Return each request's part of a step by a rule or column, in the model's nanoseconds."""
    return _BY_NAME[rule](of)


def shares_ns(rule: str, of: Components, busy_ns: int) -> Ints:
    """Divide a rank's time for a step by one of RULES.

    Args:
        rule: its name.
        of: the step's components.
        busy_ns: the time, padding and idling left out.

    Returns:
        whole nanoseconds by row, summing to `busy_ns`.
    """
    line = parts(rule, of)
    return scaled_ns(line, of, modelled_ns=line.total(of.batch), busy_ns=busy_ns)


def column_ns(name: str, of: Components, busy_ns: int) -> Ints:
    """Return one of COLUMNS on the scale of a rank's time, by row: what is modelled, as measured.

    A model that knows no cost says nothing of single requests; they are taken as equal then, as in
    the split.
    """
    modelled_ns = fair(of.model, of.batch, of.own).total(of.batch)
    line = parts(name, of)
    if not NOTHING_NS < modelled_ns < math.inf:
        return to_whole_ns(np.ones(len(of.row_tokens)), busy_ns)
    exact = of.by_row(line.values(of.batch, busy_ns / modelled_ns))
    return np.rint(exact).astype(np.int64)


def scaled_ns(line: Line, of: Components, *, modelled_ns: float, busy_ns: int) -> Ints:
    """Scale a step's parts, which sum to `modelled_ns`, to a time: whole nanoseconds by row."""
    if not NOTHING_NS < modelled_ns < math.inf:
        return to_whole_ns(np.ones(len(of.row_tokens)), busy_ns)
    exact = line.values(of.batch, busy_ns / modelled_ns)
    return round_ns(exact if of.member_of_row is None else of.by_row(exact), busy_ns)


# --- rules ------------------------------------------------------------------------------------


def token(model: StepModel, batch: Batch, own: Line) -> Line:
    """Price tokens (Aumann-Shapley): f and g at their means, padding alike for all who are padded.

    It is the integral of marginal costs along the way on which all requests grow from nothing
    together: there all have the longest one beside them from the start.
    """
    team = batch.team
    per_token = model.f(team.num_tokens) / team.num_tokens
    per_row = model.g(team.num_rows) / team.num_rows if team.num_rows else 0.0
    chunks = [
        attention + per_token * tokens + per_row * rows
        for attention, tokens, rows in zip(
            own.chunks, team.chunk_tokens, team.chunk_rows, strict=True
        )
    ]
    level: float | Floats = per_token + model.padded_ns * batch.longest_single
    level += model.decoding_ns / max(1, team.num_single)
    level += per_row if team.rows is None else np.multiply(team.rows, per_row)
    return Line(model.single_ns, level, chunks)


def marginal(model: StepModel, batch: Batch, own: Line) -> Line:
    """Return what the step would save without each request, all others staying."""
    team = batch.team
    f_ns, g_ns = model.f(team.num_tokens), model.g(team.num_rows)

    def of_rows(rows: int) -> float:
        return g_ns - model.g(team.num_rows - rows)

    chunks = [
        attention + f_ns - model.f(team.num_tokens - tokens) + of_rows(rows)
        for attention, tokens, rows in zip(
            own.chunks, team.chunk_tokens, team.chunk_rows, strict=True
        )
    ]
    level: float | Floats = f_ns - model.f(team.num_tokens - 1)
    level += model.decoding_ns if team.num_single == 1 else 0.0
    level += of_rows(1) if team.rows is None else _each(team.rows, of_rows)
    if model.padded_ns and team.num_single:
        level += model.padded_ns * _padding_saved(batch)
    return Line(model.single_ns, level, chunks)


def phase(model: StepModel, batch: Batch, own: Line, prefills: list[int]) -> Line:
    """Divide the step over its two phases, then each phase's part over its requests (Owen).

    Phases come one after the other, either first with equal chance; within a phase all orders are
    equally likely. So each request pays the mean of its Shapley values in two games: its phase
    alone, and what its phase adds to the whole of the other.
    """
    team = batch.team
    if not prefills or len(prefills) == len(batch.context):
        return fair(model, batch, own)
    is_prefill = np.zeros(len(batch.context), dtype=np.bool_)
    is_prefill[prefills] = True
    unions = _Union(batch, is_prefill), _Union(batch, ~is_prefill)
    level, chunks = np.zeros(len(batch.context)), list(own.chunks)
    for union, other in (unions, unions[::-1]):
        first, single_first = split_f(model, union.chunks, union.num_single)
        second, single_second = split_f(
            model, union.chunks, union.num_single, num_before=other.num_tokens
        )
        g_ns = model.g(union.num_rows) + model.g(team.num_rows) - model.g(other.num_rows)
        per_row = g_ns / 2 / union.num_rows if union.num_rows else 0.0
        for at, part, after in zip(union.chunks_at, first, second, strict=True):
            chunks[at] += (part + after) / 2 + per_row * team.chunk_rows[at]
        rows = 1.0 if team.rows is None else team.rows[union.singles]
        level[union.singles] += (single_first + single_second) / 2 + per_row * rows
        if union.num_single:
            times = 1.0 if other.num_single else 2.0
            level[union.singles] += model.decoding_ns * times / 2 / union.num_single
        if model.padded_ns and union.num_single:
            paid = padding(union.visible) + padding_after(
                union.visible, num_before=other.num_single, longest_before=other.longest
            )
            level[union.singles] += model.padded_ns * paid / 2
    return Line(model.single_ns, level, chunks)


class _Union:
    """The requests of one phase."""

    def __init__(self, batch: Batch, is_in: NDArray[np.bool_]) -> None:
        team = batch.team
        self.chunks_at = [at for at, position in enumerate(team.chunks) if is_in[position]]
        """Among the step's chunks."""
        self.chunks = [team.chunk_tokens[at] for at in self.chunks_at]
        is_single = is_in.copy()
        is_single[team.chunks] = False
        self.singles = is_single.nonzero()[0]
        self.num_single = len(self.singles)
        self.visible = batch.context[self.singles] + 1.0
        self.longest = float(self.visible.max()) if self.num_single else 0.0
        self.num_tokens = sum(self.chunks) + self.num_single
        rows = self.num_single if team.rows is None else int(team.rows[self.singles].sum())
        self.num_rows = rows + sum(team.chunk_rows[at] for at in self.chunks_at)


def _padding_saved(batch: Batch) -> Floats:
    """Return what the padding would shrink by without each request with one token: [requests].

    Without the longest all are padded to the next one only. Chunks have entries that say nothing.
    """
    team = batch.team
    saved = np.full(len(batch.context), float(batch.longest_single))
    visible = batch.context + 1
    visible[team.chunks] = 0
    longest = int(visible.argmax())
    visible[longest] = 0
    next_longest = int(visible.max())
    saved[longest] += (team.num_single - 1) * (batch.longest_single - next_longest)
    return saved


def _each(counts: Ints, cost: Callable[[int], float]) -> Floats:
    """Return a cost by count: [counts]. There are few different ones."""
    different, at = np.unique(counts, return_inverse=True)
    found: Floats = np.array([cost(count) for count in different.tolist()])[at]
    return found


_BY_NAME: dict[str, Callable[[Components], Line]] = {
    "fair": lambda of: fair(of.model, of.batch, of.own),
    "phase": lambda of: phase(of.model, of.batch, of.own, of.prefills),
    "token": lambda of: token(of.model, of.batch, of.own),
    "marginal": lambda of: marginal(of.model, of.batch, of.own),
    "standalone": lambda of: alone(of.model, of.batch, of.own),
}
