"""Random hours of traffic with at most one incident each, for `alert_trust.py`.

A scenario is a log of requests, of one model on some engines, and what a collector that looks at it
says. From the log it is known to the second what was bad when; Prometheus sees scrapes of counters.

    quiet      all is well, at many rates; now and then a blip of seconds, and as many bad requests
               as the budget allows for
    breach     a share of the requests misses its first token's deadline, for a while
    overload   more comes than is served; a queue grows, and is worked off
    kill       an engine dies with requests in flight, and another takes its place
    hang       an engine makes no step, with requests in flight, and goes on
    unseen     the collector is stuck, slow, or away
    livelock   an engine admits nothing, while what it runs is finished, and goes on
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""Seconds since the scenario's start, in order."""
Kind = Literal["quiet", "breach", "overload", "kill", "hang", "unseen", "livelock"]
KINDS: tuple[Kind, ...] = ("quiet", "breach", "overload", "kill", "hang", "unseen", "livelock")

HOUR_S = 3600.0
TTFT_S = 0.5
"""Threshold of the objective, in seconds."""
SETTLE_S, LOST_S, FOLD_S = 0.5, 5.0, 1.0
"""Seconds from a deadline to a bad request, to detection of a loss, and to a snapshot."""
STEPS_PER_S = 25.0
RESTART_S = 60.0
"""Seconds from an engine's crash to its replacement."""
_RATES_S = (0.02, 0.1, 0.3, 1.0, 5.0, 20.0)
_BUSY_RATES_S = (0.3, 1.0, 5.0, 20.0)
_MINUTES = (5.0, 10.0, 20.0, 45.0, 90.0)
_LIT_S, _TAIL_S = 300.0, 1.5 * HOUR_S
_UNEVEN = 0.2
"""Relative deviation of the five-minute rates."""


@dataclass
class Engine:
    """One engine's log of actual events, independent of their observation."""

    name: str
    born_s: float
    dead_s: float
    start_s: Times
    """Start times of the requests; `end_s` matches it and is thus unordered."""
    end_s: Times
    hung_s: tuple[float, float] | None = None
    stuck_s: tuple[float, float] | None = None
    """Interval without admissions."""
    admitted_s: Times | None = None
    """Admission times of the requests in `start_s`; None if each is admitted on arrival."""
    decided_s: dict[tuple[str, str], Times] = field(default_factory=dict)
    """Decision times of good and bad requests, by objective and result."""

    def decide(self, first_s: Times) -> None:
        """Judge the requests by their first-token times, as `inferscope.slo.judge` does."""
        start_s, end_s = self.start_s, self.end_s
        is_late = first_s - start_s > TTFT_S
        is_lost = end_s >= self.dead_s
        # A request lost before its deadline is not counted; a token in time counts as good.
        is_known = ~is_lost | (start_s + TTFT_S < self.dead_s)
        over_s = np.where(is_lost, self.dead_s + LOST_S, end_s)
        found = {
            ("ttft", "bad"): (start_s + TTFT_S + SETTLE_S)[is_late & is_known],
            ("ttft", "good"): over_s[~is_late & is_known],
            ("availability", "bad"): over_s[is_lost],
            ("availability", "good"): over_s[~is_lost],
        }
        self.decided_s = {of: np.sort(times) for of, times in found.items()}
        self.end_s = np.minimum(end_s, self.dead_s)

    @property
    def run_s(self) -> Times:
        """Return the start times of running, or end times of requests that never ran."""
        return self.start_s if self.admitted_s is None else np.minimum(self.admitted_s, self.end_s)

    def num_admitted(self, at_s: Times) -> NDArray[np.int64]:
        """Return the number of requests admitted so far."""
        return np.searchsorted(np.sort(self.run_s), at_s, side="right")

    def num_running(self, at_s: Times) -> NDArray[np.int64]:
        """Return the number of admitted, unfinished requests."""
        ended = np.searchsorted(np.sort(self.end_s), at_s, side="right")
        return self.num_admitted(at_s) - ended

    def num_admissible(self, at_s: Times) -> NDArray[np.int64]:
        """Return the number of queued requests that no scarce resource blocks."""
        if self.stuck_s is None:
            return np.zeros(len(at_s), dtype=np.int64)
        from_s, to_s = self.stuck_s
        arrived = np.searchsorted(self.start_s, at_s, side="right")
        is_stuck = (at_s >= from_s) & (at_s < to_s)
        return np.where(is_stuck, arrived - self.num_admitted(at_s), 0)

    def num_steps(self, at_s: Times) -> Times:
        """Return the number of steps so far; steps run while requests are in flight."""
        edges_s = np.concatenate((self.run_s, self.end_s))
        change = np.concatenate((np.ones(len(self.start_s)), -np.ones(len(self.end_s))))
        order = np.argsort(edges_s, kind="stable")
        edges_s, change = edges_s[order], change[order]
        if not len(edges_s):
            return np.zeros_like(at_s)
        is_busy = np.cumsum(change)[:-1] > 0
        busy_s = np.concatenate(([0.0], np.cumsum(np.diff(edges_s) * is_busy)))

        def until(times: Times) -> Times:
            return np.interp(times, edges_s, busy_s)

        spent_s = until(at_s)
        if self.hung_s is not None:
            from_s, to_s = self.hung_s
            spent_s = spent_s - (until(np.clip(at_s, from_s, to_s)) - until(np.array([from_s])))
        return np.floor(spent_s * STEPS_PER_S)


@dataclass(frozen=True)
class Scenario:
    """Actual events of an hour, and the faults applied.

    Attributes:
        incident_s: start and end of the incident; None without one.
        seen_s: watermark of the collector per second; NaN while it did not run.
        back_s: restart times of a collector, with counters at zero.
        words: description of the random choices.
    """

    kind: Kind
    seed: int
    length_s: float
    engines: tuple[Engine, ...]
    incident_s: tuple[float, float] | None
    seen_s: Times
    back_s: float | None = None
    words: dict[str, float | str] = field(default_factory=dict)

    def decided(self, slo: str, result: str) -> Times:
        """Return the times of such decisions over all engines."""
        return np.sort(np.concatenate([e.decided_s[slo, result] for e in self.engines]))


def scenario(kind: Kind, seed: int) -> Scenario:
    """Draw one scenario of a kind."""
    draw = np.random.default_rng([KINDS.index(kind), seed])
    return {
        "quiet": _quiet,
        "breach": _breach,
        "overload": _overload,
        "kill": _kill,
        "hang": _hang,
        "unseen": _unseen,
        "livelock": _livelock,
    }[kind](draw, seed)


def _quiet(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s, num = float(draw.choice(_RATES_S)), int(draw.choice((1, 3)))
    bad_share = float(draw.choice((0.0, 0.002, 0.005, 0.009)))
    blip_s = float(draw.choice((0.0, 10.0, 20.0)))
    length_s = 8 * HOUR_S
    engines = []
    for engine in _arrivals(draw, rate_s, num, length_s):
        is_blip = np.mod(engine.start_s, HOUR_S) > HOUR_S - blip_s
        is_late = (draw.random(len(is_blip)) < bad_share) | is_blip
        engine.decide(_first_tokens(draw, engine, is_late))
        engines.append(engine)
    words: dict[str, float | str] = {"rate_s": rate_s, "bad_share": bad_share, "blip_s": blip_s}
    return Scenario("quiet", seed, length_s, tuple(engines), None, _seen(length_s), words=words)


def _breach(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s, num = float(draw.choice(_BUSY_RATES_S)), int(draw.choice((1, 3)))
    bad_share = float(draw.choice((0.05, 0.1, 0.2, 0.5, 1.0)))
    at_s, length_s = _when(draw, draw.choice(_MINUTES))
    engines = []
    for engine in _arrivals(draw, rate_s, num, length_s):
        is_in = (engine.start_s >= at_s[0]) & (engine.start_s < at_s[1])
        share = np.where(is_in, bad_share, 0.001)
        engine.decide(_first_tokens(draw, engine, draw.random(len(share)) < share))
        engines.append(engine)
    words: dict[str, float | str] = {"rate_s": rate_s, "bad_share": bad_share}
    return Scenario("breach", seed, length_s, tuple(engines), at_s, _seen(length_s), words=words)


def _overload(draw: np.random.Generator, seed: int) -> Scenario:
    slots, service_s = int(draw.choice((16, 48))), 4.0
    fair_s = slots / service_s
    usual, times = float(draw.uniform(0.3, 0.5)), float(draw.uniform(1.0, 2.0))
    at_s, length_s = _when(draw, draw.choice(_MINUTES))
    (engine,) = _arrivals(draw, usual * fair_s, 1, length_s)
    more = _poisson(draw, (times - usual) * fair_s, *at_s)
    engine.start_s = np.sort(np.concatenate((engine.start_s, more)))
    took_s = service_s * draw.lognormal(-0.125, 0.5, len(engine.start_s))
    free_s = [0.0] * slots
    admitted_s = np.empty(len(took_s))
    for number, (start_s, one_s) in enumerate(zip(engine.start_s, took_s, strict=True)):
        admitted_s[number] = max(start_s, heapq.heappop(free_s))
        heapq.heappush(free_s, admitted_s[number] + one_s)
    engine.admitted_s, engine.end_s = admitted_s, admitted_s + took_s
    engine.decide(admitted_s + 0.1)
    words: dict[str, float | str] = {"slots": slots, "usual": usual, "load": times}
    return Scenario("overload", seed, length_s, (engine,), at_s, _seen(length_s), words=words)


def _kill(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s, num = float(draw.choice(_BUSY_RATES_S)), int(draw.choice((1, 3)))
    mean_s = float(draw.choice((6.0, 30.0, 90.0)))
    at_s, length_s = _when(draw, RESTART_S / 60)
    engines = list(_arrivals(draw, rate_s, num, length_s, mean_s=mean_s))
    dying = engines[0]
    again = Engine("e0-again", at_s[1], np.inf, dying.start_s, dying.end_s)
    dying.dead_s = at_s[0]
    for engine in (dying, again):
        is_here = (engine.start_s >= engine.born_s) & (engine.start_s < engine.dead_s)
        engine.start_s, engine.end_s = engine.start_s[is_here], engine.end_s[is_here]
    engines.append(again)
    for engine in engines:
        engine.decide(_first_tokens(draw, engine, draw.random(len(engine.start_s)) < 0.001))
    num_lost = len(dying.decided_s["availability", "bad"])
    words: dict[str, float | str] = {"rate_s": rate_s, "engines": num, "lost": num_lost}
    return Scenario("kill", seed, length_s, tuple(engines), at_s, _seen(length_s), words=words)


def _hang(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s, num = float(draw.choice(_BUSY_RATES_S)), int(draw.choice((1, 3)))
    at_s, length_s = _when(draw, draw.choice((0.25, 0.5, 1.5, 5.0, 15.0)))
    engines = tuple(_arrivals(draw, rate_s, num, length_s))
    for engine in engines:
        first_s = _first_tokens(draw, engine, draw.random(len(engine.start_s)) < 0.001)
        if engine is engines[0]:
            engine.hung_s = at_s
            for times in (first_s, engine.end_s):
                is_held = (times >= at_s[0]) & (engine.start_s < at_s[1])
                times[is_held] += at_s[1] - np.maximum(at_s[0], engine.start_s[is_held])
        engine.decide(first_s)
    words: dict[str, float | str] = {"rate_s": rate_s, "engines": num}
    return Scenario("hang", seed, length_s, engines, at_s, _seen(length_s), words=words)


def _unseen(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s = float(draw.choice(_BUSY_RATES_S))
    how = str(draw.choice(("stuck", "slow", "away")))
    at_s, length_s = _when(draw, draw.choice((0.5, 1.5, 5.0, 15.0)))
    engines = tuple(_arrivals(draw, rate_s, 1, length_s))
    for engine in engines:
        engine.decide(_first_tokens(draw, engine, draw.random(len(engine.start_s)) < 0.001))
    seen_s = _seen(length_s)
    clock_s = np.arange(len(seen_s), dtype=np.float64)
    back_s = None
    if how == "away":
        seen_s[(clock_s >= at_s[0]) & (clock_s < at_s[1])] = np.nan
        back_s = at_s[1]
    else:
        speed = 0.0 if how == "stuck" else 0.3
        behind_s = seen_s[int(at_s[0])] + speed * (clock_s - at_s[0])
        caught_up_s = behind_s[int(at_s[1])] + 10.0 * (clock_s - at_s[1])
        then_s = np.where(clock_s < at_s[1], behind_s, caught_up_s)
        seen_s = np.where(clock_s < at_s[0], seen_s, np.minimum(seen_s, then_s))
    words: dict[str, float | str] = {"rate_s": rate_s, "how": how}
    return Scenario("unseen", seed, length_s, engines, at_s, seen_s, back_s, words)


def _livelock(draw: np.random.Generator, seed: int) -> Scenario:
    rate_s, num = float(draw.choice(_RATES_S)), int(draw.choice((1, 3)))
    at_s, length_s = _when(draw, draw.choice((0.25, 0.5, 1.5, 5.0, 15.0)))
    engines = tuple(_arrivals(draw, rate_s, num, length_s))
    for engine in engines:
        first_s = _first_tokens(draw, engine, draw.random(len(engine.start_s)) < 0.001)
        if engine is engines[0]:
            engine.stuck_s = at_s
            is_held = (engine.start_s >= at_s[0]) & (engine.start_s < at_s[1])
            held_s = np.where(is_held, at_s[1] - engine.start_s, 0.0)
            engine.admitted_s = engine.start_s + held_s
            first_s += held_s
            engine.end_s += held_s
        engine.decide(first_s)
    words: dict[str, float | str] = {"rate_s": rate_s, "engines": num}
    return Scenario("livelock", seed, length_s, engines, at_s, _seen(length_s), words=words)


def _when(draw: np.random.Generator, minutes: float) -> tuple[tuple[float, float], float]:
    """Draw an incident after at least an hour; return its interval and the scenario's length."""
    start_s = round(draw.uniform(1.0, 4.0) * HOUR_S)
    end_s = start_s + round(minutes * 60)
    return (start_s, end_s), end_s + _TAIL_S


def _seen(length_s: float) -> Times:
    return np.maximum(np.arange(round(length_s) + 1, dtype=np.float64) - FOLD_S, 0.0)


def _arrivals(
    draw: np.random.Generator,
    rate_s: float,
    num_engines: int,
    length_s: float,
    *,
    mean_s: float = 6.0,
) -> list[Engine]:
    """Draw engines with random arrivals at a varying rate.

    Args:
        draw: generator of random numbers.
        rate_s: requests per second over all engines.
        num_engines: number of engines.
        length_s: end of the arrivals.
        mean_s: mean duration of a request.
    """
    engines = []
    for number in range(num_engines):
        parts = []
        for from_s in np.arange(0.0, length_s, _LIT_S):
            here_s = rate_s / num_engines * max(0.0, draw.normal(1.0, _UNEVEN))
            parts.append(_poisson(draw, here_s, from_s, min(from_s + _LIT_S, length_s)))
        start_s = np.concatenate(parts)
        end_s = start_s + 0.2 + draw.exponential(mean_s, len(start_s))
        engines.append(Engine(f"e{number}", 0.0, np.inf, start_s, end_s))
    return engines


def _poisson(draw: np.random.Generator, rate_s: float, from_s: float, to_s: float) -> Times:
    num = draw.poisson(max(0.0, rate_s) * (to_s - from_s))
    return np.sort(draw.uniform(from_s, to_s, num))


def _first_tokens(draw: np.random.Generator, engine: Engine, is_late: NDArray[np.bool_]) -> Times:
    """Return first-token times, within the threshold or later; requests end after them."""
    wait_s = np.where(
        is_late,
        TTFT_S + 0.05 + draw.exponential(1.0, len(is_late)),
        draw.uniform(0.05, 0.9 * TTFT_S, len(is_late)),
    )
    engine.end_s = np.maximum(engine.end_s, engine.start_s + wait_s + 0.05)
    return engine.start_s + wait_s
