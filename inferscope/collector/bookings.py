"""Where a final step goes: its requests' cells, the devices, the windows, the digest, the sinks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.parts import PromptCost
from inferscope.collector.devices import RankTime
from inferscope.collector.finals import FinalStep, Sink
from inferscope.collector.lives import Lives
from inferscope.collector.rows import Rows
from inferscope.collector.steps import Execution, SplitStep
from inferscope.cost.shape import FlopRates
from inferscope.records import RECOMPUTED

Ints = NDArray[np.int64]


class Bookings:
    """Books the split steps of one engine; every nanosecond of a step goes to one place in each.

    Attributes:
        ranks: the devices' time, by ring.
        first_ns: where it starts.
        rates: of the model's shape, None where it is not known.
    """

    def __init__(
        self,
        engine_id: str,
        lives: Lives,
        sinks: list[Sink],
        mix: Callable[[bytes | memoryview], None],
    ) -> None:
        self._engine_id = engine_id
        self._lives = lives
        self._sinks = sinks
        self._mix = mix
        self.ranks: dict[int, RankTime] = {}
        self.first_ns = 0
        self.rates: FlopRates | None = None
        self._last_rows: Rows | None = None
        self._mixed_slots = b""
        """Whose shares the digest takes now."""

    def begin(self, run: Execution, split: SplitStep, prefill_ns: list[int]) -> None:
        """Open a step in the ledgers, and book it with the devices that executed it.

        Args:
            run: its execution.
            split: its time, divided.
            prefill_ns: of it, by rank.
        """
        for at, span in enumerate(run.ranks):
            rank = self.ranks.get(span.ring)
            if rank is None:
                rank = self.ranks[span.ring] = RankTime(self.first_ns)
            padding_ns, unattributed_ns = split.padding_ns[at], split.unattributed_ns[at]
            decode_ns = span.measured_ns - prefill_ns[at] - padding_ns - unattributed_ns
            parts_ns = [prefill_ns[at], decode_ns, padding_ns, unattributed_ns]
            rank.book(span.start_ns, span.end_ns, parts_ns)
        self._lives.open_step(run, split)

    def book(self, rows: Rows, contexts: Ints, split: SplitStep, run: Execution) -> list[int]:
        """Add a split step to its requests, the windows and the digest.

        Returns:
            each rank's prefill time.
        """
        table, slots = self._lives.table, rows.slots
        if rows.slot_bytes != self._mixed_slots:  # hashing costs 1 ns a byte
            self._mixed_slots = rows.slot_bytes
            self._mix(rows.slot_bytes)
        for shares_ns in split.shares_ns:
            self._mix(shares_ns.data)
        if rows.is_simple:
            self._book_singles(rows, contexts, split)
        else:
            self._book_rows(rows, contexts, split)
        if rows is not self._last_rows:
            self._last_rows = rows
            table.in_prefill[split.slots] = False
            for at in split.delay.prefills:
                table.in_prefill[split.slots.item(at)] = True
            if len(split.slots) > 1:
                table.is_shared[split.slots] = True
        self._lives.fit_id = split.fit_id

        num_prefill, prefill_tokens = len(rows.prefills), rows.num_prefill_tokens
        of_ranks_ns = [0] * len(run.ranks)
        rest_ns = sum(split.padding_ns) + sum(split.unattributed_ns)
        bucket = self._lives.windows.at(run.end_ns)
        amounts = bucket.amounts
        prefill_ns = 0
        if num_prefill:
            of_ranks_ns = [sum(map(shares.item, rows.prefills)) for shares in split.shares_ns]
            prefill_ns = sum(of_ranks_ns)
            if table.num_labelled:
                self._book_parts(rows, contexts, split)
            amounts["prefill_tokens"] += prefill_tokens
            amounts["prefill_ns"] += prefill_ns
            amounts["mixed_steps"] += num_prefill < len(slots)
        amounts["decode_tokens"] += rows.team.num_tokens - prefill_tokens
        amounts["decode_ns"] += run.sum_ns - prefill_ns - rest_ns
        if rest_ns:
            amounts["padding_ns"] += sum(split.padding_ns)
            amounts["unattributed_ns"] += sum(split.unattributed_ns)
        amounts["steps"] += 1
        bucket.durations["step"].add(run.longest_ns, 1)
        return of_ranks_ns

    def _book_singles(self, rows: Rows, contexts: Ints, split: SplitStep) -> None:
        """Book a step of decodes that have one token each, and a few prefills."""
        table, rates = self._lives.table, self.rates
        table.work.decoded_together(rows.slots, split.shares_ns, contexts, rates)
        for at in rows.prefills:
            flops = instead = 0
            if rates is not None:
                context = contexts.item(at)
                flops = rates.of_slices(rows.tokens.item(at), context, rows.team.rows_of(at))
                instead = rates.of_singles(1, context)
            shares = [shares_ns.item(at) for shares_ns in split.shares_ns]
            table.work.prefilled_instead(rows.slots.item(at), shares, flops, instead)

    def _book_rows(self, rows: Rows, contexts: Ints, split: SplitStep) -> None:
        """Book a step row by row."""
        table, is_once = self._lives.table, rows.member_of_row is None
        cells = 2 * rows.slots + 1
        cells[rows.prefills] -= 1
        for shares_ns in split.shares_ns:
            _add(table.work.compute_ns, cells, shares_ns, is_once=is_once)
        if self.rates is not None:
            flops = self.rates.of_slices(rows.tokens, contexts, rows.sampled)
            _add(table.work.flops, cells, flops, is_once=is_once)

    def _book_parts(self, rows: Rows, contexts: Ints, split: SplitStep) -> None:
        """Divide the chunks of labelled prompts over their parts."""
        by_slot, chunks = self._lives.table.by_slot, rows.team.chunks
        for at in rows.prefills:
            request = by_slot[rows.slots.item(at)]
            if request is None or not request.told_parts:
                continue
            cost = request.prompt_cost
            if cost is None:
                cost = PromptCost(request.told_parts, request.prompt_tokens or 0)
                request.prompt_cost = cost
            tokens, context = rows.tokens.item(at), contexts.item(at)
            member = at if rows.member_of_row is None else rows.member_of_row.item(at)
            again = rows.recomputed is not None and rows.flags.item(at) & RECOMPUTED > 0
            cost.add(
                tokens,
                context,
                share_ns=sum(shares_ns.item(at) for shares_ns in split.shares_ns),
                own_ns=split.delay.own_ns.item(member),
                pair_share=split.pair_shares[chunks.index(member)] if member in chunks else 0.0,
                is_recomputed=again,
            )
            if self.rates is not None:
                cost.count(tokens, context, rows.sampled.item(at), self.rates)

    def hand_on(
        self,
        rows: Rows,
        contexts: Ints,
        split: SplitStep,
        run: Execution,
        *,
        dp_rank: int,
    ) -> None:
        """Give the sinks a step, once for each rank."""
        by_slot = self._lives.table.by_slot
        requests = (by_slot[slot] for slot in rows.slots.tolist())
        ids = tuple("?" if request is None else request.request_id for request in requests)
        span = run.span
        for at, rank in enumerate(run.ranks):
            final = FinalStep(
                engine_id=self._engine_id,
                dp_rank=dp_rank,
                rank=rank.rank,
                step=span.step,
                start_ns=rank.start_ns,
                end_ns=rank.end_ns,
                measured_ns=rank.measured_ns,
                clock=rank.clock,
                mode=span.mode,
                is_cold=span.cold,
                fit_id=split.fit_id,
                request_ids=ids,
                phases=rows.phases,
                tokens=rows.tokens,
                contexts=contexts,
                flags=rows.flags,
                shares_ns=split.shares_ns[at],
                padding_ns=split.padding_ns[at],
                unattributed_ns=split.unattributed_ns[at],
                model_residual=split.residual,
                is_dummy=run.is_dummy,
                components=split.components,
                delay=split.delay if ids else None,
            )
            for sink in self._sinks:
                sink.step(final)


def _add(table: Ints, cells: Ints, amounts: Ints, *, is_once: bool) -> None:
    """Add amounts to cells of a [slots, phases] table; a cell may be named more than once."""
    flat = table.reshape(-1)
    if is_once:
        flat[cells] += amounts
    else:
        np.add.at(flat, cells, amounts)
