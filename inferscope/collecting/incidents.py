"""What is worth a pin: a bad request, an engine that is lost or stalls, a wish."""

from __future__ import annotations

from inferscope.collecting.config import SloSettings
from inferscope.collecting.pins import Pins
from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import EngineView, Snapshot
from inferscope.ring.discovery import ALIVE_NS

_NOTICED_NS = ALIVE_NS + 3_000_000_000
"""Between the end of a process and its being given up, at most."""
_STALL_NS = 10_000_000_000
_STALL_STEPS = 10
"""No step in as long as so many long ones took, and in `_STALL_NS`, is a stall."""


class Incidents:
    """Tells pins what happened."""

    def __init__(self, pins: Pins, *, on: tuple[str, ...], slo: SloSettings) -> None:
        """Take the pins, which of INCIDENTS are kept, and the thresholds."""
        self._pins = pins
        self._on = on
        self._slo = slo
        self._silent: set[str] = set()
        self._lost: set[str] = set()
        self._noted: set[str] = set()
        """Engines whose loss was noticed before they were started again."""
        self._num_replaced: dict[str, int] = {}
        self._alive_ns: dict[str, int] = {}
        """By engine, up to when it was folded at the last look at which it was there."""
        self._moved_ns: dict[str, int] = {}
        """By engine, when it last made a step, or had nothing to make one for."""
        self._admitting: dict[str, tuple[int | None, int]] = {}
        """Engine's admissions, and when they last grew or had no reason to."""
        self._long_step_ns: dict[str, float] = {}
        self._stalled: set[str] = set()

    def change(self, *, on: tuple[str, ...], slo: SloSettings) -> None:
        """Go on with others of INCIDENTS, or other thresholds."""
        self._on, self._slo = on, slo

    def step(self, step: FinalStep) -> None:
        """Note that an engine makes steps."""
        if not step.is_dummy:
            self._moved_ns[step.engine_id] = max(
                step.end_ns, self._moved_ns.get(step.engine_id, step.end_ns)
            )

    def request(self, request: FinalRequest) -> None:
        """Judge a request by its objectives and thresholds."""
        if "breach" not in self._on:
            return
        judged = request.judged
        has_missed = judged is not None and not all(judged.results.values())
        if has_missed or (not request.joined_late and is_breach(self._slo, request)):
            self._pins.pin("breach", request.arrived_ns, request.delivered_ns)

    def look(self, snapshot: Snapshot) -> None:
        """Notice engines that stall, or went without a goodbye, even those back at once.

        What an engine does is known up to where its records are folded. A collector that is behind
        has not seen a stall, only not yet what came since.
        """
        self._look_for_stalls(snapshot)
        silent = {v.engine_id for v in snapshot.engines if not (v.is_alive or v.has_ended)}
        lost = silent & self._silent  # its goodbye may have been on its way
        replaced = {view.engine_id: view.num_replaced for view in snapshot.engines}
        back = {name for name, num in replaced.items() if num > self._num_replaced.get(name, num)}
        if (lost - self._lost or back - self._noted) and "engine_lost" in self._on:
            usual_ns = snapshot.mono_ns - _NOTICED_NS
            alive_ns = (self._alive_ns.get(name, usual_ns) for name in lost - self._lost)
            self._pins.pin("engine_lost", min([usual_ns, *alive_ns]), snapshot.mono_ns)
        self._alive_ns = {
            view.engine_id: view.folded_ns
            if view.is_alive
            else self._alive_ns.get(view.engine_id, view.folded_ns)
            for view in snapshot.engines
        }
        self._noted = ((self._noted | lost) - back) & replaced.keys()
        self._silent, self._lost, self._num_replaced = silent, lost, replaced

    def _look_for_stalls(self, snapshot: Snapshot) -> None:
        stalled = {view.engine_id for view in snapshot.engines if self._is_stalled(view)}
        new = stalled - self._stalled
        in_sight = {view.engine_id: view for view in snapshot.engines}
        if new and "stall" in self._on:
            since_ns = min(min(self._moved_ns[name], self._admitting[name][1]) for name in new)
            self._pins.pin("stall", since_ns, max(in_sight[name].folded_ns for name in new))
        self._stalled = stalled
        for noted in (self._moved_ns, self._admitting, self._long_step_ns):
            for name in noted.keys() - in_sight.keys():
                del noted[name]

    def _is_stalled(self, view: EngineView) -> bool:
        """Return whether an engine has made no step, or admitted nothing, for too long."""
        name, now_ns = view.engine_id, view.folded_ns
        if view.step.p99_ns is not None:
            self._long_step_ns[name] = view.step.p99_ns
        is_at_work = view.is_alive and view.health.probe_state == "on" and not view.is_paused
        if not is_at_work or not view.num_running:
            self._moved_ns[name] = now_ns
        admitted, since_ns = self._admitting.get(name, (None, now_ns))
        if not is_at_work or not view.num_admissible or view.num_admissions != admitted:
            since_ns = now_ns
        self._admitting[name] = (view.num_admissions, since_ns)
        quiet_ns = now_ns - min(self._moved_ns.setdefault(name, now_ns), since_ns)
        return quiet_ns > max(_STALL_NS, _STALL_STEPS * self._long_step_ns.get(name, 0.0))

    def asked(self, now_ns: int) -> None:
        """Pin the present because somebody wants it."""
        if "signal" in self._on:
            self._pins.pin("signal", now_ns, now_ns)


def is_breach(slo: SloSettings, request: FinalRequest) -> bool:
    """Tell whether a request missed a threshold: its first token, or any gap between two.

    A request that ended without a token has missed its deadline if it waited that long. An answer
    in one piece has no first token that somebody waits for, and no gaps.
    """
    if request.is_in_one_piece:
        return False
    if slo.ttft_ms is not None:
        first_ns = request.first_token_ns
        waited_ns = (request.delivered_ns if first_ns is None else first_ns) - request.arrived_ns
        if waited_ns > slo.ttft_ms * 1e6:
            return True
    if slo.tbt_ms is None:
        return False
    return request.longest_gap_ns > slo.tbt_ms * 1e6
