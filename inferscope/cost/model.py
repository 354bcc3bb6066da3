"""The cost model of a step: T(S) = f(N) + g(M) + Σ own_i, in nanoseconds.

N tokens are scheduled, M rows are sampled. `f` is all that depends on the token total alone
(launches, dense matrices, experts), `g` the logits, `own` each slice's attention. `f` is a table by
N with its prefix sums beside it, which is what makes the fair split of a step O(1) in batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.hbm import activation_bytes, weight_bytes
from inferscope.cost.peaks import Peaks
from inferscope.cost.shape import is_counted, kv_bytes_per_token, linear_parameters
from inferscope.cost.step_table import StepTable
from inferscope.records import CALIBRATION, Shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TOKENS = 16_384
"""Length of complete tables; a step beyond it is priced at their last slope."""
Tables = tuple[Floats, Floats]
"""Tables `f_ns` and `g_ns` of a model."""
BY_TOKENS = "tokens"
"""Source of a model without a shape."""
ENOUGH_STEPS = 64
"""Number of steps from which a fit is not provisional any more."""


@dataclass(frozen=True)
class StepModel:
    """Coefficients in force for one execution mode.

    Attributes:
        fit_id: name of these coefficients in every record that depends on them.
        source: fit, calibration or roofline; tokens where no shape is known. A provisional fit has
            that of the first model, and an id of both: `roofline+eager-8`.
        f_ns: [tokens + 1], cost of N tokens; f(0) = 0. The length is MAX_TOKENS, or with
            `tables_of` the largest token count read so far.
        g_ns: [tokens + 1], cost of M sampled rows; g(0) = 0.
        single_ns: per visible token, of a slice of one token (a decode).
        padded_ns: per visible token of the longest such slice, of each: what engines pay that pad
            decode attention to the longest context.
        chunk_ns: per slice of several tokens.
        pair_ns: per query-key pair of such a slice.
        context_ns: per visible token of such a slice.
        decoding_ns: once, if there is any slice of one token, for their attention is one call,
            whatever their number; shared by them equally.
        num_learned: steps of the running engine that it was fitted to.
        num_chunked: of these, steps with slices of several tokens.
    """

    fit_id: str
    source: str
    f_ns: Floats
    g_ns: Floats
    single_ns: float
    padded_ns: float
    chunk_ns: float
    pair_ns: float
    context_ns: float
    decoding_ns: float = 0.0
    num_learned: int = 0
    num_chunked: int = 0
    tables_of: Callable[[int], Tables] | None = field(default=None, repr=False, compare=False)
    """Callback that extends both tables to a token count; None if they are complete. Complete ones
    and their sums take 400 KB; a server whose steps have a thousand tokens reads 50 KB of them."""
    f_sum: Floats = field(init=False, repr=False)
    """[tokens + 2], Σ f(y) for y < x."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "f_sum", _sums(self.f_ns))

    @property
    def is_provisional(self) -> bool:
        """Return whether its proportions are assumed, corrected by few steps or none."""
        return self.source != CALIBRATION and self.num_learned < ENOUGH_STEPS

    def reach(self, num_tokens: int) -> None:
        """Extend the tables to a token count or to their end, without changing their values."""
        if self.tables_of is None or min(num_tokens, MAX_TOKENS) < len(self.f_ns):
            return
        f_ns, g_ns = self.tables_of(min(2 * num_tokens, MAX_TOKENS))
        # In this order: who finds the table long enough finds its sums as long.
        for name, table in (("g_ns", g_ns), ("f_sum", _sums(f_ns)), ("f_ns", f_ns)):
            object.__setattr__(self, name, table)

    def attention_ns(self, table: StepTable) -> Floats:
        """Return the attention of the slices of several tokens: [chunks]."""
        of_pairs = self.chunk_ns + self.pair_ns * table.chunk_pairs
        attention: Floats = of_pairs + self.context_ns * table.chunk_visible
        return attention

    def steps_ns(self, table: StepTable) -> Floats:
        """Return T(S) of each step: [steps]."""
        self.reach(max(int(table.num_tokens.max()), int(table.num_rows.max())))
        of_singles = self.decoding_ns + self.single_ns * table.sum_visible
        of_singles += self.padded_ns * table.num_single * table.longest
        own = table.by_step(self.attention_ns(table)) + np.where(table.num_single, of_singles, 0.0)
        f_ns = look_up(self.f_ns, table.num_tokens)
        found: Floats = f_ns + look_up(self.g_ns, table.num_rows) + own
        return found

    def f(self, num_tokens: int) -> float:
        """Return the cost of N tokens; beyond MAX_TOKENS by the last slope."""
        if num_tokens >= len(self.f_ns):
            self.reach(num_tokens)
        return _look_up(self.f_ns, num_tokens)

    def g(self, num_rows: int) -> float:
        """Return the cost of M sampled rows."""
        if num_rows >= len(self.g_ns):
            self.reach(num_rows)
        return _look_up(self.g_ns, num_rows)


def _sums(table: Floats) -> Floats:
    sums = np.zeros(len(table) + 1)
    np.cumsum(table, out=sums[1:])
    return sums


def _look_up(table: Floats, n: int) -> float:
    last = len(table) - 1
    if n <= last:
        inside: float = table.item(n)
        return inside
    found: float = table.item(last)
    return found + (n - last) * (found - table.item(last - 1))


def look_up(table: Floats, numbers: Ints) -> Floats:
    """Return the costs of many token or row counts, as `StepModel` does for one."""
    last = len(table) - 1
    if int(numbers.max()) <= last:
        return table.take(numbers)
    beyond = np.maximum(numbers - last, 0)
    found: Floats = table[numbers - beyond] + beyond * (table[last] - table[last - 1])
    return found


@lru_cache(8)
def roofline(
    shape: Shape | None, peaks: Peaks, *, fit_id: str = "roofline", source: str = "roofline"
) -> StepModel:
    """Model a step by what the device can do at best; with no shape, by tokens alone.

    The result, which engines of one shape on one device share, is the first guess of a run: its
    scale is corrected by the measured steps at once, its proportions by the online fit.
    """
    n = np.arange(MAX_TOKENS + 1, dtype=np.float64)
    if shape is None or not is_counted(shape):
        f = 1e6 + 1e4 * n
        f[0] = 0.0
        return StepModel(fit_id, BY_TOKENS, f, np.zeros_like(n), 0.0, 0.0, 0.0, 0.0, 0.0)
    flops_ns = 1e9 / peaks.bf16_flops_s
    byte_ns = 1e9 / peaks.memory_bytes_s
    launches_ns = 1e9 * peaks.launch_s * 14 * shape.num_layers
    compute = 2 * linear_parameters(shape) * flops_ns * n
    weights = weight_bytes(shape)
    read = weights.layers + weights.experts * (1 - (1 - weights.touch_share) ** n)
    f = launches_ns + np.maximum(compute, (read + activation_bytes(shape) * n) * byte_ns)
    f[0] = 0.0
    g = np.maximum(2 * shape.hidden * shape.vocab * flops_ns * n, weights.head * byte_ns)
    g[0] = 0.0
    pair_ns = 4 * shape.num_heads * shape.head_dim * shape.num_layers * flops_ns
    single_ns = max(pair_ns, kv_bytes_per_token(shape) * byte_ns)
    return StepModel(fit_id, source, f, g, single_ns, 0.0, 0.0, pair_ns, 0.0)
