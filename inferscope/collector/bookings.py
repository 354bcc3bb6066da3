"""Where a final step goes: its requests' cells, the devices, the windows, the digest, the sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.parts import PromptCost
from inferscope.collector.amounts import Counted, count_rows
from inferscope.collector.counted_steps import NOTHING_MOVED, Moved
from inferscope.collector.devices import RankTime
from inferscope.collector.finals import FinalStep, Sink, Unnamed
from inferscope.collector.lives import Lives
from inferscope.collector.rows import Rows
from inferscope.collector.steps import (
    Execution,
    Joined,
    SplitStep,
    components_of,
    pair_shares,
)
from inferscope.records import RECOMPUTED

Ints = NDArray[np.int64]


class Bookings:
    """Books the split steps of one engine; every nanosecond of a step goes to one place in each.

    Attributes:
        ranks: the devices' time, by ring.
        first_ns: where it starts.
    """

    def __init__(
        self,
        engine_id: str,
        lives: Lives,
        sinks: list[Sink],
        mix: Callable[[bytes | Ints], None] | None,
    ) -> None:
        self._engine_id = engine_id
        self._lives = lives
        self._sinks = sinks
        self._mix = mix
        self.ranks: dict[int, RankTime] = {}
        self.first_ns = 0
        self._last_rows: Rows | None = None
        self._last_ids: tuple[Ints | None, int, tuple[str, ...]] = (None, 0, ())
        """Slots, when that was, and whose they were."""
        self._mixed_slots = b""
        """Whose shares the digest takes now."""

    def begin(self, step: Joined) -> None:
        """Open a split step in the ledgers, and book it with the devices that executed it."""
        split = step.split
        assert split is not None  # its window is split before facts are taken
        for span, prefill_ns, padding_ns, unattributed_ns in zip(
            step.run.ranks, step.prefill_ns, split.padding_ns, split.unattributed_ns, strict=True
        ):
            rank = self.ranks.get(span.ring)
            if rank is None:
                rank = self.ranks[span.ring] = RankTime(self.first_ns)
            decode_ns = span.measured_ns - prefill_ns - padding_ns - unattributed_ns
            parts_ns = (prefill_ns, decode_ns, padding_ns, unattributed_ns)
            rank.book(span.start_ns, span.end_ns, parts_ns)
        self._lives.open_step(step.run, split, step.planned_ns)

    def book(self, steps: Sequence[Joined]) -> None:
        """Add split steps to their requests, the windows and the digest; note prefill times."""
        if self._mix is not None:
            self._mix(b"".join(self._mixed(steps)))
        counted, begun = count_rows(steps, self._lives.rates), 0
        counters = self._lives.counters
        for at, step in enumerate(steps):
            if step.run.end_ns >= counters.reach_ns:
                end = counted.ends[at - 1] if at else 0
                self._add(counted, begun, end)
                begun = end
                counters.reach(step.run.end_ns)
            self._book(step, counted.moved[at])
        self._add(counted, begun, counted.ends[-1])

    def _mixed(self, steps: Sequence[Joined]) -> Iterator[bytes | memoryview]:
        """Yield what the digest takes of steps."""
        for step in steps:
            slot_bytes = step.rows.slot_bytes
            if slot_bytes != self._mixed_slots:  # hashing costs 1 ns a byte
                self._mixed_slots = slot_bytes
                yield slot_bytes
            assert step.split is not None
            for shares_ns in step.split.shares_ns:
                yield shares_ns.data

    def _add(self, counted: Counted, begin: int, end: int) -> None:
        """Add what some rows computed to their requests."""
        if begin < end:
            rows = slice(begin, end)
            work = self._lives.table.work
            work.computed(counted.slots[rows], counted.phases[rows], counted.amounts[:, rows])

    def _book(self, step: Joined, moved: Moved) -> None:
        """Add a step to the windows; note its prefill time."""
        rows, split, run = step.rows, step.split, step.run
        assert split is not None
        lives, counters, prefill_flops = self._lives, self._lives.counters, moved[-2]
        if rows is not self._last_rows:
            self._note_phases(rows, self._last_rows)
            self._last_rows = rows
        lives.fit_id = split.fit_id

        of_ranks_ns = [0] * len(run.ranks)
        padding_ns, unattributed_ns = sum(split.padding_ns), sum(split.unattributed_ns)
        decode_ns = run.sum_ns - padding_ns - unattributed_ns
        bucket = lives.windows.at(run.end_ns)
        amounts = bucket.amounts
        if rows.prefills:
            lives.prefill_mode = run.span.mode
            of_ranks_ns = [
                sum([shares_ns.item(at) for at in rows.prefills]) for shares_ns in split.shares_ns
            ]
            prefill_ns = sum(of_ranks_ns)
            decode_ns -= prefill_ns
            if lives.table.num_labelled:
                self._book_parts(step)
            amounts["prefill_tokens"] += rows.num_prefill_tokens
            amounts["prefill_ns"] += prefill_ns
            if prefill_flops:
                seen, num_ranks = len(run.ranks), lives.num_ranks
                if seen < num_ranks:  # of the whole model's, what was computed in this time
                    prefill_flops = prefill_flops * seen // num_ranks
                amounts["prefill_flops"] += prefill_flops
                amounts["prefill_flops_ns"] += prefill_ns
            amounts["mixed_steps"] += len(rows.prefills) < len(rows.slots)
        amounts["decode_tokens"] += rows.team.num_tokens - rows.num_prefill_tokens
        amounts["decode_ns"] += decode_ns
        if padding_ns:
            amounts["padding_ns"] += padding_ns
        if unattributed_ns:
            amounts["unattributed_ns"] += unattributed_ns
        amounts["steps"] += 1
        bucket.durations["step"].add(run.longest_ns, 1)
        if counters.is_on:
            counters.step(run, split, of_ranks_ns, moved)
        step.prefill_ns = of_ranks_ns

    def book_unnamed(
        self, split: SplitStep, unnamed: Sequence[Unnamed], run: Execution
    ) -> list[int]:
        """Add a step to the windows and the digest whose requests are known on another host.

        Args:
            split: its time, divided among none.
            unnamed: by rank, its phases.
            run: its execution.

        Returns:
            each rank's prefill time.
        """
        lives, counters = self._lives, self._lives.counters
        prefill_ns = [each.prefill_ns for each in unnamed]
        if self._mix is not None:
            self._mix(np.array(prefill_ns + [each.decode_ns for each in unnamed]))
        if run.end_ns >= counters.reach_ns:
            counters.reach(run.end_ns)
        bucket = lives.windows.at(run.end_ns)
        amounts, first = bucket.amounts, unnamed[0]
        amounts["prefill_tokens"] += first.prefill_tokens
        amounts["decode_tokens"] += first.decode_tokens
        amounts["mixed_steps"] += first.prefill_tokens > 0 < first.decode_tokens
        amounts["prefill_ns"] += sum(prefill_ns)
        amounts["decode_ns"] += sum(each.decode_ns for each in unnamed)
        amounts["padding_ns"] += sum(split.padding_ns)
        amounts["unattributed_ns"] += sum(split.unattributed_ns)
        amounts["steps"] += 1
        bucket.durations["step"].add(run.longest_ns, 1)
        if counters.is_on:
            counters.step(run, split, prefill_ns, NOTHING_MOVED)
        return prefill_ns

    def _note_phases(self, rows: Rows, last: Rows | None) -> None:
        """Note who prefills in a step, and who shares it; the last one noted the same of its own.

        Args:
            rows: of the step.
            last: of the step before.
        """
        members, in_prefill = rows.members, self._lives.table.in_prefill
        if last is not None and last.members is members:
            for at in last.member_prefills:
                in_prefill[members.item(at)] = False
        else:
            in_prefill[members] = False
            if len(members) > 1:
                self._lives.table.is_shared[members] = True
        for at in rows.member_prefills:
            in_prefill[members.item(at)] = True

    def _book_parts(self, step: Joined) -> None:
        """Divide the chunks of labelled prompts over their parts."""
        rows, contexts, split = step.rows, step.contexts, step.split
        assert split is not None
        by_slot, chunks = self._lives.table.by_slot, rows.team.chunks
        of_pairs = pair_shares(step)
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
                pair_share=of_pairs[chunks.index(member)] if member in chunks else 0.0,
                is_recomputed=again,
            )
            if self._lives.rates is not None:
                cost.count(tokens, context, rows.sampled.item(at), self._lives.rates.flops)

    def hand_on(self, step: Joined, unnamed: Sequence[Unnamed] = ()) -> None:
        """Give the sinks a step, once for each rank; `unnamed` is of each, where requests are."""
        rows, run, split = step.rows, step.run, step.split
        assert split is not None
        ids, span = self._ids_of(rows.slots), run.span
        components = components_of(step)
        for at, rank in enumerate(run.ranks):
            final = FinalStep(
                engine_id=self._engine_id,
                dp_rank=step.dp_rank,
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
                contexts=step.contexts,
                flags=rows.flags,
                shares_ns=split.shares_ns[at],
                padding_ns=split.padding_ns[at],
                unattributed_ns=split.unattributed_ns[at],
                model_residual=split.residual,
                is_dummy=run.is_dummy,
                components=components,
                delay=split.delay if ids else None,
                unnamed=unnamed[at] if unnamed else None,
                is_provisional=split.is_provisional,
                bounded_ns=split.delay.bounded_ns,
            )
            for sink in self._sinks:
                sink.step(final)

    def _ids_of(self, slots: Ints) -> tuple[str, ...]:
        """Return the engine's own ids of some requests; the same tuple for the same ones."""
        table = self._lives.table
        of_slots, num_changes, ids = self._last_ids
        if slots is not of_slots or table.num_changes != num_changes:
            ids = tuple(map(table.ids.__getitem__, slots.tolist()))
            self._last_ids = (slots, table.num_changes, ids)
        return ids
