"""Scenarios of `ledger_causes`: loads, faults, and each fault's delay of every request.

What was injected is never read from the ledger: it is the sleeping code's own clock, a stopwatch
around the forward pass, or the client's decision when to read on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import msgspec
from injecting import Fault, FaultInterval, Forward, Kind
from slow_client import Readings, read_answers

from inferscope.attribution.metric_breakdown import Metric
from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.load.arrivals import bursts, poisson
from inferscope.load.http import HttpClient, HttpOptions, open_session
from inferscope.load.lengths import parse_lengths
from inferscope.load.open_loop import ClientTimes, OpenLoop
from inferscope.load.planning import of_lengths, plan, stream
from inferscope.load.prompts import WordPrompts
from inferscope.readers.source import catch_up, open_source

HERE = Path(__file__).parent
SERVED = "builtin"
_START_S = 60.0
_LOOK_S = 0.5
_CALIBRATION_SEED = 1_000_000
"""Offset of a run's seed, so that the objective comes from requests that are not judged."""


@dataclass(frozen=True)
class Scenario:
    """One cause: its injection, and the causes that the ledger must name for it.

    Attributes:
        accepted: the ledger's causes that are the injected one, under this metric.
        rows: the causes that what was injected falls into; those accepted, unless it takes of more
            than one.
        length: of the answers, in tokens.
        burst: requests that come at once; 0 for arrivals at random.
        oversized: prompt tokens of another client's requests, during the faulty part.
    """

    name: str
    metric: Metric
    accepted: frozenset[str]
    requests: int
    rate_s: float
    length: int
    kind: Kind = "none"
    settings: dict[str, float] = field(default_factory=dict)
    burst: int = 0
    oversized: int = 0
    co_tenants: int = 0
    slow_readers: bool = False
    rows: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Default the accepted causes of the rows to those of the scenario."""
        if not self.rows:
            object.__setattr__(self, "rows", self.accepted)


SCENARIOS = (
    # Only decoding requests are delayed while the loop sleeps, so their token gaps grow; requests
    # that wait in the queue meanwhile are booked as `queue_idle`.
    Scenario(
        "scheduler sleep", "tbt", frozenset({"cpu_gap"}), 280, 8, 48, "sleep",
        {"chance": 0.014, "least_ms": 30, "most_ms": 80},
    ),
    # The delay precedes the engine's record of the request, so it affects only the TTFT.
    Scenario(
        "slow tokeniser", "ttft", frozenset({"frontend"}), 240, 8, 32, "tokenise",
        {"chance": 0.5, "least_ms": 60, "most_ms": 150},
    ),
    # For a decoding request, another's prefill in the same step is `decode_interference`. A request
    # that arrives meanwhile finds the budget spent and waits in the `queue`: another metric
    # and another cause.
    Scenario(
        "oversized prompt", "tbt", frozenset({"decode_interference"}), 330, 2.5, 160,
        oversized=1000,
    ),
    # The blocks run out in mid-answer: its holder is thrown out, waits, and computes them again.
    Scenario(
        "tiny KV pool", "tbt", frozenset({"preempted", "recompute"}), 480, 7, 128, "blocks",
        {"blocks": 40}, burst=4,
    ),
    # The engine is done, the bytes do not leave.
    Scenario(
        "slow client", "e2e", frozenset({"delivery"}), 400, 0, 200, slow_readers=True,
    ),
    # It takes time from every step, not from one gap: the mean gap tells. And it stays: what lasts
    # for thousands of steps must not become normal. Of the loop's core it takes its part between
    # steps as well, where the host's own work and the tokens' way out stretch.
    Scenario(
        "CPU co-tenant", "tpot", frozenset({"slowdown"}), 120, 3, 64, "burn", co_tenants=2,
        rows=frozenset({"slowdown", "cpu_gap", "output"}),
    ),
    # The step itself takes long, once for each shape.
    Scenario(
        "cold shape", "tbt", frozenset({"cold_start"}), 280, 3.5, 48, "forget",
        {"chance": 0.012, "least_ms": 30, "most_ms": 80},
    ),
)  # fmt: skip

Spans: TypeAlias = dict[str, list[tuple[int, int]]]
"""Start and end of each, by the engine's request ID."""
Parts: TypeAlias = dict[str, dict[str, FinalRequest]]
"""Requests by part of the run and by the shared name of their twins in other parts."""


class Collected:
    """A sink of final records."""

    def __init__(self) -> None:
        self.requests: list[FinalRequest] = []

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Append a request."""
        self.requests.append(request)


def run(
    scenario: Scenario, folder: Path, *, seed: int, requests: int | None
) -> tuple[Parts, Truth, float]:
    """Run a scenario; return its requests, the truth, and the number of cores used by others."""
    fault = Fault(
        kind=scenario.kind,
        seed=seed,
        folder=str(folder),
        core=_idlest_core() if scenario.co_tenants else None,
        **scenario.settings,  # type: ignore[arg-type]
    )
    num = requests or scenario.requests
    began_s, busy_s, ours_s = time.monotonic(), _busy_s(), _ours_s()
    server = subprocess.Popen(
        [sys.executable, str(HERE / "injecting.py"), "serve", msgspec.json.encode(fault).decode()],
        env={
            **os.environ, "INFERSCOPE_DIR": str(folder / "rings"), "INFERSCOPE_RING_MB": "64",
            "INFERSCOPE_ENGINE_ID": "causes",
        },
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{_port(server, folder)}"
        drive = _read if scenario.slow_readers else _load
        readings = asyncio.run(drive(scenario, url, folder, seed=seed, num=num, fault=fault))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    foreign_s = _busy_s() - busy_s - (_ours_s() - ours_s)
    foreign = max(0.0, foreign_s / (time.monotonic() - began_s))
    found = _collected(folder)
    return _parts(found), Truth(scenario, folder, found, readings), round(foreign, 3)


# --- loads ----------------------------------------------------------------------------------------


async def _load(
    scenario: Scenario, url: str, folder: Path, *, seed: int, num: int, fault: Fault
) -> Readings:
    """Send the open-loop load of all parts of a run."""
    async with open_session() as session:
        options = HttpOptions(
            url=url, model=SERVED, endpoint="completions", ignores_eos=True, is_counting=True,
            sends_seed=True,
        )  # fmt: skip
        client = HttpClient(session, options)

        async def send(part: str, seed: int, num: int) -> None:
            arrivals = poisson(stream(seed, "arrivals"), scenario.rate_s)
            if scenario.burst:
                arrivals = bursts(scenario.burst, scenario.burst / scenario.rate_s)
            words = WordPrompts(stream(seed, "prompts"), tokens_per_word=2.0)
            lengths = parse_lengths("48"), parse_lengths(str(scenario.length))
            compose = of_lengths(seed, words, prompt=lengths[0], output=lengths[1])
            asks = islice(plan(seed, arrivals, compose, run=part), num)
            await OpenLoop(client, asks, _complain).run(None)

        await send("warm", seed + 2 * _CALIBRATION_SEED, 40)
        await send("calibrate", seed + _CALIBRATION_SEED, max(100, num // 2))
        await send("clean", seed, num)
        (folder / "armed").touch()
        strangers = [
            subprocess.Popen(
                [sys.executable, str(HERE / "injecting.py"), "burn",
                 msgspec.json.encode(msgspec.structs.replace(fault, seed=seed)).decode()]
            )
            for _ in range(scenario.co_tenants)
        ]  # fmt: skip
        big = asyncio.create_task(_oversized(scenario, client, seed))
        try:
            await send("fault", seed, num)
        finally:
            big.cancel()
            for stranger in strangers:
                stranger.terminate()
                stranger.wait()
    return {}


async def _oversized(scenario: Scenario, client: HttpClient, seed: int) -> None:
    """Send over-long prompts as another client, until cancelled."""
    if not scenario.oversized:
        return
    words = WordPrompts(stream(seed, "big prompts"), tokens_per_word=2.0)
    prompt = parse_lengths(str(scenario.oversized))
    compose = of_lengths(seed, words, prompt=prompt, output=parse_lengths("1"))
    arrivals = poisson(stream(seed, "big arrivals"), 2.5)
    await OpenLoop(client, plan(seed, arrivals, compose, run="big"), _complain).run(None)


async def _read(
    scenario: Scenario, url: str, folder: Path, *, seed: int, num: int, fault: Fault
) -> Readings:
    """Run clients, some of which stop reading, through all parts of a run."""
    port = int(url.rpartition(":")[2])
    draw = stream(seed, "readers")
    readings: Readings = {}
    usual_s: float | None = None
    for part, share in (("warm", 0), ("calibrate", 0), ("clean", 0), ("fault", 1)):
        found = await read_answers(
            port,
            part,
            num={"warm": 24, "calibrate": max(48, num // 2)}.get(part, num),
            length=scenario.length,
            usual_s=usual_s,
            slow_share=0.5 * share,
            draw=draw,
        )
        usual_s = median(one.took_s for one in found.values())
        readings |= found
    return readings


def _complain(times: ClientTimes) -> None:
    if times.outcome != "finished" and times.outcome != "abandoned":
        sys.stderr.write(f"{times.name}: {times.outcome} {times.error} {times.detail}\n")


# --- what came of it ------------------------------------------------------------------------------


def _collected(folder: Path) -> list[FinalRequest]:
    found = Collected()
    source = open_source(folder / "rings", sinks=(found,))
    catch_up(source)
    source.close()
    return found.requests


def _parts(found: list[FinalRequest]) -> Parts:
    """Group requests by part; the order distinguishes answers to one prompt."""
    parts: Parts = defaultdict(dict)
    for request in sorted(found, key=lambda one: int(one.request_id.rpartition("-")[2])):
        part, _, number = (request.external_id or "").rpartition("-")
        if part in ("calibrate", "clean", "fault"):
            same = sum(name.startswith(f"{number}/") for name in parts[part])
            parts[part][f"{number}/{same}"] = request
    return parts


class Truth:
    """Measured delays of each request, by clocks independent of the ledger.

    Attributes:
        notes: further fields of the run's result.
    """

    def __init__(
        self, scenario: Scenario, folder: Path, found: list[FinalRequest], readings: Readings
    ) -> None:
        strikes, steps = (
            _decoded(folder, "strikes", list[FaultInterval]),
            _decoded(folder, "steps", list[Forward]),
        )
        self._metric = scenario.metric
        self.notes = _bytes_unread(readings)
        self._struck: Spans = defaultdict(list)
        self._robbed: Spans = defaultdict(list)
        for step in steps:
            robbed = (step.start_ns, step.start_ns + step.robbed_ns)
            before = (step.start_ns - step.robbed_before_ns, step.start_ns)
            for name in step.request_ids:
                is_within_gap = name not in step.chunks
                self._robbed[name] += (before, robbed) if is_within_gap else (robbed,)
        if scenario.oversized:
            _add_interference(self._struck, steps, found)
        elif scenario.slow_readers:
            _add_unread(self._struck, strikes, found, readings)
        elif scenario.co_tenants:
            self._struck = self._robbed
        else:
            for strike in strikes:
                for name in strike.request_ids if strike.what != "complete" else ():
                    self._struck[name].append((strike.start_ns, strike.end_ns))
            held = {s.request_ids[0] for s in strikes if s.what == "held"}
            _add_recomputing(self._struck, steps, held)

    def injected_ns(self, request: FinalRequest) -> int:
        """Return a request's injected delay within the metric's span, in nanoseconds."""
        return self._within(request, self._struck)

    def robbed_ns(self, request: FinalRequest) -> int:
        """Return the nanoseconds that the step loop's thread waited for a core without a fault."""
        return self._within(request, self._robbed)

    def _within(self, request: FinalRequest, spans: Spans) -> int:
        first_ns, last_ns = request.first_token_ns, request.last_token_ns
        if first_ns is None or last_ns is None:
            return 0
        since_ns = first_ns if self._metric in ("tbt", "tpot") else request.arrived_ns
        until_ns = first_ns if self._metric == "ttft" else last_ns
        return sum(
            max(0, min(end_ns, until_ns) - max(start_ns, since_ns))
            for start_ns, end_ns in spans[request.request_id]
        )


def _add_unread(
    spans: Spans, strikes: list[FaultInterval], found: list[FinalRequest], readings: Readings
) -> None:
    """Add the time from an answer's completion in the API server until its client reads on."""
    complete = {s.request_ids[0]: s.end_ns for s in strikes if s.what == "complete"}
    for request in found:
        reading = readings.get(request.external_id or "")
        at_ns = complete.get(request.request_id)
        if reading is not None and reading.resumed_ns is not None and at_ns is not None:
            spans[request.request_id].append((at_ns, reading.resumed_ns))


def _bytes_unread(readings: Readings) -> dict[str, int]:
    """Return the bytes that slow clients left unread: at the end, and when they read on."""
    slow = [one for one in readings.values() if one.resumed_ns is not None]
    if not slow:
        return {}
    return {
        "least_stream_bytes": min(one.num_bytes for one in slow),
        "usual_stream_bytes": round(
            median(one.num_bytes for one in readings.values() if one.resumed_ns is None)
        ),
        "least_unread_bytes": min(one.unread_bytes for one in slow),
    }


def _add_interference(spans: Spans, steps: list[Forward], found: list[FinalRequest]) -> None:
    """Add the extra time of steps with an oversized prompt over decode-only steps of that size."""
    oversized = {r.request_id for r in found if (r.external_id or "").startswith("big-")}
    alone_ns: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        if not step.chunks:
            took_ns = step.end_ns - step.start_ns - step.robbed_ns
            alone_ns[len(step.request_ids)].append(took_ns)
    for step in steps:
        if not oversized.intersection(step.chunks):
            continue
        decoding = [name for name in step.request_ids if name not in step.chunks]
        if not decoding or len(decoding) not in alone_ns:
            continue
        usual_ns = round(median(alone_ns[len(decoding)]))
        for name in decoding:
            spans[name].append((step.start_ns + usual_ns, step.end_ns - step.robbed_ns))


def _add_recomputing(spans: Spans, steps: list[Forward], held: set[str]) -> None:
    """Add the steps in which preempted requests recomputed their tokens."""
    has_computed: set[str] = set()
    for step in steps:
        for name in held.intersection(step.chunks):
            if name in has_computed:
                spans[name].append((step.start_ns, step.end_ns))
            has_computed.add(name)


T = TypeVar("T", FaultInterval, Forward)


def _decoded(folder: Path, name: str, kind: type[list[T]]) -> list[T]:
    found: list[T] = []
    for path in folder.glob(f"{name}-*.json"):
        found += msgspec.json.decode(path.read_bytes(), type=kind)
    return sorted(found, key=lambda one: one.start_ns)


# --- the machine ----------------------------------------------------------------------------------


def _port(server: subprocess.Popen[bytes], folder: Path) -> int:
    deadline_s = time.monotonic() + _START_S
    while not (folder / "port").exists():
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("the server did not come up")
        time.sleep(0.05)
    return int((folder / "port").read_text(encoding="utf-8"))


def _idlest_core() -> int:
    """Return the least used core over a short interval."""
    before = _idle_by_core()
    time.sleep(_LOOK_S)
    after = _idle_by_core()
    return max(os.sched_getaffinity(0), key=lambda core: after[core] - before[core])


def _idle_by_core() -> dict[int, int]:
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    cores = [line.split() for line in lines if line.startswith("cpu") and line[3].isdigit()]
    return {int(fields[0][3:]): int(fields[4]) for fields in cores}


def _ours_s() -> float:
    """Return the processor time of this process and its ended children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _busy_s() -> float:
    """Return the processor time of all cores since boot."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    ticks = list(map(int, fields))
    idle = ticks[3] + ticks[4]
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")
