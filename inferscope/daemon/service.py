"""The collector's main loop: fold, publish a snapshot once a second, pin incidents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import inferscope
from inferscope.daemon.config import Config, config_hash
from inferscope.daemon.engines import Engines
from inferscope.daemon.exporter_set import ExporterSet
from inferscope.daemon.header_filter import HeaderFilter
from inferscope.daemon.incidents import Incidents
from inferscope.daemon.pins import Pins
from inferscope.daemon.slo_state import SloTracker
from inferscope.errors import BadInput, InferScopeError
from inferscope.fold import ARRIVALS_NS, CollectorInfo, FinalRequest, FinalStep
from inferscope.probe import Clock
from inferscope.records import TICK_NS

PUBLISH_NS = 1_000_000_000
_PAUSE_S = 0.1
_COPY_NS = 90_000_000
"""Interval in nanoseconds of copying records into a pin: once per turn without a backlog."""
_WAIT_NS = 60_000_000_000
"""Maximum wait in nanoseconds for engines to exit, if the collector is to outlive them."""
_CATCH_UP_NS = 1_000_000_000
"""Maximum time in nanoseconds for folding the backlog at the end."""


class ControlFlags(Protocol):
    """Requests from outside the loop, set by signal handlers."""

    wants_pin: bool
    wants_reload: bool

    @property
    def stop_requested(self) -> bool:
        """Return whether the collector is to stop."""


class Service:
    """A collector without its lock."""

    def __init__(
        self,
        config: Config,
        exporters: ExporterSet,
        *,
        clock: Clock,
        log_line: Callable[[str], None],
        read: Callable[[], Config] | None = None,
    ) -> None:
        """Store the parts and create the engines' table.

        Args:
            config: configuration.
            exporters: open exporters.
            clock: clock of the rings.
            log_line: prints a line for the operator.
            read: reads the configuration again or raises BadInput; None if it cannot change.
        """
        self._config = config
        self._read = read or (lambda: config)
        self._running = CollectorInfo(
            inferscope.__version__, config_hash(config), shard=str(config.shard)
        )
        self._clock = clock
        self._log_line = log_line
        self._exporters = exporters
        self._publish_ns = self._copy_ns = 0
        self._header_filter = HeaderFilter(config.headers)
        self._slo = self._make_slo(config)
        self._engines = Engines(
            config.rings,
            sink=self,
            clock=clock,
            slo=self._slo,
            shard=config.shard,
            most=config.max_engines,
        )
        self._pins: Pins | None = None
        self._incidents: Incidents | None = None
        self._apply_pins(config)

    def run(self, flags: ControlFlags) -> bool:
        """Collect until a stop is requested; return whether all exporters closed in time."""
        try:
            while not flags.stop_requested:
                self._fold_turn(flags, lambda: flags.stop_requested)
            if self._config.outlive_s:
                asked_ns = self._clock.monotonic_ns()
                while not self._has_outlived(asked_ns):
                    self._fold_turn(flags, lambda: False)
            self._catch_up(flags)
            self._publish()
        finally:
            if self._pins is not None:
                self._pins.close()
            self._engines.close()
            is_through = self._exporters.close()
        return is_through

    def on_step(self, step: FinalStep) -> None:
        """Take a step from the fold."""
        self._exporters.on_step(step)
        if self._incidents is not None:
            self._incidents.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Take a request from the fold."""
        self._exporters.on_request(self._header_filter.filtered(request))
        if self._incidents is not None:
            self._incidents.on_request(request)

    def _fold_turn(self, flags: ControlFlags, is_over: Callable[[], bool]) -> None:
        """Fold one turn and publish a snapshot if one is due, also between two engines."""

        def check_due() -> bool:
            self._publish_if_due()
            return is_over()

        has_more = self._turn(flags, check_due)
        self._publish_if_due()
        if not has_more:
            time.sleep(_PAUSE_S)

    def _publish_if_due(self) -> None:
        self._copy_if_due()
        if self._clock.monotonic_ns() >= self._publish_ns:
            self._publish_ns = self._clock.monotonic_ns() + PUBLISH_NS
            self._publish()

    def _has_outlived(self, asked_ns: int) -> bool:
        """Return whether `outlive_s` has passed since the last engine, or the wait is over."""
        now_ns, outlive_ns = self._clock.monotonic_ns(), round(self._config.outlive_s * 1e9)
        return (
            now_ns - self._engines.seen_ns() >= outlive_ns
            or now_ns - asked_ns >= _WAIT_NS + outlive_ns
        )

    def _catch_up(self, flags: ControlFlags) -> None:
        """Fold until every record written before now is final, for at most `_CATCH_UP_NS`.

        The fold trails the rings by `ARRIVALS_NS` and holds the last step back for its tokens.
        """
        now_ns = self._clock.monotonic_ns()
        until_ns = now_ns + ARRIVALS_NS + TICK_NS

        def is_late() -> bool:
            return self._clock.monotonic_ns() - now_ns >= _CATCH_UP_NS

        while True:
            has_more = self._turn(flags, is_late)
            if is_late() or self._engines.through_ns() >= until_ns:
                return
            if not has_more:
                time.sleep(_PAUSE_S / 4)

    def _turn(self, flags: ControlFlags, is_over: Callable[[], bool]) -> bool:
        """Fold one turn and serve requests from outside; return whether more records are ready."""
        has_more = self._engines.advance(is_over)
        notes, self._engines.notes = self._engines.notes, []
        for note in notes:
            self._log_line(note)
        if flags.wants_pin:
            flags.wants_pin = False
            if self._incidents is None:
                self._log_line("SIGUSR1 ignored: pins are off")
            else:
                self._incidents.pin_now(self._clock.monotonic_ns())
        if flags.wants_reload and not flags.stop_requested:
            flags.wants_reload = False
            self._reload()
        self._copy_if_due()
        return has_more

    def _copy_if_due(self) -> None:
        """Copy records into the open pin if due: rings can wrap during long turns."""
        if self._pins is not None and self._clock.monotonic_ns() >= self._copy_ns:
            self._pins.advance()
            self._copy_ns = self._clock.monotonic_ns() + _COPY_NS

    def _reload(self) -> None:
        """Reload the configuration; an invalid one changes nothing."""
        try:
            config = self._read()
            if config.rings != self._config.rings:
                raise BadInput(
                    f"rings changed to {config.rings}, but {self._config.rings} is followed. "
                    "Start another collector for the new directory."
                )
            if config.folder != self._config.folder:
                raise BadInput(
                    f"folder changed to {config.folder}, but {self._config.folder} is in use. "
                    "Restart the collector to use the new one."
                )
            if config.shard != self._config.shard:
                raise BadInput(
                    f"shard changed to {config.shard}, but {self._config.shard} is collected. "
                    "Restart all shards of the host to change their number."
                )
            self._exporters.change(config.exporters)
        except InferScopeError as error:
            refused = self._running.num_reloads_refused + 1
            self._running = replace(self._running, num_reloads_refused=refused)
            self._log_line(f"reload failed, the configuration is unchanged: {error}")
            return
        if config.counters != self._config.counters:
            self._log_line("the change of counters takes effect when the collector restarts")
        self._header_filter = HeaderFilter(config.headers)
        self._set_objectives(config)
        self._apply_pins(config)
        self._engines.most = config.max_engines
        self._config = config
        digits = config_hash(config)
        what = "unchanged" if digits == self._running.config_hash else digits
        self._log_line(f"configuration reloaded: {what}")
        num = self._running.num_reloads + 1
        self._running = replace(self._running, config_hash=digits, num_reloads=num)

    def _make_slo(self, config: Config) -> SloTracker | None:
        """Return the SLO state of a configuration; None without objectives."""
        if config.slo.objectives is None:
            return None
        return SloTracker(
            config.slo.objectives, config.state, clock=self._clock, log_line=self._log_line
        )

    def _set_objectives(self, config: Config) -> None:
        """Apply the objectives of a reloaded configuration."""
        objectives = config.slo.objectives
        if self._slo is not None and objectives is not None:
            self._slo.change(objectives, config.state)
        elif self._slo is not None or objectives is not None:
            self._slo = self._make_slo(config)
            self._engines.set_slo(self._slo)

    def _apply_pins(self, config: Config) -> None:
        """Apply the pin settings of a configuration."""
        settings = config.own_pins
        if settings is None:
            if self._pins is not None:
                self._pins.close()
            self._pins = self._incidents = None
        elif self._pins is None or self._incidents is None:
            self._pins = Pins(
                settings,
                self._engines.rings,
                clock=self._clock,
                log_line=self._log_line,
                folded_ns=self._engines.through_ns,
            )
            self._incidents = Incidents(self._pins, on=settings.on, slo=config.slo)
        else:
            self._pins.change(settings)
            self._incidents.change(on=settings.on, slo=config.slo)

    def _publish(self) -> None:
        """Save the SLO state and pass a snapshot to incidents and exporters."""
        running = replace(self._running, num_refused=dict(self._engines.num_refused))
        snapshot = replace(self._engines.snapshot(), running=running)
        self._engines.save()  # first: everything that a scrape can see has been saved
        if self._incidents is not None:
            self._incidents.on_snapshot(snapshot)
        self._exporters.on_snapshot(snapshot)
