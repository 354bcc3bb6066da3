"""A collector's SLO state: one judge per engine, the error budgets, and the state file.

Once a second the state is written to one file: the budgets, the time through which each engine is
judged, and the pending verdicts of requests in flight. A snapshot is published after it is saved,
so everything that a scrape has seen is in the file. The next collector continues from there: it
judges the time between from the rings, counts nothing twice, and reports the uncounted time if the
rings do not reach back far enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from inferscope.fold import BudgetView, SloState
from inferscope.private import open_own, replace_own
from inferscope.probe import Clock
from inferscope.ring import boot_id
from inferscope.slo import (
    Budget,
    Judge,
    Objective,
    ObjectiveCount,
    ObjectiveCounter,
    Objectives,
    PendingVerdict,
)

CATCH_UP_NS = 300_000_000_000
"""Longest time without a collector, in nanoseconds, that is judged afterwards: 5 min."""
_NEW_NS = 5_000_000_000
"""Latest start, in nanoseconds before the previous collector's end, of an engine it did not track.
"""
_VERSION = 1
_MOST_BYTES = 256 << 20
_MOST_ENGINES_BYTES = 64 << 20
"""Maximum size of the part about engines; of a larger one only the budgets are restored."""


class _EngineState(msgspec.Struct):
    through_ns: int
    in_hand: dict[str, PendingVerdict] = {}


class _BudgetState(msgspec.Struct):
    model: str
    name: str
    metric: str
    threshold_s: float | None
    pieces: list[tuple[int, int, int]]


class _StateFile(msgspec.Struct):
    """Contents of the state file, with the engines' part undecoded."""

    version: int
    boot_id: str
    mono_ns: int
    real_ns: int
    engines: msgspec.Raw = msgspec.Raw(b"{}")
    budgets: list[_BudgetState] = []


class _State(msgspec.Struct):
    version: int
    boot_id: str
    mono_ns: int
    real_ns: int
    engines: dict[str, _EngineState] = {}
    budgets: list[_BudgetState] = []


_BudgetKey = tuple[str, str, "float | None"]
"""Name, metric and threshold in seconds of an objective; a budget survives while they stay equal.
"""


class SloTracker:
    """SLO state of a collector over all of its engines."""

    def __init__(
        self, objectives: Objectives, path: Path, *, clock: Clock, log_line: Callable[[str], None]
    ) -> None:
        """Store the objectives and restore the state file.

        Args:
            objectives: objectives of all models.
            path: path of the state file, created by the first save.
            clock: clock of the rings.
            log_line: prints a line for the operator.
        """
        self._objectives = objectives
        self._path = path
        self._clock = clock
        self._log_line = log_line
        self._judges: dict[str, tuple[Judge, ObjectiveCounter]] = {}
        self._budgets: dict[tuple[str, Objective], Budget] = {}
        self._uncounted_ns = 0
        self._has_failed = False
        self._before = self._read()
        """State of engines from the previous collector; None if missing or too old."""

    def change(self, objectives: Objectives, path: Path) -> None:
        """Set the objectives and the file; budgets of unchanged objectives are kept."""
        self._objectives, self._path = objectives, path
        for judge, _ in self._judges.values():
            judge.set_objectives(objectives)
        before, self._budgets = self._budgets, {}
        for (model, one), budget in before.items():
            self._restore(model, _budget_key(one), budget.entries())

    def resumes(self, engine_id: str) -> bool:
        """Return whether the previous collector tracked an engine when it stopped."""
        return self._before is not None and engine_id in self._before.engines

    def counts_from_ns(self, engine_id: str, began_ns: int) -> int:
        """Return the time through which the previous collector has judged an engine."""
        before = self._before
        if before is None:
            return began_ns
        known = before.engines.get(engine_id)
        return before.mono_ns - _NEW_NS if known is None else known.through_ns

    def judge(self, engine_id: str, *, counts_from_ns: int) -> Judge:
        """Create and return the judge of a newly tracked engine."""

        def spend(objective: Objective, is_good: bool) -> None:
            at_ns = judge.now_ns + self._clock.real_ns() - self._clock.monotonic_ns()
            budget = self._budget(judge.model, objective)
            budget.add(at_ns, good=int(is_good), bad=int(not is_good))

        counting = ObjectiveCounter(spend)
        judge = Judge(self._objectives, counting, counts_from_ns=counts_from_ns)
        if counts_from_ns and self._before is not None and engine_id in self._before.engines:
            judge.in_hand = self._before.engines[engine_id].in_hand
        self._judges[engine_id] = (judge, counting)
        return judge

    def forget(self, engine_id: str) -> None:
        """Remove an engine; its model's budgets stay."""
        self._judges.pop(engine_id, None)

    def counts(self, engine_id: str, model: str) -> tuple[ObjectiveCount, ...]:
        """Return one engine's counts for all current objectives of its model."""
        return self._judges[engine_id][1].of(self._objectives.of_model(model))

    def budget_state(self, models: Iterable[str]) -> SloState:
        """Return the budgets of these models, and of models with counts still in a window."""
        real_ns = self._clock.real_ns()
        present = {model for model in models if model}
        for model in present:
            for objective in self._objectives.of_model(model):
                self._budget(model, objective)
        views = []
        for (model, objective), budget in sorted(self._budgets.items(), key=_by_name):
            good, bad = budget.counts(real_ns)
            if good or bad or model in present:
                views.append(BudgetView(model, objective, good, bad, budget.remaining(real_ns)))
            else:
                del self._budgets[model, objective]
        return SloState(tuple(views), self._uncounted_ns)

    def save(self, through_ns: dict[str, int]) -> None:
        """Write the state file; a failed write is logged once.

        Args:
            through_ns: time through which each current or just ended engine is judged.
        """
        engines = {
            engine_id: _EngineState(max(at_ns, judge.counts_from_ns), judge.in_hand)
            for engine_id, at_ns in through_ns.items()
            for judge, _ in (self._judges[engine_id],)
        }
        budgets = [
            _BudgetState(model, *_budget_key(one), budget.entries())
            for (model, one), budget in self._budgets.items()
        ]
        now_ns, real_ns = self._clock.monotonic_ns(), self._clock.real_ns()
        state = _State(_VERSION, boot_id(), now_ns, real_ns, engines, budgets)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_own(self._path, msgspec.json.encode(state))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._log_line(f"cannot write budgets to {self._path}: {error.strerror}")
        else:
            self._has_failed = False

    def _budget(self, model: str, objective: Objective) -> Budget:
        budget = self._budgets.get((model, objective))
        if budget is None:
            budget = self._budgets[model, objective] = Budget(objective)
        return budget

    def _restore(self, model: str, key: _BudgetKey, pieces: list[tuple[int, int, int]]) -> None:
        """Restore counts into the budget of the objective with the same key, if there is one."""
        for one in self._objectives.of_model(model):
            if _budget_key(one) == key:
                self._budget(model, one).restore(pieces)

    def _read(self) -> _State | None:
        """Restore the budgets; return the engines' state if it is recent enough."""
        try:
            with os.fdopen(open_own(self._path, os.O_RDONLY), "rb") as file:
                state = msgspec.json.decode(file.read(_MOST_BYTES), type=_StateFile)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            self._log_line(f"budgets restart at zero: cannot read {self._path}: {why}")
            return None
        if state.version != _VERSION:
            self._log_line(f"budgets restart at zero: {self._path} has another version")
            return None
        for kept in state.budgets:
            self._restore(kept.model, (kept.name, kept.metric, kept.threshold_s), kept.pieces)
        away_ns = self._clock.monotonic_ns() - state.mono_ns
        if state.boot_id == boot_id() and 0 <= away_ns <= CATCH_UP_NS:
            engines = self._engines(state.engines)
            if engines is not None:
                return _State(_VERSION, state.boot_id, state.mono_ns, state.real_ns, engines)
        self._uncounted_ns = max(0, self._clock.real_ns() - state.real_ns)
        away_s = self._uncounted_ns / 1e9
        self._log_line(
            f"objectives: no collector ran for {away_s:.0f} s; those requests are not counted"
        )
        return None

    def _engines(self, kept: msgspec.Raw) -> dict[str, _EngineState] | None:
        """Decode the engines' state; return None if it is too large or damaged."""
        why = f"{len(kept) >> 20} MiB"
        if len(kept) <= _MOST_ENGINES_BYTES:
            try:
                return msgspec.json.decode(kept, type=dict[str, _EngineState])
            except msgspec.MsgspecError:
                why = "it is damaged"
        self._log_line(f"objectives: cannot read the engines' state in {self._path}: {why}")
        return None


def _budget_key(one: Objective) -> _BudgetKey:
    threshold_s = None if one.threshold_ns is None else one.threshold_ns / 1e9
    return one.name, one.metric, threshold_s


def _by_name(item: tuple[tuple[str, Objective], Budget]) -> tuple[str, str]:
    (model, objective), _ = item
    return model, objective.name
