"""Other rules for the same step: views over what the fair split is made of.

The fold computes `fair` alone. Whoever asks for another rule gets it from what the step was split
with: its model, and who was in it.

    fair        Shapley value      what a request adds, averaged over all orders     `split.price`
    phase       Owen value         likewise, but each phase comes as one: no phase pays more than it
                                   would alone, as long as phases are cheaper together
    token       Aumann-Shapley     one price per token: a request cut in two pays the same, and
                                   nobody else's price changes
    marginal    T(S) - T(S - i)    what the step would have saved without it
    standalone  T({i})             what it would have taken alone

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

from inferscope.attribution.counterfactual import alone_ns
from inferscope.attribution.marginal import marginal_ns
from inferscope.attribution.padding import padding, padding_after
from inferscope.attribution.split import (
    NOTHING_NS,
    Priced,
    by_row,
    parts_ns,
    price,
    round_ns,
    split_f,
    to_whole_ns,
)
from inferscope.attribution.split import shares_ns as fair_shares_ns
from inferscope.cost.batch import Batch
from inferscope.cost.model import StepModel
from inferscope.cost.step_table import RowsOfMembers, StepTable

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
    prefills: list[int]
    """Positions of the requests that prefill; the others decode."""
    row_tokens: Ints
    """[rows]; a request in two phases has two."""
    member_of_row: Ints | None
    """[rows], positions of the requests; None where rows and requests are the same."""

    def priced(self) -> Priced:
        """Return it as a table of one step, with the fair parts."""
        rows = None
        if self.member_of_row is not None:
            num = np.array([len(self.row_tokens)])
            rows = RowsOfMembers(self.member_of_row, self.row_tokens, num)
        return price(self.model, StepTable.of(self.batch, self.prefills, rows=rows))


def parts(rule: str, of: Priced) -> Floats:
    """Return each request's part of one step by a rule or column, in the model's nanoseconds."""
    return _BY_NAME[rule](of)


def shares_ns(rule: str, of: Priced, busy_ns: int) -> Ints:
    """Divide a rank's time for one step by one of RULES.

    Args:
        rule: its name.
        of: the step.
        busy_ns: the time, padding and idling left out.

    Returns:
        whole nanoseconds by row, summing to `busy_ns`.
    """
    if rule == "fair" or not _is_known(of):
        return fair_shares_ns(of, np.array([busy_ns]))
    paid = parts(rule, of)
    return round_ns(by_row(of.table, paid * (busy_ns / paid.sum())), busy_ns)


def column_ns(name: str, of: Priced, busy_ns: int) -> Ints:
    """Return one of COLUMNS on the scale of a rank's time, by row: what is modelled, as measured.

    A model that knows no cost says nothing of single requests; they are taken as equal then, as in
    the split.
    """
    if not _is_known(of):
        return to_whole_ns(np.ones(of.table.row_sizes.item()), busy_ns)
    exact = parts(name, of) * (busy_ns / of.modelled_ns)
    return np.rint(by_row(of.table, exact)).astype(np.int64)


def _is_known(of: Priced) -> bool:
    return NOTHING_NS < of.modelled_ns.item() < math.inf


# --- rules ------------------------------------------------------------------------------------


def token(of: Priced) -> Floats:
    """Price tokens (Aumann-Shapley): f and g at their means, padding alike for all who are padded.

    It is the integral of marginal costs along the way on which all requests grow from nothing
    together: there all have the longest one beside them from the start.
    """
    model, table = of.model, of.table
    num_tokens, num_rows = table.num_tokens.item(), table.num_rows.item()
    paid: Floats = np.multiply(table.tokens, model.f(num_tokens) / num_tokens)
    paid += model.g(num_rows) / max(1, num_rows) * table.sampled
    is_single = table.visible > 0
    once = model.decoding_ns / max(1, table.num_single.item())
    once += model.padded_ns * table.longest.item()
    paid[is_single] += model.single_ns * table.visible[is_single] + once
    paid[table.chunks] += of.attention_ns
    return paid


def phase(of: Priced) -> Floats:
    """Divide the step over its two phases, then each phase's part over its requests (Owen).

    Phases come one after the other, either first with equal chance; within a phase all orders are
    equally likely. So each request pays the mean of its Shapley values in two games: its phase
    alone, and what its phase adds to the whole of the other.
    """
    model, table = of.model, of.table
    if not 0 < len(table.prefills) < len(table.tokens):
        return parts_ns(of)
    paid = np.zeros(len(table.tokens))
    phases = table.prefills, np.flatnonzero(~table.is_prefill)
    for members, others in (phases, phases[::-1]):
        this, other = table.members(members), table.members(others)
        chunks, num_single = this.chunk_tokens.tolist(), this.num_single.item()
        first, single_first = split_f(model, chunks, num_single)
        before = other.num_tokens.item()
        second, single_second = split_f(model, chunks, num_single, num_before=before)
        num_rows, all_rows = this.num_rows.item(), table.num_rows.item()
        g_ns = model.g(num_rows) + model.g(all_rows) - model.g(other.num_rows.item())
        of_phase = g_ns / 2 / max(1, num_rows) * this.sampled
        of_phase[this.chunks] += (np.array(first) + second) / 2 + model.attention_ns(this)
        if num_single:
            singles = this.visible > 0
            visible, other_single = (
                this.visible[singles].astype(np.float64),
                other.num_single.item(),
            )
            times = 1.0 if other_single else 2.0
            of_phase[singles] += model.single_ns * visible + (single_first + single_second) / 2
            of_phase[singles] += model.decoding_ns * times / 2 / num_single
            padded = padding(visible) + padding_after(
                visible, num_before=other_single, longest_before=other.longest.item()
            )
            of_phase[singles] += model.padded_ns * padded / 2
        paid[members] = of_phase
    return paid


_BY_NAME: dict[str, Callable[[Priced], Floats]] = {
    "fair": parts_ns,
    "phase": phase,
    "token": token,
    "marginal": marginal_ns,
    "standalone": alone_ns,
}
