"""Alternative split rules for a step, computed from the components of the fair split.

The fold computes `fair` alone. Other rules are computed on demand from the inputs of the split: the
model, and the members of the step.

    fair        Shapley value      what a request adds, averaged over all orders     `split.price`
    phase       Owen value         likewise, but each phase comes as one: no phase pays more than it
                                   would alone, as long as phases are cheaper together
    token       Aumann-Shapley     one price per token: a request cut in two pays the same, and
                                   no other request's price changes
    marginal    T(S) - T(S - i)    what the step would have saved without it
    standalone  T({i})             what it would have taken alone

The first three sum to the step. The other two do not, and are never scaled to: standalone - fair is
the discount that batching gives a request; of a batch that is cheaper together, marginals sum to
less than the step. All parts are nanoseconds of the model, to be scaled to what was measured.

g(M) goes by sampled rows. That is exact if each request samples at most one row, or g is linear, as
a fitted g is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    round_steps_ns,
    shares_ns,
    split_f,
)
from inferscope.cost import StepModel, StepTable, cut_into_steps, look_up

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
    table: StepTable
    """All steps that were booked with it."""
    at: int
    """Position of the step in the table."""

    @property
    def num_requests(self) -> int:
        """Return how many requests were in the step."""
        return self.table.sizes.item(self.at)


def price_steps(steps: Sequence[Components]) -> Priced:
    """Price steps of one model as one table, with the fair parts."""
    return price(steps[0].model, StepTable.of_steps([(of.table, of.at) for of in steps]))


def parts(rule: str, of: Priced) -> Floats:
    """Return members' parts of their steps by a rule or column, in the model's nanoseconds."""
    return _BY_NAME[rule](of)


def rule_shares_ns(rule: str, of: Priced, busy_ns: Ints) -> Ints:
    """Divide a rank's time for each step by one of RULES.

    Args:
        rule: its name.
        of: the steps.
        busy_ns: [steps], the time, padding and idling left out.

    Returns:
        whole nanoseconds by row, summing to `busy_ns`.
    """
    if rule == "fair":
        return shares_ns(of, busy_ns)
    paid, sizes = parts(rule, of), of.table.sizes
    whole = np.array([of_step.sum() for of_step in cut_into_steps(paid, sizes)])
    exact = _by_known_row(of, paid, whole, busy_ns)
    return round_steps_ns(exact, busy_ns, of.table.row_sizes)


def column_ns(name: str, of: Priced, busy_ns: Ints) -> Ints:
    """Return one of COLUMNS on the scale of a rank's time, by row: what is modelled, as measured.

    A model without costs cannot rank single requests; they are taken as equal then, as in
    the split.
    """
    exact = _by_known_row(of, parts(name, of), of.modelled_ns, busy_ns)
    return np.rint(exact).astype(np.int64)


def _by_known_row(of: Priced, paid: Floats, whole: Floats, busy_ns: Ints) -> Floats:
    """Scale parts from a whole to a time, by row; fair shares where the model knows no cost."""
    is_known = (of.modelled_ns > NOTHING_NS) & (of.modelled_ns < math.inf)
    scale = busy_ns / np.where(is_known, whole, 1.0)
    exact = by_row(of.table, paid * scale[of.table.step_of])
    if is_known.all():
        return exact
    return np.where(np.repeat(is_known, of.table.row_sizes), exact, shares_ns(of, busy_ns))


# --- rules ------------------------------------------------------------------------------------


def token(of: Priced) -> Floats:
    """Price tokens (Aumann-Shapley): f and g at their means, padding alike for all who are padded.

    It is the integral of marginal costs along the way on which all requests grow from nothing
    together: there all have the longest one beside them from the start.
    """
    model, table, step = of.model, of.table, of.table.step_of
    per_token = look_up(model.f_ns, table.num_tokens) / table.num_tokens
    per_row = look_up(model.g_ns, table.num_rows) / np.maximum(table.num_rows, 1)
    once = model.decoding_ns / np.maximum(table.num_single, 1) + model.padded_ns * table.longest
    of_single = model.single_ns * table.visible + once[step]
    paid: Floats = table.tokens * per_token[step] + per_row[step] * table.sampled
    paid += np.where(table.visible > 0, of_single, 0.0)
    paid[table.chunks] += of.attention_ns
    return paid


def phase(of: Priced) -> Floats:
    """Divide the step over its two phases, then each phase's part over its requests (Owen).

    Phases come one after the other, either first with equal chance; within a phase all orders are
    equally likely. So each request pays the mean of its Shapley values in two games: its phase
    alone, and what its phase adds to the whole of the other.
    """
    paid, table = parts_ns(of), of.table
    num_prefills = np.bincount(table.step_of[table.prefills], minlength=len(table))
    of_mixed = ((num_prefills > 0) & (num_prefills < table.sizes)).nonzero()[0].tolist()
    for step in of_mixed:
        of_step = slice(table.first.item(step), table.first.item(step) + table.sizes.item(step))
        paid[of_step] = _of_phases(of.model, table.part(step, step + 1))
    return paid


def _of_phases(model: StepModel, table: StepTable) -> Floats:
    """Divide one step that has both phases."""
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
