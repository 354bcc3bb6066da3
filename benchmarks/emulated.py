"""The reference engine in emulated time: its loop, scheduler, cache and probe, without a model.

Import this module before any of `inferscope`: it replaces the process's clocks by one that moves
only when a step runs or the load waits. A run of 30 seconds then takes about two, and other
processes of the machine cannot disturb it. The time of a step comes from a formula:

    step = speed of the moment · (launch + tokens · per token + attention · per token and context)

The speed varies slowly, as that of a machine that is shared, and each step has noise of its own and
now and then a stall.
"""

from __future__ import annotations

import time

_START_NS = time.monotonic_ns()


class EmulatedClock:
    """Clock that moves only when a caller advances it."""

    def __init__(self) -> None:
        self.now_ns = _START_NS
        self._real_offset_ns = time.time_ns() - _START_NS

    def monotonic_ns(self) -> int:
        """Return the emulated monotonic time."""
        return self.now_ns

    def time_ns(self) -> int:
        """Return the emulated wall time."""
        return self.now_ns + self._real_offset_ns

    def sleep_until(self, at_ns: int) -> None:
        """Move to a time, unless it has passed."""
        self.now_ns = max(self.now_ns, at_ns)


CLOCK = EmulatedClock()
time.monotonic_ns = CLOCK.monotonic_ns
time.time_ns = CLOCK.time_ns

import math  # noqa: E402 - the clocks above come first
from dataclasses import dataclass, replace  # noqa: E402
from random import Random  # noqa: E402

from inferscope.engine.runner import Collect  # noqa: E402
from inferscope.engine.scheduler import Plan  # noqa: E402
from inferscope.probe import Probe  # noqa: E402

_TOKEN = 7
_HOST_NS = 150_000
"""Time of the host between two steps."""


@dataclass(frozen=True)
class Machine:
    """Speed of an emulated machine.

    Attributes:
        launch_ms: time of a step without tokens.
        token_ms: time of each of its tokens.
        attention_us: time of each token for each thousand tokens of its context.
        factor: factor of all steps.
        swing: standard deviation of the speed's logarithm, which varies over seconds.
        noise: that of each step alone.
        stall_chance: probability that a step stalls, for 5 to 30 ms.
    """

    launch_ms: float = 1.5
    token_ms: float = 0.12
    attention_us: float = 20.0
    factor: float = 1.0
    swing: float = 0.04
    noise: float = 0.05
    stall_chance: float = 0.003


_SWING_S = 1.5
"""Time after which a third of a swing is left."""


class EmulatedRunner:
    """Runner of steps that take their time on the emulated clock, and compute nothing."""

    is_asynchronous = False

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine = machine
        self._random = Random(seed)
        self._swing = self._random.gauss(0, machine.swing)
        self._swung_ns = CLOCK.now_ns

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Run a step."""
        probe.start(step)
        CLOCK.now_ns += self._step_ns(plan)
        probe.stop(step)
        CLOCK.now_ns += _HOST_NS
        sampled = [part for part in plan.slices if part.is_sampled]
        return lambda: (sampled, [[_TOKEN] for _ in sampled])

    def close(self) -> None:
        """Do nothing."""

    def _step_ns(self, plan: Plan) -> int:
        machine, draw = self._machine, self._random
        tokens = sum(part.num_tokens for part in plan.slices)
        attention = sum(
            part.num_tokens * (part.context + part.num_tokens / 2) for part in plan.slices
        )
        took_ms = machine.launch_ms + tokens * machine.token_ms
        took_ms += attention * machine.attention_us / 1e6
        left = math.exp(-(CLOCK.now_ns - self._swung_ns) / 1e9 / _SWING_S)
        self._swung_ns = CLOCK.now_ns
        self._swing = left * self._swing + draw.gauss(0, machine.swing * (1 - left**2) ** 0.5)
        took_ms *= machine.factor * math.exp(self._swing + draw.gauss(0, machine.noise))
        if draw.random() < machine.stall_chance:
            took_ms += draw.uniform(5, 30)
        return round(took_ms * 1e6)


def slowed(machine: Machine, factor: float) -> Machine:
    """Return a machine whose steps take `factor` times as long."""
    return replace(machine, factor=machine.factor * factor)
