"""Booking of final steps in requests' cells, devices, windows, the digest and sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import Chunk, Components, PromptCost
from inferscope.fold.amounts import Counted, count_rows
from inferscope.fold.devices import RankTime
from inferscope.fold.final_records import FinalStep, RemoteWork, Sink
from inferscope.fold.join.step_buffer import NOTHING_MOVED
from inferscope.fold.recent_steps import RecentSteps
from inferscope.fold.request_lifecycle import RequestLifecycle
from inferscope.fold.rows import NO_ROWS, Columns
from inferscope.fold.step_kinds import KINDS, NUM_SUMS, kind_sums
from inferscope.fold.steps import Execution, Joined, SplitStep, pair_shares
from inferscope.fold.windows import SECOND_NS
from inferscope.fold.work_totals import PROPOSED_TOKENS, WASTED_TOKENS
from inferscope.records import DRAFT

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class StepBooker:
    """Booker of one engine's split steps; each account books every nanosecond of a step once.

    Attributes:
        ranks: device time, by ring.
        first_ns: start of the device time.
        recent: recent steps; None if none are kept.
    """

    def __init__(
        self,
        engine_id: str,
        lives: RequestLifecycle,
        sinks: list[Sink],
        mix: Callable[[bytes | Ints], None] | None,
        *,
        num_recent: int = 0,
    ) -> None:
        self._engine_id = engine_id
        self._lives = lives
        self._sinks = sinks
        self._mix = mix
        self.ranks: dict[int, RankTime] = {}
        self.first_ns = 0
        self.recent = RecentSteps(num_recent) if num_recent else None
        self._last_ids: tuple[Ints | None, int, tuple[str, ...]] = (None, 0, ())
        """Last slots, `num_changes` of the table then, and the IDs of their requests."""
        self._mixed_slots, self._mixed_bytes = NO_ROWS, b""
        """Slots that the digest has hashed last, and their bytes."""

    def begin(self, step: Joined) -> None:
        """Open a split step in the ledgers, and book it for the devices that executed it."""
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
        phases = step.slices.phases
        gap_ns = self._lives.open_step(
            step.run, split, step.planned_ns, is_draft=phases == _DRAFTS * len(phases)
        )
        if self.recent is not None:
            self.recent.begin(step, host_gap_ns=gap_ns, num_ranks=self._lives.num_ranks)

    def book(self, steps: Sequence[Joined], columns: Columns) -> None:
        """Add split steps to requests, windows and digest, and set their prefill times.

        Args:
            steps: at least one.
            columns: the rows of these steps.
        """
        if self._mix is not None:
            self._mix(b"".join(self._mixed(steps)))
        lives, counters, table = self._lives, self._lives.counters, columns.table
        splits = [step.split for step in steps if step.split is not None]
        shares_ns, prefill_ns = _of_all_ranks(splits, columns)
        for step, of_step in zip(steps, prefill_ns, strict=True):
            step.prefill_ns = of_step[: len(step.run.ranks)]
        counted = count_rows(columns, shares_ns, [step.slices for step in steps], lives.rates)
        moved = counted.moved.tolist()
        begun = 0
        for at, step in enumerate(steps):
            if step.run.end_ns >= counters.reach_ns:
                end = columns.ends[at - 1] if at else 0
                self._add(columns, counted, begun, end)
                begun = end
                counters.reach(step.run.end_ns)
            if counters.is_on:
                counters.step(step.run, splits[at], step.prefill_ns, moved[at])
        self._add(columns, counted, begun, columns.ends[-1])
        lives.fit_id = splits[-1].fit_id
        lives.residuals.extend(
            split.residual
            for step, split in zip(steps, splits, strict=True)
            if not step.run.span.cold
        )
        slots = columns.member_slots
        lives.table.in_prefill[slots] = table.is_prefill  # the last of several steps counts
        lives.table.is_shared[slots[np.repeat(table.sizes > 1, table.sizes)]] = True
        if lives.table.num_labelled or lives.table.cache.is_on:
            for at in np.add.reduceat(columns.is_prefill, columns.firsts).nonzero()[0].tolist():
                self._book_parts(steps[at], columns, at)
        self._count(steps, splits, columns, counted)
        if self.recent is not None:
            for step, work in zip(steps, moved, strict=True):
                step.ids = self._ids_of(step.slots)
                step.work = work if lives.rates is not None else None
            self._count_kinds(steps, columns, counted)

    def _count_kinds(self, steps: Sequence[Joined], columns: Columns, counted: Counted) -> None:
        """Add steps to the sums by kind of the seconds in which they ended."""
        lives = self._lives
        kinds, sums = kind_sums(steps, columns, counted, lives.rates, num_ranks=lives.num_ranks)
        ends_ns = np.array([step.run.end_ns for step in steps])
        cuts = (np.diff(ends_ns // SECOND_NS).nonzero()[0] + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(steps)]):
            bucket = lives.windows.at(ends_ns.item(begin))
            if bucket.kinds is None:
                bucket.kinds = np.zeros((len(KINDS), NUM_SUMS), dtype=np.int64)
            for kind in range(len(KINDS)):
                bucket.kinds[kind] += sums[begin:end][kinds[begin:end] == kind].sum(axis=0)

    def _count(
        self,
        steps: Sequence[Joined],
        splits: Sequence[SplitStep],
        columns: Columns,
        counted: Counted,
    ) -> None:
        """Add steps to the windows of the seconds in which they ended."""
        lives, table = self._lives, columns.table
        is_prefill = columns.is_prefill
        num_prefills = np.add.reduceat(is_prefill, columns.firsts, dtype=np.int64)
        with_prefills = num_prefills.nonzero()[0]
        if len(with_prefills):
            lives.prefill_mode = steps[with_prefills.item(-1)].run.span.mode
        prefill_tokens = np.add.reduceat(columns.tokens * is_prefill, columns.firsts)
        runs = [step.run for step in steps]
        times_ns = np.array(
            [
                (
                    sum(step.prefill_ns),
                    sum(split.padding_ns),
                    sum(split.unattributed_ns),
                    run.sum_ns,
                )
                for step, split, run in zip(steps, splits, runs, strict=True)
            ]
        )
        prefill_ns, padding_ns, unattributed_ns, sum_ns = times_ns.T
        flops = counted.moved[:, _PREFILL_FLOPS]
        seen = np.array([len(run.ranks) for run in runs])
        # The ranks that reported computed this part of the whole model's FLOPs.
        of_ranks = np.where(seen < lives.num_ranks, flops * seen // lives.num_ranks, flops)
        amounts = {
            "prefill_tokens": prefill_tokens,
            "prefill_ns": prefill_ns,
            "prefill_flops": of_ranks,
            "prefill_flops_ns": np.where(flops > 0, prefill_ns, 0),
            "mixed_steps": (num_prefills > 0) & (num_prefills < columns.sizes),
            "decode_tokens": table.num_tokens - prefill_tokens,
            "decode_ns": sum_ns - prefill_ns - padding_ns - unattributed_ns,
            "padding_ns": padding_ns,
            "unattributed_ns": unattributed_ns,
            "steps": np.ones(len(steps), dtype=np.int64),
        }
        proposed = counted.amounts[PROPOSED_TOKENS]
        if proposed.any():
            wasted = np.where(proposed > 0, counted.amounts[WASTED_TOKENS], 0)
            amounts["proposed_tokens"] = np.add.reduceat(proposed, columns.firsts)
            amounts["accepted_tokens"] = np.add.reduceat(proposed - wasted, columns.firsts)
        ends_ns = np.array([run.end_ns for run in runs])
        lives.windows.observe("step", np.array([run.longest_ns for run in runs]), ends_ns)
        cuts = (np.diff(ends_ns // SECOND_NS).nonzero()[0] + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(runs)]):
            bucket = lives.windows.at(runs[begin].end_ns)
            for name, column in amounts.items():
                bucket.amounts[name] += int(column[begin:end].sum())

    def _mixed(self, steps: Sequence[Joined]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of steps that the digest hashes."""
        for step in steps:
            if step.slots is not self._mixed_slots:
                slot_bytes = step.slots.tobytes()
                if slot_bytes != self._mixed_bytes:  # hashing costs 1 ns a byte
                    yield slot_bytes
                self._mixed_slots, self._mixed_bytes = step.slots, slot_bytes
            assert step.split is not None
            for shares_ns in step.split.shares_ns:
                yield shares_ns.data

    def _add(self, columns: Columns, counted: Counted, begin: int, end: int) -> None:
        """Add the amounts of rows `begin` to `end` to their requests."""
        if begin < end:
            rows = slice(begin, end)
            work = self._lives.table.work
            work.computed(columns.slots[rows], counted.phases[rows], counted.amounts[:, rows])

    def book_unnamed(
        self, split: SplitStep, unnamed: Sequence[RemoteWork], run: Execution
    ) -> list[int]:
        """Add a step whose requests only another host knows to the windows and the digest.

        Args:
            split: its time, not divided among requests.
            unnamed: its phases, by rank.
            run: its execution.

        Returns:
            prefill time of each rank, in nanoseconds.
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
        bucket.durations["step"].add(run.longest_ns)
        if not run.span.cold:
            lives.residuals.append(split.residual)
        if counters.is_on:
            counters.step(run, split, prefill_ns, NOTHING_MOVED)
        return prefill_ns

    def _book_parts(self, step: Joined, columns: Columns, at: int) -> None:
        """Book chunks for the cache's accounts, and divide those of labelled prompts by part."""
        split, of, table = step.split, columns.rows(at), self._lives.table
        assert split is not None
        of_pairs, first = pair_shares(split, columns.table, at), columns.table.first.item(at)
        for row in (of.start + columns.is_prefill[of].nonzero()[0]).tolist():
            request = table.by_slot[columns.slots.item(row)]
            if request is None or (request.cache is None and not request.declared_parts):
                continue
            tokens, context = columns.tokens.item(row), columns.contexts.item(row)
            member = row if columns.member is None else columns.member.item(row)
            is_again = bool(columns.is_again[row])
            chunk = Chunk(
                tokens,
                context,
                share_ns=sum(shares_ns.item(row - of.start) for shares_ns in split.shares_ns),
                own_ns=split.delay.own_ns.item(member - first),
                pair_share=of_pairs.get(member, 0.0),
            )
            if request.cache is not None and not is_again:
                table.cache.computed(
                    request.cache,
                    chunk,
                    start_ns=step.run.start_ns,
                    end_ns=step.run.end_ns,
                    step_ns=step.run.sum_ns,
                )
            if not request.declared_parts:
                continue
            cost = request.prompt_cost
            if cost is None:
                cost = PromptCost(request.declared_parts, request.prompt_tokens or 0)
                request.prompt_cost = cost
            cost.add(
                tokens,
                context,
                share_ns=chunk.share_ns,
                own_ns=chunk.own_ns,
                pair_share=chunk.pair_share,
                is_recomputed=is_again,
            )
            if self._lives.rates is not None:
                cost.count(tokens, context, columns.sampled.item(row), self._lives.rates.flops)

    def emit_steps(self, step: Joined, columns: Columns, at: int) -> None:
        """Pass a step to the sinks, once per rank."""
        rows = columns.rows(at)
        of_rows = _Rows(
            self._ids_of(step.slots),
            columns.phases[rows],
            columns.tokens[rows],
            columns.contexts[rows],
            columns.flags[rows],
        )
        split = step.split
        assert split is not None
        assert split.model is not None
        self._emit(step, of_rows, Components(split.model, columns.table, at))

    def emit_unnamed_steps(self, step: Joined, unnamed: Sequence[RemoteWork] = ()) -> None:
        """Pass a step without known requests to the sinks; `unnamed` has an entry per rank."""
        self._emit(step, _NO_ROWS, unnamed=unnamed)

    def _emit(
        self,
        step: Joined,
        rows: _Rows,
        components: Components | None = None,
        unnamed: Sequence[RemoteWork] = (),
    ) -> None:
        run, split = step.run, step.split
        assert split is not None
        for at, rank in enumerate(run.ranks):
            final = FinalStep(
                engine_id=self._engine_id,
                dp_rank=step.dp_rank,
                rank=rank.rank,
                step=run.span.step,
                start_ns=rank.start_ns,
                end_ns=rank.end_ns,
                measured_ns=rank.measured_ns,
                clock=rank.clock,
                mode=run.span.mode,
                is_cold=run.span.cold,
                fit_id=split.fit_id,
                request_ids=rows.ids,
                phases=rows.phases,
                tokens=rows.tokens,
                contexts=rows.contexts,
                flags=rows.flags,
                shares_ns=split.shares_ns[at],
                padding_ns=split.padding_ns[at],
                unattributed_ns=split.unattributed_ns[at],
                model_residual=split.residual,
                is_dummy=run.is_dummy,
                components=components,
                delay=split.delay if rows.ids else None,
                unnamed=unnamed[at] if unnamed else None,
                is_provisional=split.is_provisional,
                bounded_ns=split.delay.bounded_ns,
            )
            for sink in self._sinks:
                sink.on_step(final)

    def _ids_of(self, slots: Ints) -> tuple[str, ...]:
        """Return the engine's request IDs of slots; equal consecutive slots share one tuple."""
        table = self._lives.table
        of_slots, num_changes, ids = self._last_ids
        if slots is not of_slots or table.num_changes != num_changes:
            ids = tuple(map(table.ids.__getitem__, slots.tolist()))
            self._last_ids = (slots, table.num_changes, ids)
        return ids


class _Rows(NamedTuple):
    """Rows of one step, in the form that sinks receive."""

    ids: tuple[str, ...]
    phases: Bytes
    tokens: Ints
    contexts: Ints
    flags: Bytes


def _of_all_ranks(splits: Sequence[SplitStep], columns: Columns) -> tuple[Ints, list[list[int]]]:
    """Return the rows' time over all ranks, and the prefill time of each step and rank."""
    shares_ns, prefill_ns = np.zeros(len(columns.slots), dtype=np.int64), []
    for rank in range(max(len(split.shares_ns) for split in splits)):
        of_rank = np.concatenate(
            [
                split.shares_ns[rank] if rank < len(split.shares_ns) else np.zeros(size, np.int64)
                for split, size in zip(splits, columns.sizes.tolist(), strict=True)
            ]
        )
        shares_ns += of_rank
        prefill_ns.append(np.add.reduceat(of_rank * columns.is_prefill, columns.firsts))
    return shares_ns, np.array(prefill_ns).T.tolist()


_NO_BYTES: Bytes = np.zeros(0, dtype=np.uint8)
_DRAFTS = bytes((DRAFT,))
_NO_ROWS = _Rows((), _NO_BYTES, NO_ROWS, NO_ROWS, _NO_BYTES)
_PREFILL_FLOPS = 4
"""Column of `Moved` with the prefill's FLOPs."""
