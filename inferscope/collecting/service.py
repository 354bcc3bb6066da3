"""The collector's loop: fold, look once a second, keep incidents, until somebody asks it to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from inferscope.collecting.config import Config
from inferscope.collecting.engines import Engines
from inferscope.collecting.incidents import Incidents
from inferscope.collecting.outlets import Outlets
from inferscope.collecting.pins import Pins
from inferscope.collecting.promises import STATE, Promises
from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.probe.clock import Clock

LOOK_NS = 1_000_000_000
_PAUSE_S = 0.1
_WAIT_NS = 60_000_000_000
"""For engines to end, at most, where it is to outlive them."""
_CATCH_UP_NS = 1_000_000_000
"""At the end, at most; a step under way is waited for half as long."""


class Wishes(Protocol):
    """What somebody outside wants; set by signals."""

    wants_pin: bool

    @property
    def is_asked(self) -> bool:
        """Tell whether it is to end."""


class Service:
    """Everything a collector does, but for being the only one."""

    def __init__(
        self, config: Config, outlets: Outlets, *, clock: Clock, say: Callable[[str], None]
    ) -> None:
        """Take the configuration, exporters that are open, and what prints a line."""
        self._clock = clock
        self._say = say
        self._outlets = outlets
        self._look_ns = 0
        self._outlive_ns = round(config.outlive_s * 1e9)
        promises = None
        if config.slo.objectives is not None:
            state = config.slo.state or config.rings / STATE
            promises = Promises(config.slo.objectives, state, clock=clock, say=say)
        self._engines = Engines(config.rings, sink=self, clock=clock, promises=promises)
        self._pins: Pins | None = None
        self._incidents: Incidents | None = None
        if config.pins is not None:
            self._pins = Pins(config.pins, self._engines.rings, clock=clock, say=say)
            self._incidents = Incidents(self._pins, on=config.pins.on, slo=config.slo)

    def run(self, wishes: Wishes) -> bool:
        """Collect until asked to end; tell whether all exporters came to an end."""
        try:
            while not wishes.is_asked:
                self._go_on(wishes)
            if self._outlive_ns:
                asked_ns = self._clock.monotonic_ns()
                while not self._has_outlived(asked_ns):
                    self._go_on(wishes)
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
        self._outlets.request(request)
        if self._incidents is not None:
            self._incidents.request(request)

    def _go_on(self, wishes: Wishes) -> None:
        """Fold, and look if it is time to."""
        self._turn(wishes)
        if self._clock.monotonic_ns() >= self._look_ns:
            self._look_ns = self._clock.monotonic_ns() + LOOK_NS
            self._look()
        time.sleep(_PAUSE_S)

    def _has_outlived(self, asked_ns: int) -> bool:
        """Tell whether the engines are gone for long enough, or do not go."""
        now_ns = self._clock.monotonic_ns()
        return (
            now_ns - self._engines.seen_ns() >= self._outlive_ns
            or now_ns - asked_ns >= _WAIT_NS + self._outlive_ns
        )

    def _catch_up(self, wishes: Wishes) -> None:
        """Go on until all that was said before now is folded: the fold stays behind the rings."""
        now_ns = self._clock.monotonic_ns()
        while True:
            self._turn(wishes)
            is_late = self._clock.monotonic_ns() - now_ns >= _CATCH_UP_NS
            if is_late or self._engines.through_ns() >= now_ns:
                return
            time.sleep(_PAUSE_S / 4)

    def _turn(self, wishes: Wishes) -> None:
        self._engines.advance()
        notes, self._engines.notes = self._engines.notes, []
        for note in notes:
            self._say(note)
        if wishes.wants_pin:
            wishes.wants_pin = False
            if self._incidents is None:
                self._say("nothing is pinned: pins are off")
            else:
                self._incidents.asked(self._clock.monotonic_ns())
        if self._pins is not None:
            self._pins.advance()

    def _look(self) -> None:
        snapshot = self._engines.snapshot()
        self._engines.save()  # first: whatever is seen of this look is kept
        if self._incidents is not None:
            self._incidents.look(snapshot)
        self._outlets.look(snapshot)
