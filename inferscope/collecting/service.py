"""The collector's loop: fold, look once a second, keep incidents, until somebody asks it to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import inferscope
from inferscope.collecting.config import Config, config_hash
from inferscope.collecting.engines import Engines
from inferscope.collecting.incidents import Incidents
from inferscope.collecting.noted import Noted
from inferscope.collecting.outlets import Outlets
from inferscope.collecting.pins import Pins
from inferscope.collecting.promises import Promises
from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.joins import ARRIVALS_NS
from inferscope.collector.snapshot import Running
from inferscope.errors import BadInput, InferScopeError
from inferscope.probe.clock import Clock
from inferscope.records import TICK_NS

LOOK_NS = 1_000_000_000
_PAUSE_S = 0.1
_COPY_NS = 90_000_000
"""Between two pieces of a pin: once in a turn of a collector that is not behind."""
_WAIT_NS = 60_000_000_000
"""For engines to end, at most, where it is to outlive them."""
_CATCH_UP_NS = 1_000_000_000
"""At the end, at most; a step under way is waited for half as long."""


class Wishes(Protocol):
    """What somebody outside wants; set by signals."""

    wants_pin: bool
    wants_reload: bool

    @property
    def is_asked(self) -> bool:
        """Tell whether it is to end."""


class Service:
    """Everything a collector does, but for being the only one."""

    def __init__(
        self,
        config: Config,
        outlets: Outlets,
        *,
        clock: Clock,
        say: Callable[[str], None],
        read: Callable[[], Config] | None = None,
    ) -> None:
        """Take all that it works with.

        Args:
            config: what it is told.
            outlets: exporters, open.
            clock: the rings' own.
            say: prints a line.
            read: reads the configuration again, or raises BadInput; None where it stays.
        """
        self._config = config
        self._read = read or (lambda: config)
        self._running = Running(
            inferscope.__version__, config_hash(config), shard=str(config.shard)
        )
        self._clock = clock
        self._say = say
        self._outlets = outlets
        self._look_ns = self._copy_ns = 0
        self._noted = Noted(config.headers)
        self._promises = self._promised(config)
        self._engines = Engines(
            config.rings,
            sink=self,
            clock=clock,
            promises=self._promises,
            shard=config.shard,
            most=config.max_engines,
        )
        self._pins: Pins | None = None
        self._incidents: Incidents | None = None
        self._watch_for_incidents(config)

    def run(self, wishes: Wishes) -> bool:
        """Collect until asked to end; tell whether all exporters came to an end."""
        try:
            while not wishes.is_asked:
                self._go_on(wishes, lambda: wishes.is_asked)
            if self._config.outlive_s:
                asked_ns = self._clock.monotonic_ns()
                while not self._has_outlived(asked_ns):
                    self._go_on(wishes, lambda: False)
            self._catch_up(wishes)
            self._look()
        finally:
            if self._pins is not None:
                self._pins.close()
            self._engines.close()
            is_through = self._outlets.close()
        return is_through

    def step(self, step: FinalStep) -> None:
        """Take a step from the fold."""
        self._outlets.step(step)
        if self._incidents is not None:
            self._incidents.step(step)

    def request(self, request: FinalRequest) -> None:
        """Take a request from the fold."""
        self._outlets.request(self._noted.told(request))
        if self._incidents is not None:
            self._incidents.request(request)

    def _go_on(self, wishes: Wishes, is_over: Callable[[], bool]) -> None:
        """Fold, and look if it is time to: between two engines where all of them take longer."""

        def look() -> bool:
            self._look_if_due()
            return is_over()

        has_more = self._turn(wishes, look)
        self._look_if_due()
        if not has_more:
            time.sleep(_PAUSE_S)

    def _look_if_due(self) -> None:
        self._copy_if_due()
        if self._clock.monotonic_ns() >= self._look_ns:
            self._look_ns = self._clock.monotonic_ns() + LOOK_NS
            self._look()

    def _has_outlived(self, asked_ns: int) -> bool:
        """Tell whether the engines are gone for long enough, or do not go."""
        now_ns, outlive_ns = self._clock.monotonic_ns(), round(self._config.outlive_s * 1e9)
        return (
            now_ns - self._engines.seen_ns() >= outlive_ns
            or now_ns - asked_ns >= _WAIT_NS + outlive_ns
        )

    def _catch_up(self, wishes: Wishes) -> None:
        """Go on until all that was written before now is folded and final.

        The fold stays behind the rings, and a step behind what it has read.
        """
        now_ns = self._clock.monotonic_ns()
        until_ns = now_ns + ARRIVALS_NS + TICK_NS

        def is_late() -> bool:
            return self._clock.monotonic_ns() - now_ns >= _CATCH_UP_NS

        while True:
            has_more = self._turn(wishes, is_late)
            if is_late() or self._engines.through_ns() >= until_ns:
                return
            if not has_more:
                time.sleep(_PAUSE_S / 4)

    def _turn(self, wishes: Wishes, is_over: Callable[[], bool]) -> bool:
        """Fold what is due, or a bite of it; tell whether there is more."""
        has_more = self._engines.advance(is_over)
        notes, self._engines.notes = self._engines.notes, []
        for note in notes:
            self._say(note)
        if wishes.wants_pin:
            wishes.wants_pin = False
            if self._incidents is None:
                self._say("nothing is pinned: pins are off")
            else:
                self._incidents.asked(self._clock.monotonic_ns())
        if wishes.wants_reload and not wishes.is_asked:
            wishes.wants_reload = False
            self._reload()
        self._copy_if_due()
        return has_more

    def _copy_if_due(self) -> None:
        """Let pins go on: where engines' turns take long, their rings turn over meanwhile."""
        if self._pins is not None and self._clock.monotonic_ns() >= self._copy_ns:
            self._pins.advance()
            self._copy_ns = self._clock.monotonic_ns() + _COPY_NS

    # --- the configuration, at the start and when it is read again ------------------------------

    def _reload(self) -> None:
        """Read the configuration again; one that cannot be used changes nothing."""
        try:
            config = self._read()
            if config.rings != self._config.rings:
                raise BadInput(
                    f"rings is {config.rings}, and {self._config.rings} is followed. "
                    "Start a collector for those."
                )
            if config.folder != self._config.folder:
                raise BadInput(
                    f"folder is {config.folder}, and {self._config.folder} is in use. "
                    "Restart the collector to use another one."
                )
            if config.shard != self._config.shard:
                raise BadInput(
                    f"shard is {config.shard}, and {self._config.shard} is collected. "
                    "Start all of a host's shards anew to divide it in another way."
                )
            self._outlets.change(config.exporters)
        except InferScopeError as error:
            refused = self._running.num_reloads_refused + 1
            self._running = replace(self._running, num_reloads_refused=refused)
            self._say(f"the configuration stays as it was: {error}")
            return
        if config.counters != self._config.counters:
            self._say("counters stay as they were until the collector is started again")
        self._noted = Noted(config.headers)
        self._promise(config)
        self._watch_for_incidents(config)
        self._engines.most = config.max_engines
        self._config = config
        told = config_hash(config)
        what = "the same as before" if told == self._running.config_hash else told
        self._say(f"the configuration is read again: {what}")
        num = self._running.num_reloads + 1
        self._running = replace(self._running, config_hash=told, num_reloads=num)

    def _promised(self, config: Config) -> Promises | None:
        """Return what keeps the objectives' budgets; None where there are no objectives."""
        if config.slo.objectives is None:
            return None
        return Promises(config.slo.objectives, config.state, clock=self._clock, say=self._say)

    def _promise(self, config: Config) -> None:
        """Judge by the objectives of a configuration from now on."""
        objectives = config.slo.objectives
        if self._promises is not None and objectives is not None:
            self._promises.change(objectives, config.state)
        elif self._promises is not None or objectives is not None:
            self._promises = self._promised(config)
            self._engines.promise(self._promises)

    def _watch_for_incidents(self, config: Config) -> None:
        """Pin what a configuration wants to be pinned."""
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
                say=self._say,
                folded_ns=self._engines.through_ns,
            )
            self._incidents = Incidents(self._pins, on=settings.on, slo=config.slo)
        else:
            self._pins.change(settings)
            self._incidents.change(on=settings.on, slo=config.slo)

    # --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        running = replace(self._running, num_refused=dict(self._engines.num_refused))
        snapshot = replace(self._engines.snapshot(), running=running)
        self._engines.save()  # first: whatever is seen of this look is kept
        if self._incidents is not None:
            self._incidents.look(snapshot)
        self._outlets.look(snapshot)
