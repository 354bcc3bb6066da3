"""A collector's objectives: who judges which engine, what is left of the budgets, what is kept.

Once a second all of it goes into one file: the budgets, up to where each engine is judged, and what
is decided of requests in flight. A look is published after it is saved, so whatever a scrape saw is
in the file, and the collector after this one goes on behind it: it decides what happened meanwhile
from the rings, counts nothing a second time, and says for how long nobody counted where the rings
do not reach so far back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from inferscope.collector.snapshot import BudgetView, Promised
from inferscope.private import open_own, replace_own
from inferscope.probe.clock import Clock
from inferscope.ring.discovery import boot_id
from inferscope.slo.budget import Budget
from inferscope.slo.judge import InHand, Judge
from inferscope.slo.objectives import Objective, Objectives
from inferscope.slo.tally import Count, Counting

CATCH_UP_NS = 300_000_000_000
"""What happened without a collector is made up for if it was no longer: five minutes."""
_NEW_NS = 5_000_000_000
"""An engine that was not in sight had begun as late as this before the end, if it had."""
_VERSION = 1
_MOST_BYTES = 256 << 20
_MOST_ENGINES_BYTES = 64 << 20
"""Maximum size of the part about engines; of a larger one only the budgets are restored."""


class _EngineState(msgspec.Struct):
    through_ns: int
    in_hand: dict[str, InHand] = {}


class _BudgetState(msgspec.Struct):
    model: str
    name: str
    metric: str
    threshold_s: float | None
    pieces: list[tuple[int, int, int]]


class _Kept(msgspec.Struct):
    """The file, with its engines as they were written."""

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


_Promise = tuple[str, str, "float | None"]
"""What must stay for a budget to stay: its name, the metric and the threshold."""


class Promises:
    """The objectives of one collector, over all of its engines."""

    def __init__(
        self, objectives: Objectives, path: Path, *, clock: Clock, say: Callable[[str], None]
    ) -> None:
        """Take the objectives, and go on from what the file says.

        Args:
            objectives: of all models.
            path: of the file; it is made with the first save.
            clock: the rings' own.
            say: prints a line.
        """
        self._objectives = objectives
        self._path = path
        self._clock = clock
        self._say = say
        self._judges: dict[str, tuple[Judge, Counting]] = {}
        self._budgets: dict[tuple[str, Objective], Budget] = {}
        self._uncounted_ns = 0
        self._has_failed = False
        self._before = self._read()
        """What the collector before this one left of engines; None where that is of no use."""

    def change(self, objectives: Objectives, path: Path) -> None:
        """Go on with other objectives, or another file: budgets keep what still counts for them."""
        self._objectives, self._path = objectives, path
        for judge, _ in self._judges.values():
            judge.promise(objectives)
        before, self._budgets = self._budgets, {}
        for (model, one), budget in before.items():
            self._restore(model, _promise(one), budget.entries())

    def resumes(self, engine_id: str) -> bool:
        """Tell whether an engine was there when the collector before this one ended."""
        return self._before is not None and engine_id in self._before.engines

    def counts_from_ns(self, engine_id: str, began_ns: int) -> int:
        """Return up to where somebody else has counted an engine that is there at the start."""
        before = self._before
        if before is None:
            return began_ns
        known = before.engines.get(engine_id)
        return before.mono_ns - _NEW_NS if known is None else known.through_ns

    def judge(self, engine_id: str, *, counts_from_ns: int) -> Judge:
        """Return who judges an engine that begins to be followed."""

        def spend(objective: Objective, is_good: bool) -> None:
            at_ns = judge.now_ns + self._clock.real_ns() - self._clock.monotonic_ns()
            budget = self._budget(judge.model, objective)
            budget.add(at_ns, good=int(is_good), bad=int(not is_good))

        counting = Counting(spend)
        judge = Judge(self._objectives, counting, counts_from_ns=counts_from_ns)
        if counts_from_ns and self._before is not None and engine_id in self._before.engines:
            judge.in_hand = self._before.engines[engine_id].in_hand
        self._judges[engine_id] = (judge, counting)
        return judge

    def forget(self, engine_id: str) -> None:
        """Let go of an engine that is followed no longer; its budget stays."""
        self._judges.pop(engine_id, None)

    def counts(self, engine_id: str, model: str) -> tuple[Count, ...]:
        """Return one engine's numbers, of all objectives that are in force for its model."""
        return self._judges[engine_id][1].of(self._objectives.of_model(model))

    def look(self, models: Iterable[str]) -> Promised:
        """Return what is left of the budgets of these models, and of others still in a window."""
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
        return Promised(tuple(views), self._uncounted_ns)

    def save(self, through_ns: dict[str, int]) -> None:
        """Write the file; a disk that does not take it costs one line.

        Args:
            through_ns: up to where the engines are judged that are there, or were just now.
        """
        engines = {
            engine_id: _EngineState(max(at_ns, judge.counts_from_ns), judge.in_hand)
            for engine_id, at_ns in through_ns.items()
            for judge, _ in (self._judges[engine_id],)
        }
        budgets = [
            _BudgetState(model, *_promise(one), budget.entries())
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
                self._say(f"budgets cannot be kept in {self._path}: {error.strerror}")
        else:
            self._has_failed = False

    def _budget(self, model: str, objective: Objective) -> Budget:
        budget = self._budgets.get((model, objective))
        if budget is None:
            budget = self._budgets[model, objective] = Budget(objective)
        return budget

    def _restore(self, model: str, promise: _Promise, pieces: list[tuple[int, int, int]]) -> None:
        """Give what was counted to the objective that promises the same, if there is one."""
        for one in self._objectives.of_model(model):
            if _promise(one) == promise:
                self._budget(model, one).restore(pieces)

    def _read(self) -> _State | None:
        """Take over the budgets; return what was left of engines, if it can be gone on from."""
        try:
            with os.fdopen(open_own(self._path, os.O_RDONLY), "rb") as file:
                state = msgspec.json.decode(file.read(_MOST_BYTES), type=_Kept)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            self._say(f"budgets begin anew: {self._path} cannot be read: {why}")
            return None
        if state.version != _VERSION:
            self._say(f"budgets begin anew: {self._path} is of another version")
            return None
        for kept in state.budgets:
            self._restore(kept.model, (kept.name, kept.metric, kept.threshold_s), kept.pieces)
        away_ns = self._clock.monotonic_ns() - state.mono_ns
        if state.boot_id == boot_id() and 0 <= away_ns <= CATCH_UP_NS:
            engines = self._engines(state.engines)
            if engines is not None:
                return _State(_VERSION, state.boot_id, state.mono_ns, state.real_ns, engines)
        self._uncounted_ns = max(0, self._clock.real_ns() - state.real_ns)
        self._say(f"objectives: {self._uncounted_ns / 1e9:.0f} s were watched by nobody")
        return None

    def _engines(self, kept: msgspec.Raw) -> dict[str, _EngineState] | None:
        """Return what was left of engines, None if it is of no use."""
        why = f"{len(kept) >> 20} MiB"
        if len(kept) <= _MOST_ENGINES_BYTES:
            try:
                return msgspec.json.decode(kept, type=dict[str, _EngineState])
            except msgspec.MsgspecError:
                why = "it is damaged"
        self._say(f"objectives: what {self._path} has of engines cannot be read: {why}")
        return None


def _promise(one: Objective) -> _Promise:
    threshold_s = None if one.threshold_ns is None else one.threshold_ns / 1e9
    return one.name, one.metric, threshold_s


def _by_name(item: tuple[tuple[str, Objective], Budget]) -> tuple[str, str]:
    (model, objective), _ = item
    return model, objective.name
