"""Split of the steps of a window: one table of columns for each execution mode.

A cost model is fitted to each step before the next one is split, so a table is cut where another
model comes into force. Window bounds do not matter: the numbers of a step are the same as if it
were split by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, islice

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.attribution import (
    BlameWeights,
    HeldResources,
    Priced,
    TableBounds,
    blame_weights,
    delays,
    padding_ns,
    prefills_of,
    price,
    shares_ns,
)
from inferscope.cost import (
    Bounds,
    CostBook,
    Mode,
    PureStep,
    StepTable,
    cut_into_steps,
    features,
    is_sure_of,
    ratios_of,
)
from inferscope.fold.rows import Columns
from inferscope.fold.steps import Joined, SplitStep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def split_steps(book: CostBook, steps: Sequence[Joined], columns: Columns) -> None:
    """Divide the time of steps over their rows, and the delays of their requests by cause.

    Args:
        book: cost models in force; they are fitted to the steps.
        steps: steps in the order in which they were joined; their splits are set.
        columns: columns of their rows.
    """
    of_modes: dict[str, list[int]] = {}
    for at, step in enumerate(steps):
        of_modes.setdefault(step.run.span.mode, []).append(at)
    tables = {
        name: _ModeSteps(
            book, name, [steps[at] for at in of_mode], columns.steps(of_mode, len(steps))
        )
        for name, of_mode in of_modes.items()
    }
    for name, run in groupby(steps, key=_mode_of):
        tables[name].learn(len(list(run)))
    for table in tables.values():
        table.finish()


def _mode_of(step: Joined) -> str:
    return step.run.span.mode


class _ModeSteps:
    """Steps of one execution mode."""

    def __init__(
        self, book: CostBook, name: str, steps: list[Joined], of: tuple[StepTable, Ints]
    ) -> None:
        """Set the steps, the table of their members, and the members' slots."""
        self._book = book
        self._mode: Mode = book.mode(name)
        self._steps = steps
        self._table, self._slots = table, _ = of
        runs = [step.run for step in steps]
        self._delay_ns = np.array([run.delay_ns for run in runs])
        self._is_taught: list[bool] = [not (run.span.cold or run.is_dummy) for run in runs]
        """Whether the cost model is fitted to the step, [steps]."""
        self._stages_ns = [run.stages_ns for run in runs]
        if max(map(len, self._stages_ns)) < 2:
            self._stages_ns = []
        self._features = features(table)
        self._prefills = prefills_of(table)
        self._pure = _pure_steps(table, self._delay_ns.tolist(), self._is_taught)
        self._at = 0
        """Index of the next step to fit."""
        self._begin()

    def _begin(self) -> None:
        """Price the remaining steps by the model in force."""
        self._start = self._at
        self._model = self._mode.model
        self._priced = price(self._model, self._table.part(self._at, len(self._steps)))
        self._healthy: list[Floats] = []
        self._bounds: list[Bounds | None] = []

    def learn(self, num: int) -> None:
        """Fit the cost model to the next steps, and note its healthy ratio for each of them."""
        mode, end = self._mode, self._at + num
        while self._at < end:
            if mode.model is not self._model:
                self.finish()
                self._begin()
            start = self._at
            taught = self._is_taught[start:end]
            num = taught.index(False) if False in taught else len(taught)
            steps = slice(start, start + max(1, num))
            since = slice(start - self._start, steps.stop - self._start)
            delay_ns, modelled_ns = self._delay_ns[steps], self._priced.modelled_ns[since]
            if num:
                healthy = mode.observe(
                    self._features[steps],
                    measured_ns=delay_ns,
                    modelled_ns=modelled_ns,
                    stages_ns=self._stages_ns[steps],
                )
            else:
                healthy = mode.healthy(ratios_of(delay_ns, modelled_ns))
            self._healthy.append(healthy)
            self._at += len(healthy)
            self._bound(start, self._at)

    def _bound(self, start: int, stop: int) -> None:
        """Compute the bounds of steps; a step bounds only those after it."""
        book, model, table = self._book, self._model, self._table
        is_sure = is_sure_of(model)
        kept = start
        for at in range(start, stop):
            found = None
            if self._prefills[at] or not is_sure:
                book.learn_pure(self._pure[kept:at])
                kept = at
                first = table.first.item(at)
                members = slice(first, first + table.sizes.item(at))
                found = book.bounds(
                    model,
                    table.tokens[members],
                    table.context[members],
                    self._prefills[at],
                )
            self._bounds.append(found)
        book.learn_pure(self._pure[kept:stop])

    def finish(self) -> None:
        """Split the steps since the model came into force."""
        num = self._at - self._start
        if not num:
            return
        steps, priced = self._steps[self._start : self._at], self._priced
        if num < len(priced.table):
            priced = price(self._model, priced.table.part(0, num))
        table = priced.table
        explained = delays(
            priced,
            self._delay_ns[self._start : self._at],
            np.concatenate(self._healthy),
            _bounds(table, self._bounds),
        )
        of_ranks_ns, padded_ns = _of_ranks(priced, steps)
        low = self._table.first.item(self._start)
        members = [
            cut_into_steps(column, table.sizes)
            for column in (self._slots[low:], table.tokens, table.context)
        ]
        weights = map(
            BlameWeights, *[cut_into_steps(of, table.sizes) for of in blame_weights(priced)]
        )
        residuals = ratios_of(self._delay_ns[self._start : self._at], priced.modelled_ns) - 1.0
        chunk_ns, num_chunks = iter(priced.chunk_ns.tolist()), table.num_chunks.tolist()
        model = self._model
        for (
            step,
            taught,
            delay,
            shares,
            padding,
            slots,
            tokens,
            contexts,
            each,
            num,
            residual,
        ) in zip(
            steps,
            self._is_taught[self._start : self._at],
            explained,
            of_ranks_ns,
            padded_ns,
            *members,
            weights,
            num_chunks,
            residuals.tolist(),
            strict=True,
        ):
            run = step.run
            if run.wait_ns:
                delay = replace(delay, excess_ns=delay.excess_ns + run.wait_ns)
            if delay.bounded_ns and taught:
                self._mode.note_bounded(delay.bounded_ns)
            unattributed_ns: Sequence[int] = (0,) * len(shares)
            if run.span.dummy:
                unattributed_ns = [rank.measured_ns for rank in run.ranks]
            step.split = SplitStep(
                shares,
                padding,
                unattributed_ns,
                residual,
                model.fit_id,
                step.slots if step.is_single else slots,
                delay,
                model,
                tuple(islice(chunk_ns, num)),
                each,
                HeldResources(step.binding, step.block_tokens, tokens, contexts),
                model.is_provisional,
            )


def _pure_steps(
    table: StepTable, delay_ns: list[int], is_taught: list[bool]
) -> list[PureStep | None]:
    """Return tokens and context of each step's largest member, with the step's delay.

    The entry is None for a step of both phases, and for a step that is not fitted.
    """
    tokens, contexts = [1] * len(table), (table.longest - 1).tolist()
    for step, of_chunk, context in zip(
        table.chunk_step.tolist(),
        table.chunk_tokens.tolist(),
        table.context[table.chunks].tolist(),
        strict=True,
    ):
        if of_chunk > tokens[step]:
            tokens[step], contexts[step] = of_chunk, context
    num_prefills = np.bincount(table.step_of[table.prefills], minlength=len(table))
    is_pure = (num_prefills == 0) | (num_prefills == table.sizes)
    return [
        step if pure and taught and step[2] > 0 else None
        for step, pure, taught in zip(
            zip(tokens, contexts, delay_ns, strict=True), is_pure.tolist(), is_taught, strict=True
        )
    ]


def _bounds(table: StepTable, bounds: Sequence[Bounds | None]) -> TableBounds | None:
    """Return bounds by column; None if no step has any."""
    if not any(bounds):
        return None
    step_ns, own_ns = np.full(len(table), math.inf), np.full(len(table.tokens), math.inf)
    for at, (start, found) in enumerate(zip(table.first.tolist(), bounds, strict=True)):
        if found is not None:
            step_ns[at] = found.step_ns
            own_ns[start : start + len(found.own_ns)] = found.own_ns
    return TableBounds(step_ns, own_ns)


def _of_ranks(
    priced: Priced, steps: Sequence[Joined]
) -> tuple[Sequence[Sequence[Ints]], Sequence[Sequence[int]]]:
    """Return the shares and padding of each step's ranks, by step."""
    padded_tokens = np.array([step.run.span.padded_tokens for step in steps])
    of_ranks_ns, paddings_ns = [], []
    num_ranks = [len(step.run.ranks) for step in steps]
    for rank in range(max(num_ranks)):
        took_ns = [
            step.run.ranks[rank].measured_ns if rank < num and not step.run.span.dummy else 0
            for step, num in zip(steps, num_ranks, strict=True)
        ]
        measured_ns = np.array(took_ns)
        padded_ns = padding_ns(priced, measured_ns, padded_tokens)
        of_rows = shares_ns(priced, measured_ns - padded_ns)
        of_ranks_ns.append(cut_into_steps(of_rows, priced.table.row_sizes))
        paddings_ns.append(padded_ns.tolist())
    shares, paddings = list(zip(*of_ranks_ns, strict=True)), list(zip(*paddings_ns, strict=True))
    if min(num_ranks) < len(of_ranks_ns):
        shares = [each[:num] for each, num in zip(shares, num_ranks, strict=True)]
        paddings = [each[:num] for each, num in zip(paddings, num_ranks, strict=True)]
    return shares, paddings
