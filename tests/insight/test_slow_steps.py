"""Slow steps are attributed to their evidence, and to nothing where there is none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inferscope.attribution.counterfactual import Delay
from inferscope.engine import EngineOptions, Sampling, load_engine
from inferscope.engine.runner import Batch, Runner
from inferscope.fold.final_records import FinalStep
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.insight.findings.rules import FEWEST_REQUESTS
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.insight.findings.slow_steps import Reason, reason, slow_steps
from inferscope.insight.findings.slowness import HOST, Slowness
from inferscope.probe import Probe
from inferscope.readers.source import RingSource, catch_up, open_source
from inferscope.records import DECODE, PREFILL, CounterSample, EngineInfo, RingOpened
from inferscope.ring.recording import RecordingWriter
from inferscope.text.findings import findings_json

MS, SECOND = 1_000_000, 1_000_000_000
ENGINE, SAMPLER = 1, 2
POWER_CAP, THERMAL = 0x4, 0x20


class Second(NamedTuple):
    """What a second of a run is like: steps of 10 ms that take longer, and their samples."""

    slower: float = 0.0
    """Excess of every step over its modelled time."""
    stall_ms: int = 0
    """Additional time of one step."""
    mixed_slower: float | None = None
    wait_ms: int = 0
    quota_ms: int = 0
    steal_ms: int = 0
    others: float = 0.0
    throttle_bits: int | None = None
    foreign: float | None = None
    is_sampled: bool = True
    new_shapes: bool = False


def step(
    end_ns: int, *, explained_ms: float, excess_ms: float, tokens: int, is_mixed: bool
) -> FinalStep:
    explained_ns, excess_ns = round(explained_ms * MS), round(excess_ms * MS)
    took_ns = explained_ns + excess_ns
    members = np.array([explained_ns // 2, explained_ns // 2], dtype=np.int64)
    delay = Delay(members, None, [1] if is_mixed else [], 0, 0, explained_ns, excess_ns)
    return FinalStep(
        "e", 0, 0, end_ns, end_ns - took_ns, end_ns, took_ns, "host", "eager", False, "fit",
        ("a", "b"), np.array([DECODE, PREFILL if is_mixed else DECODE], dtype=np.uint8),
        np.array([1, tokens - 1]), np.array([9, 9]), np.zeros(2, dtype=np.int64),
        np.array([took_ns, 0]), 0, 0, 0.0, delay=delay,
    )  # fmt: skip


def counted(number: int, second: Second) -> Iterator[tuple[int, CounterSample]]:
    """Yield what probe and sampler count in one second."""
    start_ns = number * SECOND
    end_ns = start_ns + SECOND
    if second.is_sampled:
        values = {
            "pid": 1.0, "num_cpus": 4.0, "cpu_ns": 0.5e9, "run_wait_ns": second.wait_ms * 1e6,
            "quota_ns": second.quota_ms * 1e6, "steal_ns": second.steal_ms * 1e6,
            "host_busy_ns": 0.5e9 + second.others * 1e9,
        }  # fmt: skip
        yield ENGINE, CounterSample(end_ns, "", start_ns, end_ns, "host", values)
    device: dict[str, float] = {}
    if second.throttle_bits is not None:
        device |= {"throttle_bits": float(second.throttle_bits), "temperature_c": 88.0}
    if second.foreign is not None:
        device["foreign_busy_share"] = second.foreign
    if device:
        yield SAMPLER, CounterSample(end_ns, "GPU-u", start_ns, end_ns, "nvml", device)


def watched(seconds: list[Second]) -> Slowness:
    """Return what a run of such seconds leaves, eight decode steps and two mixed ones in each."""
    watch = RunSummarizer()
    watch.on_record(0, RingOpened(0, ENGINE, "e", "core", 0, 1, "host", "boot", 0, 0))
    watch.on_record(0, RingOpened(0, SAMPLER, "sampler", "sampler", 0, 2, "host", "boot", 0, 0))
    watch.on_record(ENGINE, EngineInfo(0, "test", device_uuid="u"))
    tokens = 8
    for number, second in enumerate(seconds):
        for at in range(10):
            is_mixed = at >= 8
            slower = second.slower
            if is_mixed and second.mixed_slower is not None:
                slower = second.mixed_slower
            tokens = tokens + 1 if second.new_shapes else 8
            stall_ms = second.stall_ms if at == 3 else 0
            watch.on_step(
                step(
                    number * SECOND + (at + 1) * 90 * MS,
                    explained_ms=10,
                    excess_ms=10 * slower + stall_ms,
                    tokens=tokens + 100 * is_mixed,
                    is_mixed=is_mixed,
                )
            )
        for ring, sample in counted(number, second):
            watch.on_record(ring, sample)
    assert list(watch.runs) == ["e"]  # the sampler is not an engine
    return watch.runs["e"].slowness


def why(seconds: list[Second]) -> Reason:
    found = reason(watched(seconds))
    assert found is not None
    return found


HEALTHY = Second(slower=0.02)
WAITS = Second(slower=1.0, wait_ms=110, others=1.0)
SHARED_CACHE = Second(slower=1.0, others=3.0)
CASES: dict[str, tuple[list[Second], str, str]] = {
    "waits throughout": ([WAITS] * 8, "co_tenant", "high"),
    "waits in a part": ([HEALTHY] * 6 + [WAITS] * 4, "co_tenant", "high"),
    "the hypervisor takes it": ([Second(slower=0.8, steal_ms=90)] * 8, "co_tenant", "high"),
    "others' CPUs, no wait": ([HEALTHY] * 6 + [SHARED_CACHE] * 4, "co_tenant", "high"),
    "a foreign process on the device": (
        [Second(slower=0.02, foreign=0.0)] * 6 + [Second(slower=1.0, foreign=0.6)] * 4,
        "co_tenant",
        "high",
    ),
    "a CPU quota": ([Second(slower=1.0, quota_ms=100)] * 8, "throttling", "high"),
    "a CPU quota, counted as a wait, too": (
        [Second(slower=1.0, quota_ms=100, wait_ms=100)] * 8,
        "throttling",
        "high",
    ),
    "clocks held down in a part": (
        [Second(slower=0.02, throttle_bits=0)] * 6
        + [Second(slower=0.6, throttle_bits=THERMAL)] * 4,
        "throttling",
        "high",
    ),
    "clocks held down throughout": (
        [Second(slower=0.6, throttle_bits=POWER_CAP)] * 8,
        "throttling",
        "medium",
    ),
    "clocks that are low because the device idles": (
        [Second(slower=0.0, mixed_slower=2.0, throttle_bits=1)] * 8,
        "model_misfit",
        "high",
    ),
    "one kind of step": ([Second(slower=0.02, mixed_slower=2.0)] * 8, "model_misfit", "high"),
    "one kind of step, beside waits now and then": (
        [Second(slower=0.02, mixed_slower=2.0)] * 6
        + [Second(slower=0.2, mixed_slower=2.2, wait_ms=20, others=1.0)] * 3,
        "model_misfit",
        "high",
    ),
    "one kind of step, the host not observed": (
        [Second(slower=0.02, mixed_slower=2.0, is_sampled=False)] * 8,
        "model_misfit",
        "medium",
    ),
    "shapes that are new": (
        [HEALTHY] * 6 + [Second(slower=2.0, new_shapes=True)] + [HEALTHY] * 3,
        "cold_shapes",
        "high",
    ),
    "stalls": ([HEALTHY] * 3 + [Second(slower=0.02, stall_ms=300)] * 4, "unexplained", "low"),
    "all kinds of steps, on an idle host": ([Second(slower=0.5)] * 8, "unexplained", "low"),
    "all kinds of steps, and others throughout": ([SHARED_CACHE] * 8, "unexplained", "low"),
}


@pytest.mark.parametrize(("seconds", "expected", "confidence"), CASES.values(), ids=CASES)
def test_slowness_is_laid_to_its_evidence(
    seconds: list[Second], expected: str, confidence: str
) -> None:
    found = why(seconds)
    assert (found.why, found.confidence) == (expected, confidence)
    assert "% of the excess is in" in found.sentences[0]


def test_what_is_not_observed_is_reported() -> None:
    assert "the host's CPUs" in why([Second(slower=0.5, is_sampled=False)] * 8).sentences[-1]
    blind = why([Second(slower=0.5, throttle_bits=0)] * 8)
    assert "Not observed" not in " ".join(blind.sentences)


def test_threads_that_compete_among_themselves_are_not_others() -> None:
    run = watched([Second(slower=1.0, wait_ms=110, others=0.0)] * 8)
    found = reason(run)
    assert found is not None
    assert (found.why, found.confidence) == ("own_threads", "high")
    assert "no other process used one" in " ".join(found.sentences)
    assert "neighbour" not in found.advice
    assert {number.name: number.value for number in found.evidence}["co_tenant_share"] == 0


def test_a_hypervisor_that_takes_the_cpu_is_no_thread_of_the_engine() -> None:
    found = why([Second(slower=0.8, steal_ms=90)] * 8)
    assert found.why == "co_tenant"
    assert "hypervisor" in " ".join(found.sentences)
    assert "compete" not in " ".join(found.sentences)


def test_waits_of_a_front_end_are_not_those_of_steps() -> None:
    slowness = watched([Second(slower=0.5, is_sampled=False)] * 8)
    for number in range(8):
        for _, sample in counted(number, WAITS):
            slowness.host_sample(ENGINE, sample, runs_steps=False)
    found = reason(slowness)
    assert found is not None
    assert found.why == "unexplained"


@pytest.mark.parametrize("num", [1, 4])
def test_time_held_back_by_the_quota_of_a_container_counts_once(num: int) -> None:
    slowness = Slowness()
    wait_ns, quota_ns = 0.3 * SECOND, 0.2 * SECOND
    values = {"cpu_ns": 0.5 * SECOND, "quota_ns": quota_ns, "run_wait_ns": wait_ns}
    for end_ns in range(SECOND, 6 * SECOND, SECOND):
        for ring in range(num):
            sample = CounterSample(end_ns, "", end_ns - SECOND, end_ns, HOST, values)
            slowness.host_sample(ring, sample, runs_steps=True)
    sampled_ns = sum(bucket.of("sampled") for bucket in slowness.buckets)
    assert sampled_ns == 5 * SECOND
    assert sum(bucket.of("quota") for bucket in slowness.buckets) == pytest.approx(5 * quota_ns)
    waits_ns = sum(bucket.of("wait") for bucket in slowness.buckets)
    assert waits_ns == pytest.approx(5 * (num * wait_ns - quota_ns))


def test_where_nothing_is_slow_there_is_no_reason() -> None:
    assert reason(watched([Second(wait_ms=500, others=3.0)] * 3)) is None
    assert reason(Slowness()) is None


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("name", ["co_tenant", "quota", "throttle", "misfit", "cold"])
def test_held_out_runs_of_any_size_name_what_was_injected(name: str, seed: int) -> None:
    """Amounts, lengths and noise are drawn; no other cause may be named with high confidence."""
    rng = random.Random(f"{name}/{seed}")
    strength, noise = rng.uniform(0.4, 2.0), rng.uniform(0.0, 0.08)
    length, begin = rng.randrange(8, 30), rng.randrange(3, 7)
    usual = {"slower": noise, "others": rng.uniform(0.0, 0.5), "wait_ms": rng.randrange(3)}
    if name == "throttle":
        usual["throttle_bits"] = 0
    makes: dict[str, Callable[[], Second]] = {
        "co_tenant": lambda: Second(strength + noise, wait_ms=round(110 * strength), others=1.0),
        "quota": lambda: Second(strength + noise, quota_ms=round(110 * strength)),
        "throttle": lambda: Second(strength + noise, throttle_bits=THERMAL),
        "misfit": lambda: Second(noise, mixed_slower=1.0 + strength),
        "cold": lambda: Second(2 * strength + noise, new_shapes=True),
    }
    struck = [makes[name]() for _ in range(max(4, length - begin))]
    seconds = [Second(**usual) for _ in range(begin)]  # type: ignore[arg-type]
    if name == "misfit":
        seconds = [makes[name]() for _ in seconds]
    if name == "cold":  # shapes are new once
        struck = struck[:2] + seconds
    expected = {"quota": "throttling", "throttle": "throttling", "misfit": "model_misfit"}
    expected |= {"co_tenant": "co_tenant", "cold": "cold_shapes"}
    assert why(seconds + struck).why == expected[name]


levels = st.floats(0, 3, allow_nan=False)
seconds = st.builds(
    Second, slower=levels, stall_ms=st.integers(0, 999), mixed_slower=st.none() | levels,
    wait_ms=st.integers(0, 5_000), quota_ms=st.integers(0, 5_000), steal_ms=st.integers(0, 5_000),
    others=levels, throttle_bits=st.none() | st.integers(0, 511), foreign=st.none() | levels,
    is_sampled=st.booleans(), new_shapes=st.booleans(),
)  # fmt: skip


@given(st.lists(seconds, min_size=1, max_size=6))
def test_parts_are_shares_for_any_evidence(run: list[Second]) -> None:
    found = reason(watched(run))
    if found is not None:
        shares = [one.value for one in found.evidence if one.name in PARTS]
        assert len(shares) == len(PARTS)
        assert all(isinstance(share, float) and 0 <= share <= 1 + 1e-9 for share in shares)
        largest = max(share for share in shares if isinstance(share, float))
        assert (found.why == "unexplained") == (largest < 0.5)


ALTERNATIVES = ("co_tenant", "own_threads", "throttling", "cold_shapes", "model_misfit")
PARTS = {f"{name}_share" for name in ALTERNATIVES}


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=30))
def test_a_run_of_any_length_takes_bounded_memory(ends_ns: list[int]) -> None:
    slowness = Slowness()
    for end_ns in ends_ns:
        slowness.add(step(end_ns, explained_ms=1, excess_ms=1, tokens=2, is_mixed=False))
    assert len(slowness.buckets) <= 2_048
    assert sum(bucket.excess_ns for bucket in slowness.buckets) == len(ends_ns) * MS


@pytest.mark.thorough
def test_a_recording_gives_the_finding_that_the_rings_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "4")
    engine = load_engine("builtin", EngineOptions(num_blocks=64), open_probe=Probe.open)
    execute, delay_s = Runner.execute, 0.0

    def execute_late(runner: Runner, batch: Batch) -> Tensor:
        time.sleep(delay_s)
        return execute(runner, batch)

    monkeypatch.setattr(Runner, "execute", execute_late)
    for number in range(FEWEST_REQUESTS):
        # Slower by far than any noise, and after the model has learned what is usual.
        delay_s = 0.1 if number >= FEWEST_REQUESTS - 2 else 0.0
        engine.submit([number] * 9, Sampling(max_tokens=4, ignore_eos=True))
        start_ns = time.monotonic_ns()
        while engine.has_work:
            engine.step()
        end_ns = time.monotonic_ns()
        values = {"cpu_ns": 1e6, "run_wait_ns": 1e9, "host_busy_ns": 9e9, "num_cpus": 2.0}
        engine.probe._log.host_sample = CounterSample(end_ns, "", start_ns, end_ns, HOST, values)
        engine.probe._log.report(end_ns, complete_through_ns=end_ns, num_dropped=0)
    engine.close()
    engine.probe.close()
    live, file = RunSummarizer(), tmp_path / "run.isr"
    source = RingSource(
        lambda: (tmp_path / "rings").glob("**/*.ring"),
        name="run",
        sinks=(live,),
        listen=live.on_record,
        recording=RecordingWriter(file),
    )
    catch_up(source)
    source.close()
    again = RunSummarizer()
    replayed = open_source(file, sinks=(again,), listen=again.on_record)
    catch_up(replayed)
    replayed.close()
    (found,) = findings(live)
    assert found.findings is not None
    assert "slow_steps" in [finding.id for finding in found.findings]
    assert findings_json(findings(again)) == findings_json(findings(live))


@pytest.mark.parametrize(
    ("seconds", "lost_ns", "is_found"),
    [
        ([WAITS] * 8, 10, False),
        ([WAITS] * 8, 20, True),
        ([Second(slower=0.5)] * 8, 20, False),
        ([Second(slower=0.5)] * 8, 30, True),
        ([Second(slower=0.1, wait_ms=700, others=1.5)] * 8, 1, True),
    ],
    ids=["little", "a co-tenant", "no reason", "much without a reason", "no CPU from the start"],
)
def test_slowness_is_a_finding_where_it_matters(
    seconds: list[Second], lost_ns: int, is_found: bool
) -> None:
    run = RunSummary("e")
    run.requests.life_ns.update(slowdown=lost_ns, decode_own=100 - lost_ns)
    run.slowness = watched(seconds)
    found = slow_steps(run)
    assert (found is not None) is is_found
    if found is not None:
        assert found.causes == ("slowdown",)
        assert found.lost_share == lost_ns / 100


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 104))
def test_clean_runs_are_accused_of_nothing(seed: int) -> None:
    """Noise, neighbours and short waits, as clean runs show them: of 100 runs at most 2 accused."""
    rng = random.Random(f"clean/{seed}")
    num_accused = 0
    for _ in range(100):
        usual, others = rng.uniform(0.0, 0.07), rng.uniform(0.0, 1.5)
        run = RunSummary("e")
        seconds = []
        for _ in range(12):
            used = max(0.0, rng.gauss(others, 0.3))
            noise = max(0.0, rng.gauss(usual + 0.12 * used, 0.03))  # of caches and memory
            seconds.append(
                Second(
                    slower=noise,
                    mixed_slower=0.5 * noise,
                    wait_ms=rng.randrange(8),
                    others=used,
                    throttle_bits=rng.choice([0, 1]),
                    stall_ms=rng.choice([0, 0, 0, 0, 20]),
                )
            )
        run.slowness = watched(seconds)
        excess_ns = sum(of.excess_ns for of in run.slowness.kinds.values())
        explained_ns = sum(of.explained_ns for of in run.slowness.kinds.values())
        run.requests.life_ns.update(slowdown=excess_ns, decode_own=explained_ns)
        found = slow_steps(run)
        num_accused += found is not None and "unexplained" not in str(found.evidence)
    assert num_accused <= 2
