"""Objectives of the observed engines: verdicts by window, causes, distributions, worst requests.

    records, final requests ─► LevelsWatch ─► a Judge per engine ─► counts, by ten seconds
                                    └─ the newest requests ─► distributions, and trial counts

The verdicts are those of `slo check` and of the collector: the same Judge makes them. Objectives
can change meanwhile; the kept requests are then judged anew, in the order of their ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import PeerRecord, remembered
from inferscope.fold import (
    BIN_EDGES_NS,
    Collector,
    FinalRequest,
    FinalStep,
    Judging,
    LevelTrial,
    LevelWindow,
    ObjectiveLevels,
    RequestRow,
    ServiceLevels,
    WorstRequest,
    finished_row,
)
from inferscope.insight.findings.requests import TPOT_LIMIT_NS, TTFT_LIMIT_NS
from inferscope.records import Record
from inferscope.slo import (
    FAILURES,
    Judge,
    Judged,
    Objective,
    ObjectiveCounter,
    Objectives,
    worst_causes,
)

Ints = NDArray[np.int64]

MOST_KEPT = 2_000
"""Maximum number of finished requests kept for each engine, about 1.5 KB each."""
BURN_WINDOWS_NS = (300_000_000_000, 3_600_000_000_000)
"""Windows of good ratios and burn rates."""
DEFAULT_ORIGIN = "defaults (MLPerf's limits for a server)"
_MONTH_NS = 30 * 86_400_000_000_000
DEFAULTS = Objectives(
    (
        Objective("ttft", "ttft", round(TTFT_LIMIT_NS), 0.99, _MONTH_NS),
        Objective("tbt", "tbt", round(TPOT_LIMIT_NS), 0.99, _MONTH_NS),
        Objective("availability", "availability", None, 0.999, _MONTH_NS),
        Objective("goodput", "goodput", None, 0.95, _MONTH_NS),
    )
)
"""Objectives of a reader without a file of them."""
_EDGES_NS = np.array(BIN_EDGES_NS, dtype=np.int64)
_PIECE_NS = 10_000_000_000
_MOST_WORST = 20
_FRESH_NS = 1_000_000_000
"""Age of the distributions at which they are computed again."""


class LevelsWatch:
    """Sink and listener of a fold that judges its engines' requests.

    Attributes:
        objectives: objectives in force.
        origin: source of the objectives, for display.
        trial: objectives to count the kept requests under as well; None for none.
    """

    def __init__(self, objectives: Objectives = DEFAULTS, *, origin: str = DEFAULT_ORIGIN) -> None:
        """Set the objectives; `watch` comes before the first record."""
        self.objectives = objectives
        self.origin = origin
        self.trial: Objectives | None = None
        self._engines: dict[str, _Engine] = {}
        self._collector: Collector | None = None
        self._judging = Judging(self._judge_of, self)

    def watch(self, collector: Collector) -> None:
        """Set the fold, before its first record."""
        self._collector = collector
        self._judging.watch(collector)

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Judge a finished request; the judge passes it back with its verdicts."""
        if request.judged is None:
            self._judging.on_request(request)
            return
        kept = _Kept(
            remembered(request), request.request_id, finished_row(request), binned(request.tbt_ns)
        )
        self._engines[request.engine_id].keep(kept, request.judged)

    def on_record(self, ring: int, record: Record) -> None:
        """Check deadlines at every Tick."""
        self._judging.on_record(ring, record)

    def change(self, objectives: Objectives, *, origin: str) -> None:
        """Replace the objectives, and judge the kept requests again under the new ones."""
        self.objectives, self.origin = objectives, origin
        before, self._engines = self._engines, {}
        self._judging = Judging(self._judge_of, self)
        if self._collector is not None:
            self._judging.watch(self._collector)
        self._engines = {name: engine.under(objectives) for name, engine in before.items()}

    def levels(self, engine_id: str, *, window_ns: int, now_ns: int) -> ServiceLevels | None:
        """Return the state of an engine's objectives; None before its first Tick.

        Args:
            engine_id: engine to report.
            window_ns: window of the distributions.
            now_ns: end of all windows, on the clock of the records.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            return None
        in_force = self.objectives.of_model(engine.judge.model)
        read_as = (window_ns, now_ns // _FRESH_NS, len(engine.kept), self.trial)
        if read_as != engine.read_as:
            tried = () if self.trial is None else self._tried(engine, self.trial)
            engine.read_as, engine.read = (
                read_as,
                engine.window(now_ns - window_ns, in_force, tried),
            )
        return replace(
            engine.read,
            origin=self.origin,
            objectives=tuple(engine.objective(one, now_ns) for one in in_force),
            observed_ns=0 if engine.since_ns is None else now_ns - engine.since_ns,
        )

    def _tried(self, engine: _Engine, trial: Objectives) -> tuple[LevelTrial, ...]:
        """Return the counts of the kept requests under the objectives in force and on trial."""
        now, then = (engine.under(each) for each in (self.objectives, trial))
        model = engine.judge.model
        present = {
            one.objective.name: one for one in now.counter.of(self.objectives.of_model(model))
        }
        return tuple(
            LevelTrial(
                each.objective,
                each.num_good,
                each.num_bad,
                present[each.objective.name].num_good if each.objective.name in present else None,
                present[each.objective.name].num_bad if each.objective.name in present else None,
            )
            for each in then.counter.of(trial.of_model(model))
        )

    def _judge_of(self, engine_id: str) -> Judge:
        """Return the judge of an engine, which exists already after a change of objectives."""
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = _Engine(self.objectives)
        return engine.judge


class _Kept(msgspec.Struct, frozen=True):
    """Finished request, as far as verdicts, distributions and lists need it."""

    request: PeerRecord
    request_id: str
    row: RequestRow
    gaps: Ints
    """Number of gaps between tokens by bin."""


class _Counter(ObjectiveCounter):
    """Counter of verdicts, also by pieces of ten seconds.

    Attributes:
        judge: judge whose clock dates the verdicts.
    """

    judge: Judge

    def __init__(self) -> None:
        super().__init__(self._note)
        self._pieces: dict[str, deque[list[int]]] = {}

    def since(self, objective: Objective, since_ns: int) -> tuple[int, int]:
        """Return the good and bad requests in the pieces that end after a time."""
        rows = takewhile(
            lambda piece: (piece[0] + 1) * _PIECE_NS > since_ns,
            reversed(self._pieces.get(objective.name, ())),
        )
        counts = [(good, bad) for _, good, bad in rows]
        return sum(good for good, _ in counts), sum(bad for _, bad in counts)

    def _note(self, objective: Objective, is_good: bool) -> None:
        pieces = self._pieces.get(objective.name)
        if pieces is None:
            most = BURN_WINDOWS_NS[-1] // _PIECE_NS + 1
            pieces = self._pieces[objective.name] = deque(maxlen=most)
        piece = self.judge.now_ns // _PIECE_NS
        if not pieces or pieces[-1][0] < piece:
            pieces.append([piece, 0, 0])
        pieces[-1][1 if is_good else 2] += 1


class _Judge(Judge):
    """Judge that keeps the start of its engine, for another judge of the same requests."""

    started_ns: int | None = None

    def set_model(self, model: str, *, started_ns: int | None) -> None:
        """Set the engine's model."""
        super().set_model(model, started_ns=started_ns)
        self.started_ns = started_ns


class _Engine:
    """Judge of one engine, its counts, and the newest finished requests with their verdicts.

    Attributes:
        kept: requests and verdicts, oldest first.
        since_ns: arrival of the first of them, also if it is no longer kept; None before it.
        read: state of the window at the last call; `read_as` has what it was computed for.
    """

    def __init__(self, objectives: Objectives) -> None:
        self.kept: deque[tuple[_Kept, Judged]] = deque(maxlen=MOST_KEPT)
        self.counter = _Counter()
        self.judge = self.counter.judge = _Judge(objectives, self.counter)
        self.since_ns: int | None = None
        self.read_as: object = None
        self.read = ServiceLevels()

    def keep(self, kept: _Kept, found: Judged) -> None:
        """Keep a judged request."""
        if self.since_ns is None:
            self.since_ns = kept.request.arrived_ns
        self.kept.append((kept, found))

    def under(self, objectives: Objectives) -> _Engine:
        """Return the same requests, judged by other objectives."""
        other = _Engine(objectives)
        other.judge.set_model(self.judge.model, started_ns=self.judge.started_ns)
        for kept, _ in self.kept:
            found = other.judge.request(
                kept.request, kept.request_id, now_ns=kept.request.delivered_ns
            )
            other.keep(kept, found)
        return other

    def objective(self, one: Objective, now_ns: int) -> ObjectiveLevels:
        """Return the counts of one objective."""
        (whole,) = self.counter.of((one,))
        windows = tuple(
            LevelWindow(span_ns, *self.counter.since(one, now_ns - span_ns))
            for span_ns in BURN_WINDOWS_NS
        )
        return ObjectiveLevels(
            one,
            whole.num_good,
            whole.num_bad,
            whole.num_warm_up,
            windows,
            dict(worst_causes(whole)),
        )

    def window(
        self, since_ns: int, in_force: tuple[Objective, ...], tried: tuple[LevelTrial, ...]
    ) -> ServiceLevels:
        """Return distributions and goodput over the requests that ended after a time."""
        recent = [each for each in self.kept if each[0].request.delivered_ns >= since_ns]
        requests = [kept.request for kept, _ in recent]
        good = [kept.request for kept, found in recent if all(found.results.values())]
        firsts = [value for value in map(_ttft_ns, requests) if value is not None]
        ends = [value for value in map(_e2e_ns, requests) if value is not None]
        gaps = np.sum([kept.gaps for kept, _ in recent], axis=0, dtype=np.int64)
        return ServiceLevels(
            num_requests=len(requests),
            num_good=len(good),
            num_tokens=sum(request.output_tokens for request in requests),
            num_good_tokens=sum(request.output_tokens for request in good),
            bins={
                "ttft": tuple(binned(firsts).tolist()),
                "tbt": tuple(np.broadcast_to(gaps, len(BIN_EDGES_NS) + 1).tolist()),
                "e2e": tuple(binned(ends).tolist()),
            },
            worst=self._worst(in_force),
            trial=tried,
        )

    def _worst(self, in_force: tuple[Objective, ...]) -> tuple[WorstRequest, ...]:
        """Return the requests furthest beyond a threshold; failed ones come first."""
        found = []
        for kept, result in self.kept:
            bad = [one for one in in_force if result.results.get(one.name) is False]
            ranked = [_missed(kept, one, result.cause) for one in bad]
            if ranked:
                found.append(max(ranked, key=_rank))
        return tuple(sorted(found, key=_rank, reverse=True)[:_MOST_WORST])


def binned(durations_ns: Iterable[int]) -> Ints:
    """Return the number of durations by bin of `BIN_EDGES_NS`; an edge belongs to the bin below."""
    values = np.fromiter(durations_ns, dtype=np.int64)
    return np.bincount(np.searchsorted(_EDGES_NS, values), minlength=len(BIN_EDGES_NS) + 1)


def _ttft_ns(request: PeerRecord) -> int | None:
    if request.first_token_ns is None or request.is_in_one_piece:
        return None
    return request.first_token_ns - request.arrived_ns


def _e2e_ns(request: PeerRecord) -> int | None:
    return None if request.last_token_ns is None else request.last_token_ns - request.arrived_ns


def _missed(kept: _Kept, one: Objective, cause: str | None) -> WorstRequest:
    """Return a request with the value that missed an objective."""
    request, value_ns = kept.request, None
    lived_ns = request.delivered_ns - request.arrived_ns
    if one.metric == "ttft":
        value_ns = _ttft_ns(request) or lived_ns
    elif one.metric == "e2e":
        value_ns = _e2e_ns(request) or lived_ns
    elif one.metric == "tbt":
        value_ns = max(request.longest_gap_ns, request.delivered_ns - (request.last_token_ns or 0))
    elif one.metric == "tpot" and request.last_token_ns and request.first_token_ns:
        value_ns = (request.last_token_ns - request.first_token_ns) // (request.output_tokens - 1)
    return WorstRequest(kept.row, one.name, value_ns, one.threshold_ns, cause)


def _rank(one: WorstRequest) -> tuple[bool, float]:
    ratio = 0.0
    if one.value_ns is not None and one.limit_ns:
        ratio = one.value_ns / one.limit_ns
    return one.row.finish in FAILURES, ratio
