"""What a step of decodes and a few prefills moves and computes, by the model of bytes and FLOPs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferscope.attribution.weights import PlainShares
from inferscope.collector.counted_steps import Moved
from inferscope.collector.rows import Rows
from inferscope.collector.work import FLOPS, READ_BYTES, WRITE_BYTES
from inferscope.cost.batch import Batch, Team
from inferscope.cost.counts import Rates


def count(amounts: list[int], rates: Rates, own: tuple[int, int, int], weights: int) -> None:
    """Put a slice's FLOPs and bytes into their columns.

    Args:
        amounts: by column.
        rates: of the model.
        own: the slice's tokens, context and sampled rows.
        weights: bytes that it reads of them.
    """
    tokens, _, sampled = own
    amounts[FLOPS] = rates.flops.of_slices(*own)
    amounts[READ_BYTES] = rates.hbm.reads(*own) + weights
    amounts[WRITE_BYTES] = rates.hbm.writes(tokens, sampled)


def moved_by(
    rows: Rows, batch: Batch, prefilled: list[list[int]], *, rates: Rates, weights: PlainShares
) -> Moved:
    """Return what a simple step moves and computes.

    Args:
        rows: who is in it.
        batch: the same as the cost model sees them; it has summed their contexts up.
        prefilled: what each of its prefills does, by column.
        rates: of the model.
        weights: what they all read of them.
    """
    team, prefills = rows.team, rows.prefills
    read = written = computed = 0
    for amounts in prefilled:
        read += amounts[READ_BYTES]
        written += amounts[WRITE_BYTES]
        computed += amounts[FLOPS]
    kept = team.moved
    if kept is None or kept[0] is not rates:
        kept = team.moved = (rates, Decodes.of(rates, team, weights))
    of_decodes, per_context, wrote, flops_, flops_per_context, reach_ = kept[1]
    contexts = batch.single_visible - team.num_single
    if reach_ is None and len(prefills) == len(team.chunks):
        of_decodes += per_context * contexts
        flops_ += flops_per_context * contexts
        return (read, of_decodes, written, wrote, computed, flops_)
    # A few prefills have one token: what a team's decodes move includes them.
    flops, hbm = rates
    context, reach = batch.context, max(0, rates.window - 1)
    alone = [at for at in prefills if at not in team.chunks]
    num = len(rows.slots) - len(prefills)
    contexts -= sum([context.item(at) for at in alone])
    seen = int(np.add.reduce(np.minimum(context, reach)))
    seen -= sum([min(context.item(at), reach) for at in prefills])
    of_weights = weights.each * num + (0 if prefills and not prefills[0] else weights.rest)
    return (
        read,
        hbm.reads_of_singles(num, contexts, seen) + (of_weights if num else 0),
        written,
        hbm.writes(num, num),
        computed,
        flops.of_singles(num, contexts, seen),
    )


class Decodes(NamedTuple):
    """What the requests of a plain team with one token move and compute, all of them together.

    The same for all teams of one make-up, but for what goes by the sum of their contexts.
    """

    read: int
    read_per_context: int
    written: int
    flops: int
    flops_per_context: int
    reach: int | None
    """How much of a context a windowed layer sees; None where there is no such layer."""

    @classmethod
    def of(cls, rates: Rates, team: Team, weights: PlainShares) -> Decodes:
        """Work it out."""
        (flops, hbm), num = rates, team.num_single
        of_weights = weights.each * num + (0 if 0 in team.chunks else weights.rest)
        return cls(
            hbm.reads_of_singles(num, 0, 0) + (of_weights if num else 0),
            hbm.reads_of_singles(0, 1, 0),
            hbm.writes(num, num),
            flops.of_singles(num, 0, 0),
            flops.of_singles(0, 1, 0),
            rates.window - 1 if rates.window else None,
        )
