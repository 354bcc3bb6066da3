"""Detection of incidents to pin: a missed objective, a lost or stalled engine, a signal."""

from __future__ import annotations

from inferscope.daemon.config import SloSettings
from inferscope.daemon.pins import Pins
from inferscope.fold import EngineView, FinalRequest, FinalStep, Snapshot
from inferscope.ring import ALIVE_NS

_NOTICED_NS = ALIVE_NS + 3_000_000_000
"""Maximum nanoseconds between the end of a process and its being reported lost."""
_STALL_NS = 10_000_000_000
_STALL_STEPS = 10
"""A stall is a time without steps longer than `_STALL_NS` and than this many p99 steps."""


class Incidents:
    """Detector of incidents, which pins them."""

    def __init__(self, pins: Pins, *, on: tuple[str, ...], slo: SloSettings) -> None:
        """Store the pins, the enabled members of INCIDENTS, and the thresholds."""
        self._pins = pins
        self._on = on
        self._slo = slo
        self._silent: set[str] = set()
        self._lost: set[str] = set()
        self._known_losses: set[str] = set()
        """Engines whose loss was detected before their restart."""
        self._num_replaced: dict[str, int] = {}
        self._alive_ns: dict[str, int] = {}
        """Time through which each engine was folded at the last snapshot in which it was alive."""
        self._moved_ns: dict[str, int] = {}
        """Time of each engine's last step, or at which it last had no request to run."""
        self._admitting: dict[str, tuple[int | None, int]] = {}
        """Each engine's admissions, and the last time they grew or none was due."""
        self._long_step_ns: dict[str, float] = {}
        self._stalled: set[str] = set()

    def change(self, *, on: tuple[str, ...], slo: SloSettings) -> None:
        """Set the enabled members of INCIDENTS and the thresholds."""
        self._on, self._slo = on, slo

    def on_step(self, step: FinalStep) -> None:
        """Record the time of an engine's step."""
        if not step.is_dummy:
            self._moved_ns[step.engine_id] = max(
                step.end_ns, self._moved_ns.get(step.engine_id, step.end_ns)
            )

    def on_request(self, request: FinalRequest) -> None:
        """Pin a request that missed an objective or a threshold."""
        if "breach" not in self._on:
            return
        judged = request.judged
        has_missed = judged is not None and not all(judged.results.values())
        if has_missed or (not request.joined_late and is_breach(self._slo, request)):
            self._pins.pin("breach", request.arrived_ns, request.delivered_ns)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Detect engines that stalled or were lost, including those restarted at once.

        All times are those through which an engine is folded, so that a collector with a backlog
        does not mistake its own delay for a stall.
        """
        self._look_for_stalls(snapshot)
        silent = {v.engine_id for v in snapshot.engines if not (v.is_alive or v.has_ended)}
        lost = silent & self._silent  # for two snapshots: its shutdown record may arrive late
        replaced = {view.engine_id: view.num_replaced for view in snapshot.engines}
        back = {name for name, num in replaced.items() if num > self._num_replaced.get(name, num)}
        if (lost - self._lost or back - self._known_losses) and "engine_lost" in self._on:
            usual_ns = snapshot.mono_ns - _NOTICED_NS
            alive_ns = (self._alive_ns.get(name, usual_ns) for name in lost - self._lost)
            self._pins.pin("engine_lost", min([usual_ns, *alive_ns]), snapshot.mono_ns)
        self._alive_ns = {
            view.engine_id: view.folded_ns
            if view.is_alive
            else self._alive_ns.get(view.engine_id, view.folded_ns)
            for view in snapshot.engines
        }
        self._known_losses = ((self._known_losses | lost) - back) & replaced.keys()
        self._silent, self._lost, self._num_replaced = silent, lost, replaced

    def _look_for_stalls(self, snapshot: Snapshot) -> None:
        stalled = {view.engine_id for view in snapshot.engines if self._update_stall(view)}
        new = stalled - self._stalled
        tracked = {view.engine_id: view for view in snapshot.engines}
        if new and "stall" in self._on:
            since_ns = min(min(self._moved_ns[name], self._admitting[name][1]) for name in new)
            self._pins.pin("stall", since_ns, max(tracked[name].folded_ns for name in new))
        self._stalled = stalled
        for noted in (self._moved_ns, self._admitting, self._long_step_ns):
            for name in noted.keys() - tracked.keys():
                del noted[name]

    def _update_stall(self, view: EngineView) -> bool:
        """Update an engine's progress; return whether steps or admissions have stalled."""
        name, now_ns = view.engine_id, view.folded_ns
        if view.step.p99_ns is not None:
            self._long_step_ns[name] = view.step.p99_ns
        is_active = view.is_alive and view.health.probe_state == "on" and not view.is_paused
        if not is_active or not view.num_running:
            self._moved_ns[name] = now_ns
        admitted, since_ns = self._admitting.get(name, (None, now_ns))
        if not is_active or not view.num_admissible or view.num_admissions != admitted:
            since_ns = now_ns
        self._admitting[name] = (view.num_admissions, since_ns)
        quiet_ns = now_ns - min(self._moved_ns.setdefault(name, now_ns), since_ns)
        return quiet_ns > max(_STALL_NS, _STALL_STEPS * self._long_step_ns.get(name, 0.0))

    def pin_now(self, now_ns: int) -> None:
        """Pin the present on a signal."""
        if "signal" in self._on:
            self._pins.pin("signal", now_ns, now_ns)


def is_breach(slo: SloSettings, request: FinalRequest) -> bool:
    """Return whether a request's TTFT or any of its token gaps exceeded a threshold.

    A request that ended without a token is a breach if it waited longer than the TTFT threshold.
    A response sent in one piece has neither TTFT nor gaps.
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
