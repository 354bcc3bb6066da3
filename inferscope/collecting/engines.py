"""All engines of a host, each followed by a fold of its own from its first ring to long after.

An engine that is gone takes its fold along when it is forgotten, so a collector that runs for
months beside engines that come and go holds what those of the last minutes need.

What is counted begins when the collector does. The rings hold more, and some of it is read: a
request that was under way is then known from its beginning and counted whole when it ends. What
ended before is nobody's: the collector before this one has counted it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from inferscope.collecting.config import MOST_ENGINES
from inferscope.collecting.promises import Promises
from inferscope.collecting.shard import ALL, Shard
from inferscope.collecting.since import since
from inferscope.collector.finals import (
    DeviceTime,
    FinalRequest,
    FinalStep,
    Sink,
)
from inferscope.collector.follow import is_held
from inferscope.collector.judging import Judging
from inferscope.collector.keep import Keep
from inferscope.collector.known_rings import File, KnownRings
from inferscope.collector.snapshot import EngineView, Snapshot
from inferscope.collector.source import RingSource
from inferscope.collector.view import snapshot
from inferscope.collector.windows import SECOND_NS
from inferscope.errors import UnreadableFile
from inferscope.probe.clock import Clock
from inferscope.records import SAMPLER_ROLE
from inferscope.ring.access import closed_under, why_closed
from inferscope.ring.discovery import (
    ALIVE_NS,
    boot_id,
    is_in_place,
    owner_of,
    reading_from,
    ring_paths,
)
from inferscope.ring.layout import Identity
from inferscope.ring.reader import RingReader
from inferscope.slo.judge import Judge

HISTORY_NS = 120_000_000_000
"""Read of the rings that are there at the start: requests that began since then are whole."""
FORGET_NS = 900_000_000_000
"""An engine stays in sight for this long after its last process: fifteen minutes."""
_SETTLE_NS = 1_000_000_000
"""From an engine's first ring to following it: its other processes have made theirs by then."""
_BITE_BYTES = 1 << 17
"""Of an engine's rings in one turn, so that a collector that is behind comes to each of a hundred
engines within seconds: 80 steps of 64 requests. The rest waits where it is."""
_DISCOVER_NS = 500_000_000
"""Between two looks for rings: one takes 2 ms where there are a hundred engines."""
_CLOSED_NS = 10_000_000_000
"""Between two looks for rings that this user may not read."""
_WINDOW_NS = 10_000_000_000
_KEPT = Keep(
    seconds=2 * _WINDOW_NS // SECOND_NS,
    durations=("step",),
    finished=0,
    in_flight=16_384,
    digest=False,
)
"""Exporters take what is final, and make distributions of their own."""
_JUST_NOW_NS = 30_000_000_000
"""What becomes of an engine's requests is decided by then after its end."""
_NO_WORK = "idle_no_work"
_MOST_RINGS = 1024
"""Maximum of rings of one other user: each is an open file, of which a process has a limit."""
_MOST_NOTES = 1000
"""Maximum of lines that are said: others' folders have any number of names."""
REFUSALS = ("owner", "engines", "rings")
"""Reasons for leaving a ring out: its engine id belongs to another user, or there are too many
engines, or too many rings of its user."""


class Engines:
    """Follows the engines whose rings are in a folder.

    Attributes:
        notes: what must be said of their files, until somebody takes it.
        most: maximum number of engines.
        num_refused: rings that were left out, by reason.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sink: Sink,
        clock: Clock,
        promises: Promises | None = None,
        shard: Shard = ALL,
        most: int = MOST_ENGINES,
    ) -> None:
        """Prepare.

        Args:
            folder: of the rings.
            sink: receives what becomes final, once it counts.
            clock: the rings' own.
            promises: has requests judged.
            shard: which of the engines to follow.
            most: maximum number of engines. Those of one other user take half of it at most.
        """
        self.most = most
        self.num_refused = dict.fromkeys(REFUSALS, 0)
        self._left_out: set[Path] = set()
        self._promises = promises
        self._shard = shard
        self._folder = folder
        self._sink = sink
        self._clock = clock
        self._began_ns = clock.monotonic_ns()
        self._known = KnownRings()
        self._has_looked = False
        self._discover_ns = 0
        self._settling: dict[str, tuple[int, list[Path]]] = {}
        self._followed: dict[str, _Followed] = {}
        self._owners: dict[str, int] = {}
        """User whose rings are followed, by engine id: the first one seen."""
        self._samplers: dict[Path, int] = {}
        """Rings of what samples this host's devices, with their users. The fold of every engine
        reads those of this user and of root, that of a user's engines also the user's own."""
        self.notes: list[str] = []
        self._noted: set[str] = set()
        self._closed_ns = 0

    def __len__(self) -> int:
        return len(self._followed)

    def advance(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Look for new rings and fold what has become due, of each engine at most a bite.

        Args:
            is_over: asked after each engine; the others' turn is then the next one.

        Returns:
            Whether there is more to fold already.
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
                self._try_again()
                if self._promises is not None:
                    self._promises.forget(engine_id)
            if is_over():
                return True
        return has_more

    def promise(self, promises: Promises | None) -> None:
        """Have requests judged from now on, or no longer; what is in flight is judged as well."""
        self._promises = promises
        for engine_id, engine in self._followed.items():
            engine.judge_by(
                None
                if promises is None
                else promises.judge(engine_id, counts_from_ns=engine.through_ns)
            )

    def snapshot(self) -> Snapshot:
        """Return the view of all engines that count."""
        now_ns = self._clock.monotonic_ns()
        real_ns = self._clock.real_ns()
        views = [view for engine in self._followed.values() for view in engine.views()]
        for view in views:
            for skewed in view.health.skewed_clocks:
                self._note(skewed.in_words())
        look = Snapshot(
            now_ns, real_ns, "live", tuple(views), "", str(self._folder), guests=self._guests()
        )
        return look if self._promises is None else _with_promises(look, self._promises)

    def save(self) -> None:
        """Keep what is decided by now, for the collector after this one."""
        if self._promises is not None:
            now_ns = self._clock.monotonic_ns()
            self._promises.save(
                {
                    engine_id: engine.through_ns
                    for engine_id, engine in self._followed.items()
                    if engine.seen_ns > now_ns - _JUST_NOW_NS
                }
            )

    def through_ns(self) -> int:
        """Return up to when all engines in sight are folded."""
        folded = (engine.through_ns for engine in self._followed.values())
        return min(folded, default=self._clock.monotonic_ns())

    def seen_ns(self) -> int:
        """Return when a process of an engine was there last; 0 for never."""
        return max((engine.seen_ns for engine in self._followed.values()), default=0)

    def rings(self) -> Iterator[Path]:
        """Return the rings of all engines in sight."""
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
        self._left_out.difference_update(gone)
        for file in files:  # this user's own folder first
            identity = self._identity_of(file, is_start=is_start)
            if identity is None:
                continue
            path = file[0]
            engine_id = identity.engine_id
            owner = owner_of(path)
            if owner < 0:  # removed meanwhile
                continue
            if identity.role == SAMPLER_ROLE:
                self._samplers[path] = owner
                continue
            if not self._shard.has(engine_id):
                continue
            refusal = self._refusal(engine_id, owner)
            if refusal is not None:
                self._leave_out(path, *refusal)
                continue
            self._owners[engine_id] = owner
            self._left_out.discard(path)
            if engine_id in self._followed:
                self._followed[engine_id].add(path)
            else:
                since_ns = now_ns - _SETTLE_NS if is_start else now_ns
                self._settling.setdefault(engine_id, (since_ns, []))[1].append(path)

    def _refusal(self, engine_id: str, owner: int) -> tuple[str, str] | None:
        """Return why a ring is left out: one of REFUSALS, and a line; None where it is not."""
        known = self._owners.get(engine_id)
        if known not in (None, owner):
            return "owner", (
                f"it states engine {engine_id}, which belongs to uid {known}, and the ring to "
                f"uid {owner}"
            )
        is_guest = _is_guest(owner)
        if known is None:
            num, of_user = len(self._owners), list(self._owners.values()).count(owner)
            if num >= self.most or (is_guest and 2 * of_user >= self.most):
                return "engines", (
                    f"{num} engines are in sight, {of_user} of them of uid {owner}. max_engines is "
                    f"{self.most}, and another user has half of it at most"
                )
        if is_guest and self._num_rings(owner) >= _MOST_RINGS:
            return "rings", f"uid {owner} has {_MOST_RINGS} rings already"
        return None

    def _num_rings(self, owner: int) -> int:
        """Return how many rings of a user are followed."""
        followed = {name: engine.paths for name, engine in self._followed.items()}
        settling = {name: paths for name, (_, paths) in self._settling.items()}
        return sum(
            len(paths)
            for name, paths in (*followed.items(), *settling.items())
            if self._owners[name] == owner
        )

    def _leave_out(self, path: Path, reason: str, why: str) -> None:
        """Count a ring that is left out, once, and have it said."""
        if path not in self._left_out:
            self._left_out.add(path)
            self.num_refused[reason] += 1
            self._note(f"{path} is left out: {why}")

    def _try_again(self) -> None:
        """Look again at the rings that were left out: there is room."""
        self._known.fail_all(self._left_out)

    def _guests(self) -> dict[str, int]:
        """Return the user ids of the engines of other users than this one and root."""
        return {name: owner for name, owner in self._owners.items() if _is_guest(owner)}

    def _samplers_for(self, owner: int) -> list[Path]:
        """Return the rings of samplers that the engines of a user may be measured by."""
        return [path for path, uid in self._samplers.items() if uid == owner or not _is_guest(uid)]

    def _settle(self, now_ns: int, *, is_start: bool) -> None:
        """Begin to follow the engines whose processes have made their rings by now."""
        for engine_id, (since_ns, paths) in list(self._settling.items()):
            if now_ns - since_ns >= _SETTLE_NS:
                del self._settling[engine_id]
                self._followed[engine_id] = _Followed(
                    engine_id,
                    paths,
                    partial(self._samplers_for, self._owners[engine_id]),
                    self._sink,
                    self._clock,
                    counts_from_ns=self._began_ns if is_start else None,
                    judge=self._judge(engine_id, is_start=is_start),
                )

    def _judge(self, engine_id: str, *, is_start: bool) -> Judge | None:
        """Return who judges an engine: of one that was there before us, only what is new."""
        promises = self._promises
        if promises is None:
            return None
        counts_from_ns = promises.counts_from_ns(engine_id, self._began_ns) if is_start else 0
        return promises.judge(engine_id, counts_from_ns=counts_from_ns)

    def _is_in_use(self, path: Path, identity: Identity) -> bool:
        """Return whether a ring's follower sees to it, or another collector."""
        engine = self._followed.get(identity.engine_id)
        if engine is not None and path in engine.paths:
            return True
        return path in self._samplers or not self._shard.has(identity.engine_id)

    def _identity_of(self, file: File, *, is_start: bool) -> Identity | None:
        """Return whose ring it is; None for no new one, or where its process died before the start.

        A collector before this one may have left before that: then it is to be judged.
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
                    why = f"it states engine {identity.engine_id}, whose folder is another one"
                    self._leave_out(path, "owner", why)
                return None
            is_of_interest = is_alive or (
                self._promises is not None and self._promises.resumes(identity.engine_id)
            )
            if is_of_interest:
                return identity
            # A ring that comes into sight later, with a volume that is mounted, may be as old.
            began_ns = self._began_ns
            is_old = is_start or (identity.start_ns < began_ns and not reader.seek(began_ns))
            return None if is_old else identity
        except OSError as error:
            self._note(f"cannot read {path}: {error.strerror}")
            return None
        finally:
            reader.close()

    def _note(self, line: str) -> None:
        """Add a line to the notes, once; beyond the maximum none."""
        if line not in self._noted and len(self._noted) <= _MOST_NOTES:
            is_last = len(self._noted) == _MOST_NOTES
            self._noted.add(line)
            self.notes.append("further lines about rings are left out" if is_last else line)


class _Followed:
    """One engine in sight.

    Attributes:
        paths: its rings.
        seen_ns: when one of its processes was there last.
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
        """Begin to follow; to count from then on, or at once."""
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
            most_bytes=_BITE_BYTES,
        )
        self._takes: Sink = self._gate
        self.judge_by(judge)
        self._before: EngineView | None = None
        self._last: EngineView | None = None
        self.seen_ns = now_ns
        self._was_manned = True
        self._away_ns: dict[str, int] = {}
        """By device, how long it was nobody's."""

    def judge_by(self, judge: Judge | None) -> None:
        """Have requests judged from now on, or no longer."""
        if judge is None:
            self._takes = self._gate
            self._source.listen_with(None)
            return
        judging = self._takes = Judging(lambda _: judge, self._gate)
        judging.watch(self._source.collector)
        self._source.listen_with(judging.listen)

    def step(self, step: FinalStep) -> None:
        """Take a step from the fold."""
        self._takes.step(step)

    def request(self, request: FinalRequest) -> None:
        """Take a request from the fold."""
        self._takes.request(request)

    def add(self, path: Path) -> None:
        """Follow one more ring."""
        if path not in self.paths:
            self.paths = [*self.paths, path]
        self._source.look_again()

    def advance(self, now_ns: int) -> bool:
        """Fold what has become due, or a bite of it; begin to count when caught up.

        Returns:
            Whether there is more to fold already.
        """
        self._source.advance()
        if self._is_there:
            self.seen_ns = now_ns
        if not self._gate.is_open and self._source.collector.now_ns >= self._counts_from_ns:
            self._gate.is_open = True
            self._before = next(iter(self._look()), None)
        return self._source.has_more

    @property
    def _is_there(self) -> bool:
        """Return whether a process of it runs, or has left records that are not folded yet.

        The time of its devices is counted until then, and no longer.
        """
        source = self._source
        return (
            source.is_manned
            or source.has_more
            or any(engine.has_unfolded for engine in source.collector.engines.values())
        )

    @property
    def through_ns(self) -> int:
        """Return up to when its records are folded."""
        return self._source.collector.now_ns

    def is_forgotten(self, now_ns: int) -> bool:
        """Tell whether its last process is gone for long."""
        return now_ns - self.seen_ns > FORGET_NS

    def views(self) -> Iterator[EngineView]:
        """Return its view, nothing before it counts; of the gone, what they were."""
        if not self._gate.is_open:
            return
        is_manned = self._is_there
        for view in self._look():
            if is_manned and not self._was_manned and self._last is not None:
                self._leave_out(self._last, view)
            if is_manned or self._was_manned or self._last is None:
                self._last = view
            # The fold's time goes on. That of a device whose engine is gone is nobody's.
            devices, through_ns = self._last.devices, self._last.through_ns
            view = replace(view, is_alive=is_manned, devices=devices, through_ns=through_ns)
            if self._before is not None:
                view = since(self._before, view)
            counted = tuple(_less(one, self._away_ns.get(one.device, 0)) for one in view.devices)
            yield replace(view, devices=counted)
        self._was_manned = is_manned

    def _leave_out(self, last: EngineView, view: EngineView) -> None:
        """Note the time between an engine's end and its being started again."""
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
    """Lets final steps and requests through once they count."""

    def __init__(self, sink: Sink) -> None:
        self.is_open = False
        self._sink = sink

    def step(self, step: FinalStep) -> None:
        """Pass a step on."""
        if self.is_open:
            self._sink.step(step)

    def request(self, request: FinalRequest) -> None:
        """Pass a request on."""
        if self.is_open:
            self._sink.request(request)


def _with_promises(look: Snapshot, promises: Promises) -> Snapshot:
    """Return a view that tells what was good and bad."""
    views = tuple(
        replace(view, objectives=promises.counts(view.engine_id, view.model))
        for view in look.engines
    )
    return replace(look, engines=views, promised=promises.look(view.model for view in views))


def _less(device: DeviceTime, away_ns: int) -> DeviceTime:
    """Take time off it in which it had no work because its engine was not there."""
    spent = device.seconds_by_ns
    spent = spent | {_NO_WORK: spent[_NO_WORK] - away_ns}
    return replace(device, wall_ns=device.wall_ns - away_ns, seconds_by_ns=spent)
