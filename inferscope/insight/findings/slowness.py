"""Sums over steps slower than predicted, with what the host and devices counted meanwhile.

Everything is kept by time (`SlownessBucket`), to compare lost time with evidence of the same
second, and by kind of step (mode, phase and size class). Memory is bounded: when a run outgrows the
buckets, their width doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from inferscope.fold import FinalStep
from inferscope.records import IDLE_CLOCKS, VERIFY, CounterSample, throttle_words

_WIDTH_NS = 1_000_000_000
_MOST_BUCKETS = 2_048
_MOST_SHAPES = 16_384
_RESIDUALS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Upper bounds of the histogram of a step's excess over its modelled time."""
UNLEARNED = ("roofline", "tokens")
"""Sources of cost models that were not fitted to this engine."""
_LEARNED = "fit"
HOST = "host"
_GPU = "nvml"
_RING_SILENT_NS = 5_000_000_000
"""Nanoseconds of silence after which another ring's samples represent the host."""


class StepKind(NamedTuple):
    """Key of steps that one part of the cost model predicts."""

    mode: str
    phase: str
    """Phases of the step: prefill, decode, mixed or verify."""

    def __str__(self) -> str:
        return f"{self.phase} steps ({self.mode})"


class Excess:
    """Modelled time and excess of steps of one kind."""

    __slots__ = ("excess_ns", "explained_ns", "num")

    def __init__(self) -> None:
        self.num = self.explained_ns = self.excess_ns = 0

    def add(self, explained_ns: int, excess_ns: int, num: int = 1) -> None:
        """Add steps."""
        self.num += num
        self.explained_ns += explained_ns
        self.excess_ns += excess_ns

    @property
    def rate(self) -> float:
        """Return the excess over modelled time."""
        return self.excess_ns / self.explained_ns if self.explained_ns else 0.0


class KindStats:
    """All warm steps of one kind.

    Attributes:
        first: first steps of their shape that the engine did not mark cold.
        later: all others.
        residuals: number of steps by excess over modelled time; bounds are _RESIDUALS.
        by_size: excess by binary digits of the token count.
    """

    def __init__(self) -> None:
        self.first, self.later = Excess(), Excess()
        self.residuals = [0] * (len(_RESIDUALS) + 1)
        self.by_size: dict[int, Excess] = {}

    @property
    def excess_ns(self) -> int:
        """Return the excess of all steps."""
        return self.first.excess_ns + self.later.excess_ns

    @property
    def explained_ns(self) -> int:
        """Return the modelled time of all steps."""
        return self.first.explained_ns + self.later.explained_ns

    def median_residual(self) -> float:
        """Return the median excess over modelled time, to a factor of two."""
        half, reached = sum(self.residuals) / 2, 0
        for num, bound in zip(self.residuals, (*_RESIDUALS, 2 * _RESIDUALS[-1]), strict=True):
            reached += num
            if reached >= half:
                return bound / 2
        return 0.0


class SlownessBucket:
    """One time interval: steps by kind, and sampled amounts in nanoseconds."""

    __slots__ = ("amounts", "steps")

    def __init__(self) -> None:
        self.steps: dict[StepKind, Excess] = {}
        self.amounts: dict[str, float] = {}

    def take(self, other: SlownessBucket) -> None:
        """Merge the interval that follows."""
        for kind, excess in other.steps.items():
            mine = self.steps.setdefault(kind, Excess())
            mine.add(excess.explained_ns, excess.excess_ns, excess.num)
        for word, amount in other.amounts.items():
            self.amounts[word] = self.amounts.get(word, 0.0) + amount

    def of(self, word: str) -> float:
        """Return an amount; 0 if nothing was counted."""
        if word == "quota":  # each process of a container counts the throttling of all of it
            of_processes = [ns for key, ns in self.amounts.items() if key.startswith("quota_")]
            return max(of_processes, default=0.0)
        if word == "wait":  # some kernels count quota throttling as a wait, others do not
            return max(0.0, self.amounts.get("run_wait", 0.0) - self.of("quota"))
        return self.amounts.get(word, 0.0)

    @property
    def excess_ns(self) -> int:
        """Return the excess of all steps."""
        return sum(each.excess_ns for each in self.steps.values())

    @property
    def explained_ns(self) -> int:
        """Return the modelled time of all steps."""
        return sum(each.explained_ns for each in self.steps.values())


class Slowness:
    """Warm steps of one engine over time, with the evidence of the same time.

    Amounts of a bucket, all in nanoseconds:
        sampled         time covered by samples of the host
        run_wait        engine's threads ready to run without a CPU, summed over threads
        quota_RING      throttled by the CPU quota of the container of a ring's process
        quota           maximum of these
        wait            run_wait without quota
        steal           the engine's part of CPU time taken by the hypervisor
        cpu             processor time of the engine's observed processes
        host            CPU time in use on the host, by all processes
        device          time covered by samples of the device
        throttled       of it, clocks throttled; throttled_REASON by reason
        watched         time in which samples show whether others use the device
        foreign         of it, with kernels of other processes

    Attributes:
        kinds: steps by kind.
        unlearned_ns: excess of steps predicted before the model was fitted to this engine.
        num_cpus: CPUs of the host; 0 if unknown.
        hottest_c: highest device temperature in °C; None if unknown.
    """

    def __init__(self) -> None:
        self.kinds: dict[StepKind, KindStats] = {}
        self.unlearned_ns = 0
        self.num_cpus = 0
        self.hottest_c: float | None = None
        self.width_ns = _WIDTH_NS
        self._buckets: list[SlownessBucket] = []
        self._origin_ns: int | None = None
        self._shapes: set[tuple[str, str, int]] = set()
        self._host_ring = -1
        self._host_ns = 0

    @property
    def buckets(self) -> list[SlownessBucket]:
        """Return all buckets, `width_ns` each."""
        return self._buckets

    def add(self, step: FinalStep) -> None:
        """Add a step; cold ones have a ledger row of their own and are ignored."""
        delay = step.delay
        if delay is None or step.is_dummy:
            return
        kind, num_tokens = _kind(step)
        shape = (*kind, num_tokens)
        is_first = shape not in self._shapes
        if is_first and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(shape)
        if step.is_cold:
            return
        explained_ns, excess_ns = delay.explained_ns, max(0, delay.excess_ns)
        of_kind = self.kinds.get(kind)
        if of_kind is None:
            of_kind = self.kinds[kind] = KindStats()
        (of_kind.first if is_first else of_kind.later).add(explained_ns, excess_ns)
        ratio, at = excess_ns / max(1, explained_ns), 0
        while at < len(_RESIDUALS) and ratio > _RESIDUALS[at]:
            at += 1
        of_kind.residuals[at] += 1
        size = of_kind.by_size.setdefault(num_tokens.bit_length(), Excess())
        size.add(explained_ns, excess_ns)
        of_bucket = self._bucket(step.end_ns).steps
        mine = of_bucket.get(kind)
        if mine is None:
            mine = of_bucket[kind] = Excess()
        mine.add(explained_ns, excess_ns)
        if step.components is not None and step.components.model.source != _LEARNED:
            self.unlearned_ns += excess_ns

    def host_sample(self, ring: int, sample: CounterSample, *, runs_steps: bool) -> None:
        """Add a host sample of a probe's process.

        Args:
            ring: ring of the process.
            sample: of source `host`.
            runs_steps: False for a front end, whose waits do not delay steps.
        """
        values, window_ns = sample.values, sample.end_ns - sample.start_ns
        if window_ns <= 0:
            return
        amounts = {"cpu": values.get("cpu_ns", 0.0)}
        if runs_steps:
            amounts[f"quota_{ring}"] = values.get("quota_ns", 0.0)
            amounts["run_wait"] = values.get("run_wait_ns", 0.0)
        # One process's samples represent the host, so that nothing is counted twice.
        is_free = self._host_ring < 0 or sample.end_ns - self._host_ns > _RING_SILENT_NS
        if is_free and runs_steps:
            self._host_ring = ring
        if ring == self._host_ring:
            self._host_ns = sample.end_ns
            busy_ns = values.get("host_busy_ns", 0.0)
            steal_ns = values.get("steal_ns", 0.0)
            amounts |= {"sampled": float(window_ns), "host": busy_ns}
            mine = min(1.0, amounts["cpu"] / busy_ns) if busy_ns else 0.0
            amounts["steal"] = steal_ns * mine
            self.num_cpus = int(values.get("num_cpus", 0)) or self.num_cpus
        self._spread(sample, amounts)

    def device_sample(self, sample: CounterSample) -> None:
        """Add a sample of one of the engine's devices."""
        values, window_ns = sample.values, float(sample.end_ns - sample.start_ns)
        if sample.source != _GPU or window_ns <= 0:
            return
        amounts: dict[str, float] = {}
        bits = values.get("throttle_bits")
        if bits is not None and 0 <= bits < 1 << 53:
            amounts["device"] = window_ns
            reasons = throttle_words(int(bits) & ~IDLE_CLOCKS)
            if reasons:
                amounts["throttled"] = window_ns
            amounts |= {f"throttled_{reason}": window_ns for reason in reasons}
        foreign = values.get("foreign_busy_share")
        if foreign is not None:
            amounts["watched"] = window_ns
            amounts["foreign"] = window_ns * min(1.0, max(0.0, foreign))
        degrees = values.get("temperature_c")
        if degrees is not None:
            self.hottest_c = max(degrees, self.hottest_c or degrees)
        if amounts:
            self._spread(sample, amounts)

    def _spread(self, sample: CounterSample, amounts: Mapping[str, float]) -> None:
        """Divide amounts over the buckets that a window overlaps."""
        window_ns = sample.end_ns - sample.start_ns
        at_ns = max(sample.start_ns, sample.end_ns - 8 * self.width_ns)
        while at_ns < sample.end_ns:
            bucket = self._bucket(at_ns)
            origin_ns = self._origin_ns or 0
            number = max(0, at_ns - origin_ns) // self.width_ns
            until_ns = min(sample.end_ns, max(at_ns + 1, origin_ns + (number + 1) * self.width_ns))
            part = (until_ns - at_ns) / window_ns
            for word, amount in amounts.items():
                if amount:
                    bucket.amounts[word] = bucket.amounts.get(word, 0.0) + amount * part
            at_ns = until_ns

    def _bucket(self, at_ns: int) -> SlownessBucket:
        if self._origin_ns is None:
            self._origin_ns = at_ns
        number = max(0, at_ns - self._origin_ns) // self.width_ns
        while number >= _MOST_BUCKETS:
            buckets = self._buckets
            for one, two in zip(buckets[::2], buckets[1::2], strict=False):
                one.take(two)
            self._buckets = buckets[::2]
            self.width_ns *= 2
            number //= 2
        while len(self._buckets) <= number:
            self._buckets.append(SlownessBucket())
        return self._buckets[number]


def _kind(step: FinalStep) -> tuple[StepKind, int]:
    """Return a step's kind, and its tokens."""
    delay = step.delay
    assert delay is not None
    num_prefills = len(delay.prefills)
    if not num_prefills:
        is_verify = bool((step.phases == VERIFY).any())
        phase = "verify" if is_verify else "decode"
    else:
        phase = "mixed" if len(delay.own_ns) > num_prefills else "prefill"
    return StepKind(step.mode, phase), int(step.tokens.sum())
