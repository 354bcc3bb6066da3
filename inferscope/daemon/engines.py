"""All engines of a host, each with a fold of its own from its first ring until 15 min after exit.

An engine's fold is discarded with the engine, so memory is bounded by the engines of the last
minutes, however long the collector runs.

Counting starts with the collector. Older records in the rings are read too, so that a request in
flight at the start is known from its arrival and counted whole when it ends. Requests that ended
earlier are not counted: a previous collector has counted them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from inferscope.daemon.config import MOST_ENGINES
from inferscope.daemon.shard import ALL, Shard
from inferscope.daemon.since import since
from inferscope.daemon.slo_state import SloTracker
from inferscope.errors import UnreadableFile
from inferscope.fold import (
    SECOND_NS,
    DeviceTime,
    EngineView,
    FinalRequest,
    FinalStep,
    Judging,
    Retention,
    Sink,
    Snapshot,
    snapshot,
)
from inferscope.probe import Clock
from inferscope.readers import File, KnownRings, RingSource, is_held
from inferscope.records import SAMPLER_ROLE
from inferscope.ring import (
    ALIVE_NS,
    Identity,
    RingReader,
    boot_id,
    closed_under,
    is_in_place,
    owner_of,
    reading_from,
    ring_paths,
    why_closed,
)
from inferscope.slo import Judge

HISTORY_NS = 120_000_000_000
"""History in nanoseconds that is read at the start; requests that arrived in it are complete."""
FORGET_NS = 900_000_000_000
"""Time in nanoseconds for which an engine is tracked after its last process exits: 15 min."""
_SETTLE_NS = 1_000_000_000
"""Delay in nanoseconds from an engine's first ring to following it, for its other processes."""
_TURN_BYTES = 1 << 17
"""Maximum bytes read from an engine's rings per turn, about 80 steps of 64 requests, so that a
collector with a backlog serves each of a hundred engines within seconds."""
_DISCOVER_NS = 500_000_000
"""Interval in nanoseconds of ring discovery, which takes 2 ms with a hundred engines."""
_CLOSED_NS = 10_000_000_000
"""Interval in nanoseconds of the search for rings that this user may not read."""
_WINDOW_NS = 10_000_000_000
_KEPT = Retention(
    seconds=2 * _WINDOW_NS // SECOND_NS,
    durations=("step",),
    finished=0,
    in_flight=16_384,
    digest=False,
)
"""Retention of a collector's folds: exporters build their own distributions from final records."""
_JUST_NOW_NS = 30_000_000_000
"""Time in nanoseconds after an engine's end by which all of its requests are final."""
_NO_WORK = "idle_no_work"
_MOST_RINGS = 1024
"""Maximum rings of one other user: each is an open file, and a process has a limit of those."""
_MOST_NOTES = 1000
"""Maximum number of log lines about rings: other users can create any number of names."""
REFUSALS = ("owner", "engines", "rings")
"""Reasons for refusing a ring: its engine ID belongs to another user, there are too many engines,
or its user has too many rings."""


class Engines:
    """The tracked engines of a ring directory.

    Attributes:
        notes: log lines about ring files, until the service takes them.
        most: maximum number of engines.
        num_refused: number of refused rings, by reason.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sink: Sink,
        clock: Clock,
        slo: SloTracker | None = None,
        shard: Shard = ALL,
        most: int = MOST_ENGINES,
    ) -> None:
        """Create an empty table.

        Args:
            folder: ring directory.
            sink: receives final steps and requests from the start of counting.
            clock: clock of the rings.
            slo: SLO state that judges requests; None for no objectives.
            shard: part of the engines to follow.
            most: maximum number of engines; those of one other user take at most half.
        """
        self.most = most
        self.num_refused = dict.fromkeys(REFUSALS, 0)
        self._refused: set[Path] = set()
        self._slo = slo
        self._shard = shard
        self._folder = folder
        self._sink = sink
        self._clock = clock
        self._began_ns = clock.monotonic_ns()
        self._known = KnownRings()
        self._has_looked = False
        self._discover_ns = 0
        self._settling: dict[str, tuple[int, list[Path]]] = {}
        self._followed: dict[str, _TrackedEngine] = {}
        self._owners: dict[str, int] = {}
        """UID of the first ring with each engine ID; only its rings are followed."""
        self._samplers: dict[Path, int] = {}
        """UID by path of the samplers' rings. Every engine's fold reads those of this user and of
        root; the folds of another user's engines also read that user's."""
        self.notes: list[str] = []
        self._logged: set[str] = set()
        self._closed_ns = 0

    def __len__(self) -> int:
        return len(self._followed)

    def advance(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Discover rings and fold due records, of each engine at most one turn's bytes.

        Args:
            is_over: called after each engine; if true, the other engines wait for the next call.

        Returns:
            Whether more records are ready.
        """
        now_ns, is_start = self._clock.monotonic_ns(), not self._has_looked
        if now_ns >= self._discover_ns:
            self._discover_ns = now_ns + _DISCOVER_NS
            self._discover(now_ns)
        if now_ns >= self._closed_ns:
            self._closed_ns = now_ns + _CLOSED_NS
            for folder in reading_from(self._folder):
                for path in closed_under(folder):
                    self._note(why_closed(path))
        self._settle(now_ns, is_start=is_start)
        has_more = False
        for engine_id, engine in list(self._followed.items()):
            has_more |= engine.advance(now_ns)
            if engine.is_forgotten(now_ns):
                engine.close()
                del self._followed[engine_id], self._owners[engine_id]
                self._retry_refused()
                if self._slo is not None:
                    self._slo.forget(engine_id)
            if is_over():
                return True
        return has_more

    def set_slo(self, slo: SloTracker | None) -> None:
        """Set or remove the objectives; they apply to requests in flight too."""
        self._slo = slo
        for engine_id, engine in self._followed.items():
            engine.judge_by(
                None if slo is None else slo.judge(engine_id, counts_from_ns=engine.through_ns)
            )

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all engines whose counting has started."""
        now_ns = self._clock.monotonic_ns()
        real_ns = self._clock.real_ns()
        views = [view for engine in self._followed.values() for view in engine.views()]
        for view in views:
            for skewed in view.health.skewed_clocks:
                self._note(skewed.in_words())
        current = Snapshot(
            now_ns, real_ns, "live", tuple(views), "", str(self._folder), guests=self._guests()
        )
        return current if self._slo is None else _with_slo(current, self._slo)

    def save(self) -> None:
        """Save the SLO state for the next collector."""
        if self._slo is not None:
            now_ns = self._clock.monotonic_ns()
            self._slo.save(
                {
                    engine_id: engine.through_ns
                    for engine_id, engine in self._followed.items()
                    if engine.seen_ns > now_ns - _JUST_NOW_NS
                }
            )

    def through_ns(self) -> int:
        """Return the time through which every tracked engine is folded."""
        folded = (engine.through_ns for engine in self._followed.values())
        return min(folded, default=self._clock.monotonic_ns())

    def seen_ns(self) -> int:
        """Return the last time at which an engine process was alive; 0 for never."""
        return max((engine.seen_ns for engine in self._followed.values()), default=0)

    def rings(self) -> Iterator[Path]:
        """Return the rings of all tracked engines."""
        for engine in self._followed.values():
            yield from engine.paths
        for _, paths in self._settling.values():
            yield from paths
        yield from self._samplers

    def close(self) -> None:
        """Close all rings; safe to call twice."""
        followed, self._followed = self._followed, {}
        for engine in followed.values():
            engine.close()

    def _discover(self, now_ns: int) -> None:
        is_start, self._has_looked = not self._has_looked, True
        paths = ring_paths(*reading_from(self._folder))
        files = self._known.unread(paths, now_ns, is_in_use=self._is_in_use)
        gone = self._known.forget(now_ns)
        for engine in self._followed.values() if gone else ():
            engine.paths = [path for path in engine.paths if path not in gone]
        for path in gone:
            self._samplers.pop(path, None)
        self._refused.difference_update(gone)
        for file in files:  # this user's own directory comes first
            identity = self._identity_of(file, is_start=is_start)
            if identity is None:
                continue
            path = file[0]
            engine_id = identity.engine_id
            owner = owner_of(path)
            if owner < 0:  # the file was removed in the meantime
                continue
            if identity.role == SAMPLER_ROLE:
                self._samplers[path] = owner
                continue
            if not self._shard.has(engine_id):
                continue
            refusal = self._refusal(engine_id, owner)
            if refusal is not None:
                self._refuse(path, *refusal)
                continue
            self._owners[engine_id] = owner
            self._refused.discard(path)
            if engine_id in self._followed:
                self._followed[engine_id].add(path)
            else:
                since_ns = now_ns - _SETTLE_NS if is_start else now_ns
                self._settling.setdefault(engine_id, (since_ns, []))[1].append(path)

    def _refusal(self, engine_id: str, owner: int) -> tuple[str, str] | None:
        """Return one of REFUSALS and a log line if a ring is to be refused, else None."""
        known = self._owners.get(engine_id)
        if known not in (None, owner):
            return "owner", (
                f"its engine id {engine_id} belongs to uid {known}, but the ring to uid {owner}"
            )
        is_guest = _is_guest(owner)
        if known is None:
            num, of_user = len(self._owners), list(self._owners.values()).count(owner)
            if num >= self.most or (is_guest and 2 * of_user >= self.most):
                return "engines", (
                    f"{num} engines are tracked, {of_user} of them of uid {owner}; max_engines is "
                    f"{self.most}, of which another user gets at most half"
                )
        if is_guest and self._num_rings(owner) >= _MOST_RINGS:
            return "rings", f"uid {owner} has {_MOST_RINGS} rings already"
        return None

    def _num_rings(self, owner: int) -> int:
        """Return the number of followed rings of a user."""
        followed = {name: engine.paths for name, engine in self._followed.items()}
        settling = {name: paths for name, (_, paths) in self._settling.items()}
        return sum(
            len(paths)
            for name, paths in (*followed.items(), *settling.items())
            if self._owners[name] == owner
        )

    def _refuse(self, path: Path, reason: str, why: str) -> None:
        """Count and log a refused ring once."""
        if path not in self._refused:
            self._refused.add(path)
            self.num_refused[reason] += 1
            self._note(f"{path} is ignored: {why}")

    def _retry_refused(self) -> None:
        """Reconsider the refused rings after an engine has been removed."""
        self._known.fail_all(self._refused)

    def _guests(self) -> dict[str, int]:
        """Return the UID by engine ID of engines of users other than this one and root."""
        return {name: owner for name, owner in self._owners.items() if _is_guest(owner)}

    def _samplers_for(self, owner: int) -> list[Path]:
        """Return the rings of the samplers whose samples apply to a user's engines."""
        return [path for path, uid in self._samplers.items() if uid == owner or not _is_guest(uid)]

    def _settle(self, now_ns: int, *, is_start: bool) -> None:
        """Start following the engines whose processes have had time to create their rings."""
        for engine_id, (since_ns, paths) in list(self._settling.items()):
            if now_ns - since_ns >= _SETTLE_NS:
                del self._settling[engine_id]
                self._followed[engine_id] = _TrackedEngine(
                    engine_id,
                    paths,
                    partial(self._samplers_for, self._owners[engine_id]),
                    self._sink,
                    self._clock,
                    counts_from_ns=self._began_ns if is_start else None,
                    judge=self._judge(engine_id, is_start=is_start),
                )

    def _judge(self, engine_id: str, *, is_start: bool) -> Judge | None:
        """Return the judge of an engine; one that started earlier is judged from the start on."""
        slo = self._slo
        if slo is None:
            return None
        counts_from_ns = slo.counts_from_ns(engine_id, self._began_ns) if is_start else 0
        return slo.judge(engine_id, counts_from_ns=counts_from_ns)

    def _is_in_use(self, path: Path, identity: Identity) -> bool:
        """Return whether a ring is followed here or belongs to another shard."""
        engine = self._followed.get(identity.engine_id)
        if engine is not None and path in engine.paths:
            return True
        return path in self._samplers or not self._shard.has(identity.engine_id)

    def _identity_of(self, file: File, *, is_start: bool) -> Identity | None:
        """Return the identity of a new ring; None if it is known, foreign, or of a past engine.

        A ring whose process exited before this collector started is past, unless the previous
        collector stopped before that exit: then its requests still have to be judged.
        """
        path = file[0]
        try:
            reader = RingReader(path)
        except UnreadableFile as error:
            self._note(str(error))
            return None
        try:
            heartbeat_ns, identity = reader.heartbeat_ns(), reader.identity
            if not self._known.is_new(file, identity):
                return None
            is_alive = self._clock.monotonic_ns() - heartbeat_ns < ALIVE_NS or is_held(reader)
            if identity.boot_id != boot_id():
                return None
            if not is_in_place(path, identity):
                if is_alive:
                    why = f"its engine id {identity.engine_id} belongs to another directory"
                    self._refuse(path, "owner", why)
                return None
            is_of_interest = is_alive or (
                self._slo is not None and self._slo.resumes(identity.engine_id)
            )
            if is_of_interest:
                return identity
            # A ring that is discovered later, on a volume mounted later, can be as old.
            began_ns = self._began_ns
            is_old = is_start or (identity.start_ns < began_ns and not reader.seek(began_ns))
            return None if is_old else identity
        except OSError as error:
            self._note(f"cannot read {path}: {error.strerror}")
            return None
        finally:
            reader.close()

    def _note(self, line: str) -> None:
        """Append a line to the notes, each line once and at most `_MOST_NOTES` lines."""
        if line not in self._logged and len(self._logged) <= _MOST_NOTES:
            is_last = len(self._logged) == _MOST_NOTES
            self._logged.add(line)
            self.notes.append("further lines about rings are suppressed" if is_last else line)


class _TrackedEngine:
    """One tracked engine with its fold.

    Attributes:
        paths: paths of its rings.
        seen_ns: last time at which one of its processes was alive.
    """

    def __init__(
        self,
        engine_id: str,
        paths: list[Path],
        samplers: Callable[[], list[Path]],
        sink: Sink,
        clock: Clock,
        *,
        counts_from_ns: int | None,
        judge: Judge | None = None,
    ) -> None:
        """Start following; count from `counts_from_ns`, or from the first record if None."""
        now_ns = clock.monotonic_ns()
        self.paths = paths
        self._gate = _Gate(sink)
        self._gate.is_open = counts_from_ns is None
        self._counts_from_ns = counts_from_ns or 0
        since_ns = counts_from_ns
        if judge is not None and since_ns is not None:
            since_ns = min(since_ns, judge.counts_from_ns)
        self._source = RingSource(
            lambda: [*self.paths, *samplers()],
            name=engine_id,
            sinks=(self,),
            clock=clock,
            since_ns=None if since_ns is None else since_ns - HISTORY_NS,
            stays=True,
            keep=_KEPT,
            most_bytes=_TURN_BYTES,
        )
        self._takes: Sink = self._gate
        self.judge_by(judge)
        self._before: EngineView | None = None
        self._last: EngineView | None = None
        self.seen_ns = now_ns
        self._was_active = True
        self._away_ns: dict[str, int] = {}
        """Time between incarnations of the engine, in nanoseconds by device."""

    def judge_by(self, judge: Judge | None) -> None:
        """Set or remove the judge of its requests."""
        if judge is None:
            self._takes = self._gate
            self._source.listen_with(None)
            return
        judging = self._takes = Judging(lambda _: judge, self._gate)
        judging.watch(self._source.collector)
        self._source.listen_with(judging.on_record)

    def on_step(self, step: FinalStep) -> None:
        """Take a step from the fold."""
        self._takes.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Take a request from the fold."""
        self._takes.on_request(request)

    def add(self, path: Path) -> None:
        """Add a ring."""
        if path not in self.paths:
            self.paths = [*self.paths, path]
        self._source.request_rescan()

    def advance(self, now_ns: int) -> bool:
        """Fold due records, at most one turn's bytes; start counting once caught up.

        Returns:
            Whether more records are ready.
        """
        self._source.advance()
        if self._is_active:
            self.seen_ns = now_ns
        if not self._gate.is_open and self._source.collector.now_ns >= self._counts_from_ns:
            self._gate.is_open = True
            self._before = next(iter(self._look()), None)
        return self._source.has_more

    @property
    def _is_active(self) -> bool:
        """Return whether one of its processes is alive or has left records that are not folded.

        Device time is counted until then.
        """
        source = self._source
        return (
            source.has_live_writer
            or source.has_more
            or any(engine.has_unfolded for engine in source.collector.engines.values())
        )

    @property
    def through_ns(self) -> int:
        """Return the time through which its records are folded."""
        return self._source.collector.now_ns

    def is_forgotten(self, now_ns: int) -> bool:
        """Return whether its last process exited more than `FORGET_NS` ago."""
        return now_ns - self.seen_ns > FORGET_NS

    def views(self) -> Iterator[EngineView]:
        """Yield its view once counting has started; after its exit, the last view."""
        if not self._gate.is_open:
            return
        is_active = self._is_active
        for view in self._look():
            if is_active and not self._was_active and self._last is not None:
                self._add_away(self._last, view)
            if is_active or self._was_active or self._last is None:
                self._last = view
            # The fold's clock keeps running after the exit; device time must not.
            devices, through_ns = self._last.devices, self._last.through_ns
            view = replace(view, is_alive=is_active, devices=devices, through_ns=through_ns)
            if self._before is not None:
                view = since(self._before, view)
            counted = tuple(_less(one, self._away_ns.get(one.device, 0)) for one in view.devices)
            yield replace(view, devices=counted)
        self._was_active = is_active

    def _add_away(self, last: EngineView, view: EngineView) -> None:
        """Add the time between an engine's exit and its restart to `_away_ns`."""
        before = {device.device: device for device in last.devices}
        for now in view.devices:
            if now.device in before:
                away_ns = now.seconds_by_ns[_NO_WORK] - before[now.device].seconds_by_ns[_NO_WORK]
                self._away_ns[now.device] = self._away_ns.get(now.device, 0) + max(0, away_ns)

    def close(self) -> None:
        """Close its rings."""
        self._source.close()

    def _look(self) -> tuple[EngineView, ...]:
        return snapshot(
            self._source.collector, window_ns=_WINDOW_NS, mode="live", max_requests=0
        ).engines


def _is_guest(owner: int) -> bool:
    """Return whether a user is neither this one nor root."""
    return owner not in (os.geteuid(), 0)


class _Gate:
    """A sink that passes final steps and requests on once it is open."""

    def __init__(self, sink: Sink) -> None:
        self.is_open = False
        self._sink = sink

    def on_step(self, step: FinalStep) -> None:
        """Pass a step on."""
        if self.is_open:
            self._sink.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Pass a request on."""
        if self.is_open:
            self._sink.on_request(request)


def _with_slo(current: Snapshot, slo: SloTracker) -> Snapshot:
    """Return a snapshot with the SLO counts of each engine and the budgets."""
    views = tuple(
        replace(view, objectives=slo.counts(view.engine_id, view.model)) for view in current.engines
    )
    return replace(current, engines=views, promised=slo.budget_state(view.model for view in views))


def _less(device: DeviceTime, away_ns: int) -> DeviceTime:
    """Return a device's time without `away_ns`, in which its engine did not run."""
    spent = device.seconds_by_ns
    spent = spent | {_NO_WORK: spent[_NO_WORK] - away_ns}
    return replace(device, wall_ns=device.wall_ns - away_ns, seconds_by_ns=spent)
