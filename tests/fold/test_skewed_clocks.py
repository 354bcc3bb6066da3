"""Front ends with another CLOCK_MONOTONIC: their requests are joined, and the skew is reported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pytest
from inferscope_jsonl import JsonlExporter

from inferscope.cli.doctor.command import examine
from inferscope.daemon.engines import Engines
from inferscope.fold.view import snapshot
from inferscope.probe import EngineInfo, Probe, SystemClock
from inferscope.readers import ring_follower as follow
from inferscope.readers.ring_follower import RingFollower
from inferscope.readers.shifting import shifted
from inferscope.readers.source import RecordingSource, RingSource, open_source
from inferscope.records import Clock, ProbeHealth, RequestEvent
from inferscope.ring.discovery import ring_paths
from inferscope.ring.recording import RecordingWriter
from tests.children import child
from tests.fold.scripts import MS, Finals, Script

S = 1_000_000_000


class OtherClock:
    """Clocks of a time namespace."""

    def __init__(self, ahead_ns: int) -> None:
        self.ahead_ns = ahead_ns

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def real_ns(self) -> int:
        return time.time_ns()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "engine")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    return tmp_path / "engine"


def serve(core: Probe, front: Probe, *, name: str = "a") -> None:
    """Serve one request of two tokens."""
    asked = front.received(name)
    front.tokenised(asked, 8)
    mine = core.queued(name, prompt_tokens=8)
    core.admitted(mine)
    for step in range(2):
        now_ns = core.clock.monotonic_ns()
        core.plan(step, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1)
        core.start(step)
        time.sleep(0.002)
        core.stop(step)
        rows = {"phases": [step], "tokens": [8 - 7 * step], "contexts": [8 * step]}
        core.slices(step, requests=[mine], sampled=[1], **rows)
        core.emitted([mine], [1], step=step)
        if not step:
            front.first_byte(asked)
        front.emitted([asked], [1])
    core.finished(mine, "stop")
    front.last_byte(asked)


def fold(source: RingSource | RecordingSource, finals: Finals, num: int = 1) -> None:
    deadline_s = time.monotonic() + 30
    while len(finals.requests) < num and not source.has_ended:
        if not source.advance():
            assert time.monotonic() < deadline_s, "it does not become final"
            time.sleep(0.005)


@pytest.mark.thorough
@pytest.mark.parametrize("ahead_s", [-3000, 0, 1, 3600])
@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("is_core_too", [False, True])
def test_a_request_is_one_whatever_the_clock_of_its_front_end(
    folder: Path, ahead_s: int, has_ended: bool, is_core_too: bool
) -> None:
    began_ns = time.monotonic_ns()
    ahead_s = max(ahead_s, -(began_ns // 2 // S))  # no negative time on a machine just booted
    other = OtherClock(ahead_s * S)
    core = Probe.open(EngineInfo(0, "toy"), clock=other if is_core_too else None)
    front = Probe.open(EngineInfo(0, "toy"), role="frontend", clock=other)
    serve(core, front)
    ended_ns = time.monotonic_ns()
    if has_ended:
        core.close()
        front.close()
    finals = Finals()
    recording = RecordingWriter(folder.parent / "run.isr")
    source = RingSource(
        lambda: folder.glob("*.ring"), name="t", sinks=(finals,), recording=recording
    )
    fold(source, finals)
    skewed = source.collector.skewed_clocks()
    doctor = [finding.found for finding in examine() if finding.name == "clock"]
    source.close()
    core.close()
    front.close()
    final = finals.only()
    assert (final.arrived_at, final.delivered_at, final.output_tokens) == ("http", "http", 2)
    assert not final.joined_late
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert final.delivered_ns - final.arrived_ns <= ended_ns - began_ns + 300 * MS
    is_together = is_core_too and has_ended and ahead_s < 0  # no record shows the other namespace
    roles = ["core", "frontend"] if is_core_too else ["frontend"]
    expected = roles if ahead_s and not is_together else []
    assert sorted(one.role for one in skewed) == expected
    for one in skewed:
        assert one.is_corrected
        assert abs(one.skew_ns + ahead_s * S) < 200 * MS
    assert len(source.notes()) == len(expected) == (len(doctor) or len(expected) * has_ended)
    if not is_together:
        assert began_ns - 300 * MS <= final.arrived_ns <= ended_ns + 300 * MS
    again = Finals()
    replay = open_source(folder.parent / "run.isr", sinks=(again,))
    fold(replay, again)
    assert again.only() == final
    assert replay.collector.skewed_clocks() == skewed
    replay.close()


def test_a_wall_clock_that_is_set_between_two_starts_is_no_skew(folder: Path) -> None:
    class Earlier(OtherClock):
        def real_ns(self) -> int:
            return time.time_ns() - 7200 * S

    core = Probe.open(EngineInfo(0, "toy"), clock=Earlier(0))
    front = Probe.open(EngineInfo(0, "toy"), role="frontend", clock=OtherClock(0))
    serve(core, front)
    finals = Finals()
    source = RingSource(lambda: folder.glob("*.ring"), name="t", sinks=(finals,))
    fold(source, finals)
    assert not any(one.is_corrected for one in source.collector.skewed_clocks())
    assert finals.only().arrived_at == "http"
    source.close()
    core.close()
    front.close()


def skewed_script(skew_ns: int, *, wall_jump_ns: int = 0) -> Script:
    """Return records as an earlier reader stored them, without correction."""
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    for at_s in (0, 10, 20):
        script.at(at_s * 1000)
        for ring in (core, front):
            jump_ns = wall_jump_ns if at_s > 5 else 0
            ring.write(Clock(script.now_ns, script.now_ns + jump_ns))
    later = script.entries[2:] if wall_jump_ns else script.entries
    script.entries = [
        (number, shifted(record, skew_ns) if number == front.number else record)
        for number, record in (*script.entries[: len(script.entries) - len(later)], *later)
    ]
    return script


@pytest.mark.parametrize("skew_ns", [-900 * S, 0, 5 * S])
def test_a_skew_that_no_reader_corrected_is_reported(skew_ns: int) -> None:
    collector, _ = skewed_script(skew_ns).play()
    found = collector.skewed_clocks()
    view = snapshot(collector, window_ns=S, mode="ended").engines[0]
    assert view.health.skewed_clocks == found == collector.totals().skewed_clocks
    skews = [(one.role, one.skew_ns, one.is_corrected) for one in found]
    assert skews == ([("frontend", -skew_ns, False)] if skew_ns else [])


def test_a_wall_clock_that_is_set_is_not_reported() -> None:
    collector, _ = skewed_script(0, wall_jump_ns=7200 * S).play()
    assert collector.skewed_clocks() == ()


def test_a_collector_logs_it_once_and_an_export_ends_with_it(folder: Path) -> None:
    core = Probe.open(EngineInfo(0, "toy"))
    front = Probe.open(EngineInfo(0, "toy"), role="frontend", clock=OtherClock(3600 * S))
    engines = Engines(folder.parent, sink=Finals(), clock=SystemClock())
    deadline_s = time.monotonic() + 30
    while not any(view.health.skewed_clocks for view in engines.snapshot().engines):
        assert time.monotonic() < deadline_s
        engines.advance()
    engines.snapshot()
    engines.close()
    core.close()
    front.close()
    (line,) = engines.notes
    assert "the clock of frontend 0 of engine" in line
    out = BytesIO()
    source = RingSource(lambda: folder.glob("*.ring"), name="t")
    while not source.has_ended:
        source.advance()
    JsonlExporter(out).close(source.collector.devices(), source.collector.totals())
    source.close()
    (skewed,) = json.loads(out.getvalue().splitlines()[-1])["skewed_clocks"]
    assert (skewed["engine"], skewed["role"], skewed["rank"]) == ("engine", "frontend", 0)
    assert skewed["is_corrected"]


_FRONT = """
import sys
from inferscope.probe import EngineInfo, Probe
front = Probe.open(EngineInfo(0, "toy"), role="frontend")
print("open", flush=True)
asked = None
for line in sys.stdin:
    word = line.strip()
    if word == "received":
        asked = front.received("a")
        front.tokenised(asked, 8)
    elif word == "emitted":
        front.first_byte(asked)
        front.emitted([asked], [1])
    elif word == "last":
        front.last_byte(asked)
    print(word, flush=True)
front.close()
"""


class ElsewhereFront:
    """Front end in another process, with the calls that `serve` makes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._ask("") == "open"

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def received(self, name: str) -> int:
        assert self._ask("received") == "received"
        return 0

    def tokenised(self, index: int, prompt_tokens: int) -> None:
        """Do nothing: `received` has reported it."""

    def first_byte(self, index: int) -> None:
        assert self._ask("emitted") == "emitted"

    def emitted(self, indices: list[int], tokens: list[int]) -> None:
        """Do nothing: `first_byte` has reported it."""

    def last_byte(self, index: int) -> None:
        assert self._ask("last") == "last"


def test_in_a_real_time_namespace(folder: Path) -> None:
    words = ["unshare", "--time", "--monotonic", "3600", "--fork"]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not there")
    if done.returncode:
        pytest.skip(f"no time namespace: {done.stderr.decode().strip()}")
    core = Probe.open(EngineInfo(0, "toy"))
    with child(
        [*words, "--kill-child", sys.executable, "-c", _FRONT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        serve(core, ElsewhereFront(process))  # type: ignore[arg-type]
        finals = Finals()
        source = RingSource(lambda: folder.glob("*.ring"), name="t", sinks=(finals,))
        fold(source, finals)
        (skewed,) = source.collector.skewed_clocks()
        source.close()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
    core.close()
    final = finals.only()
    assert (final.arrived_at, final.delivered_at) == ("http", "http")
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns < 30 * S
    assert (skewed.role, skewed.is_corrected) == ("frontend", True)
    assert abs(skewed.skew_ns + 3600 * S) < 50 * MS
    assert "3600.0" in skewed.in_words() or "3599.9" in skewed.in_words()


def test_records_hold_no_time_of_the_other_clock(folder: Path) -> None:
    core = Probe.open(EngineInfo(0, "toy"))
    front = Probe.open(EngineInfo(0, "toy"), role="frontend", clock=OtherClock(3600 * S))
    serve(core, front)
    seen = []
    finals = Finals()
    source = RingSource(
        lambda: folder.glob("*.ring"),
        name="t",
        sinks=(finals,),
        listen=lambda number, record: seen.append(record),
    )
    fold(source, finals)
    now_ns = time.monotonic_ns()
    source.close()
    core.close()
    front.close()
    for record in seen:
        assert abs(record.t_ns - now_ns) < 60 * S
        if isinstance(record, RequestEvent):
            assert abs(record.at_ns - now_ns) < 60 * S
        if isinstance(record, ProbeHealth):
            assert abs(record.complete_through_ns - now_ns) < 60 * S


def test_a_time_that_cannot_be_moved_costs_only_its_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "running_skew_ns", lambda reader, here: -3600 * S)
    core = Probe.open(EngineInfo(0, "made-up"), clock=OtherClock(3600 * S))
    core.queued("of no time", prompt_tokens=8, at_ns=-(1 << 63))
    core.queued("good", prompt_tokens=8)
    follower = RingFollower(lambda: ring_paths(folder), SystemClock(), stays=True)
    names: list[str] = []
    deadline_s = time.monotonic() + 30
    while "good" not in names:
        assert time.monotonic() < deadline_s, "it is never recorded"
        items = follower.poll()
        names += [item.record.request_id for item in items if isinstance(item.record, RequestEvent)]
        time.sleep(0.005)
    assert names == ["good"]
    assert follower.num_unknown == 1
    follower.close()
    core.close()
