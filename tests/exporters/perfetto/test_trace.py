"""The trace agrees with the export, and Perfetto's importer understands it to the nanosecond."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_perfetto import PerfettoExporter
from inferscope_perfetto.events import microseconds
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest, FinalStep, KvTransfer, RunTotals
from inferscope.readers.source import catch_up, open_source
from inferscope.records import CounterSample, EngineInfo, Record, RingOpened, StepPlan
from tests.daemon.test_scrape import exported
from tests.exporters.finals import SECOND_NS, step
from tests.exporters.perfetto.importer import Imported, Slice, imported, nanoseconds
from tests.insight.test_why import SAMPLE

TOTALS = RunTotals(1, 0, 0, 0, 0, "digest")


class ParsedTrace:
    """A trace being written, of the sample or by hand."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self.exporter = PerfettoExporter(self._out)

    def read(self) -> Imported:
        """End it, and read it as the importer does."""
        self.exporter.close([], TOTALS)
        return imported(self._out.getvalue())


class Sample:
    """The sample: its trace, its lines, its records."""

    def __init__(self, folder: Path) -> None:
        parsed = ParsedTrace()
        self.plans: list[StepPlan] = []
        self.requests: list[FinalRequest] = []

        class Sink:
            def on_step(_, step: FinalStep) -> None:
                parsed.exporter.on_step(step)

            def on_request(_, request: FinalRequest) -> None:
                self.requests.append(request)
                parsed.exporter.on_request(request)

        def listen(ring: int, record: Record) -> None:
            parsed.exporter.on_record(ring, record)
            if isinstance(record, StepPlan):
                self.plans.append(record)

        source = open_source(SAMPLE, sinks=(Sink(),), listen=listen)
        catch_up(source)
        source.close()
        self.trace = parsed.read()
        self.lines = exported(SAMPLE, folder / "demo.jsonl")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("sample"))


@pytest.mark.thorough
def test_each_step_is_a_slice_of_its_length_divided_as_its_time_was(sample: Sample) -> None:
    steps = sample.of_kind("step")
    (engine,) = {line["engine"] for line in steps}
    tracks = sample.trace.of(f"steps of {engine}")
    found = sorted((each for track in tracks.values() for each in track), key=number)
    assert [number(each) for each in found] == sorted(line["step"] for line in steps)
    by_number = {line["step"]: line for line in steps}
    for each in found:
        line = by_number[number(each)]
        assert each.start_ns + sample.trace.origin_ns == line["start_ns"]
        assert each.end_ns - each.start_ns == line["measured_ns"]
        parts = Counter({part.name: part.end_ns - part.start_ns for part in each.inside})
        for share in line["shares"]:
            parts["prefill" if share["phase"] == "prefill" else "decode"] -= share["ns"]
        parts.subtract(padding=line["padding_ns"], unattributed=line["unattributed_ns"])
        assert not any(parts.values())


def number(step: Slice) -> int:
    return int(step.name.rpartition(" ")[2])


@pytest.mark.thorough
def test_each_request_has_a_track_with_its_phases(sample: Sample) -> None:
    (engine,) = {line["engine"] for line in sample.of_kind("request")}
    tracks = sample.trace.of(f"requests of {engine}")
    assert len(tracks) == len(sample.requests)
    for request in sample.requests:
        (whole,) = tracks[request.external_id or request.request_id]
        assert whole.start_ns + sample.trace.origin_ns == request.arrived_ns
        assert whole.end_ns - whole.start_ns == request.delivered_ns - request.arrived_ns
        by_name = {phase.name: phase for phase in whole.inside}
        if request.first_token_ns is not None and request.last_token_ns is not None:
            decode = by_name.get("decode")
            gap_ns = request.last_token_ns - request.first_token_ns
            assert (decode.end_ns - decode.start_ns if decode else 0) == gap_ns
        ledger = {
            f"{cause}_ms": round(ns / 1e6, 3) for cause, ns in request.ledger_ns.items() if ns
        }
        assert ledger.items() <= whole.args.items()


def test_counters_are_those_of_scheduler_and_steps(sample: Sample) -> None:
    trace, steps = sample.trace, sample.of_kind("step")
    process = f"steps of {steps[0]['engine']}"
    tokens = Counter[str]()
    for line in steps:
        for share in line["shares"]:
            phase = "prefill" if share["phase"] == "prefill" else "decode"
            tokens[phase] += share["tokens"]
    for phase, num in tokens.items():
        assert sum(v for _, v in trace.counters[process, f"tokens in step {phase}"]) == num > 0
    for name, word in (("running", "running"), ("waiting", "waiting")):
        values = [value for _, value in trace.counters[process, f"requests {name}"]]
        assert values == [getattr(plan, word) for plan in sample.plans]
    used = [(t + trace.origin_ns, value) for t, value in trace.counters[process, "KV blocks used"]]
    assert used == [(plan.start_ns, plan.blocks_used) for plan in sample.plans]
    assert max(value for _, value in used) > 0


def test_steps_that_overlap_stand_beside_each_other() -> None:
    parsed = ParsedTrace()
    for index, at_s in enumerate((0.0, 0.000_001, 0.000_002)):
        parsed.exporter.on_step(step(index, at_s))  # each is two microseconds long
    tracks = parsed.read().of("steps of engine")
    assert {name: [number(each) for each in track] for name, track in tracks.items()} == {
        "rank 0": [0, 2],
        "rank 0, overlapping (1)": [1],
    }


def test_replicas_have_tracks_and_counters_of_their_own() -> None:
    parsed = ParsedTrace()
    for rank in (0, 1):
        for dp_rank in (0, 1):
            parsed.exporter.on_step(replace(step(0, 0), dp_rank=dp_rank, rank=rank))
    trace = parsed.read()
    assert set(trace.of("steps of engine")) == {
        "rank 0",
        "rank 1",
        "replica 1 rank 0",
        "replica 1 rank 1",
    }
    # Two ranks compute one batch: its tokens are counted once.
    for replica in ("", "replica 1 "):
        counted = trace.counters["steps of engine", f"{replica}tokens in step decode"]
        assert [value for _, value in counted] == [1]


def test_a_request_that_was_preempted_states_when(sample: Sample) -> None:
    request = next(r for r in sample.requests if r.last_token_ns and not r.joined_late)
    first_ns, last_ns = request.first_token_ns, request.last_token_ns
    assert first_ns is not None
    assert last_ns is not None
    middle_ns = (first_ns + last_ns) // 2
    parsed = ParsedTrace()
    parsed.exporter.on_request(replace(request, preempted_ns=((first_ns - 5, middle_ns),)))
    trace = parsed.read()
    ((track,),) = trace.of(f"requests of {request.engine_id}").values()
    out = [
        (phase.name, each.end_ns - each.start_ns) for phase in track.inside for each in phase.inside
    ]
    assert out == [("prefill", 5), ("decode", middle_ns - first_ns)]


def test_blocks_from_another_worker_stand_beside_the_request(sample: Sample) -> None:
    request = sample.requests[0]
    at_ns = request.arrived_ns
    parsed = ParsedTrace()
    first = KvTransfer(at_ns + 10, at_ns + 30, 4096, "10.0.0.7:5600")
    second = KvTransfer(at_ns + 20, at_ns + 40, 512, "prefill-0", "theirs")
    named = replace(request, external_id="mine", adapter="sql", transfers=(first, second))
    parsed.exporter.on_request(named)
    trace = parsed.read()
    tracks = trace.of(f"requests of {request.engine_id}")
    assert tracks["mine"][0].args["adapter"] == "sql"
    ((one,), (other,)) = (
        tracks["mine, KV transfers"],
        tracks["mine, KV transfers, overlapping (1)"],
    )
    for each, meant in ((one, first), (other, second)):
        assert each.name == "KV transfer"
        assert each.start_ns + trace.origin_ns == meant.start_ns
        assert each.end_ns + trace.origin_ns == meant.end_ns
    assert one.args == {"bytes": 4096, "peer": "10.0.0.7:5600"}
    assert other.args == {"bytes": 512, "peer": "prefill-0", "peer_request": "theirs"}


def test_requests_of_one_name_at_one_time_stand_beside_each_other(sample: Sample) -> None:
    parsed = ParsedTrace()
    for _ in range(2):
        parsed.exporter.on_request(replace(sample.requests[0], external_id="same"))
    tracks = parsed.read().of(f"requests of {sample.requests[0].engine_id}")
    assert set(tracks) == {"same", "same, overlapping (1)"}


def test_samples_of_a_device_are_counters_and_amounts_are_rates() -> None:
    parsed = ParsedTrace()
    at_ns = 10 * SECOND_NS
    values = {"sm_active_share": 0.5, "dram_read_bytes": 1e9, "power_w": 300.0, "pid": 7.0}
    sample = CounterSample(at_ns, "GPU-1", at_ns - SECOND_NS // 2, at_ns, "gpm", values)
    parsed.exporter.on_record(
        1, RingOpened(0, 1, "", "sampler", 0, 1, "", "", 0, 0, synthetic=True)
    )
    parsed.exporter.on_record(1, sample)
    parsed.exporter.on_record(
        1, CounterSample(at_ns, "", at_ns - 1, at_ns, "host", {"cpu_ns": 1.0})
    )
    trace = parsed.read()
    assert {name: [v for _, v in values] for (_, name), values in trace.counters.items()} == {
        "busy (gpm) sm_active_share": [0.5],
        "memory traffic (gpm) dram_read_bytes_per_s": [2e9],
        "power (gpm) power_w": [300.0],
    }
    assert {process for process, _ in trace.counters} == {"device GPU-1"}
    assert trace.other["synthetic"] is True


def test_replicas_have_separate_scheduler_counters() -> None:
    parsed = ParsedTrace()
    for ring, replica in ((1, 0), (2, 1)):
        parsed.exporter.on_record(0, RingOpened(0, ring, "e", "core", 0, 1, "", "", 0, 0))
        parsed.exporter.on_record(ring, EngineInfo(0, "engine", ranks=(0, 0, replica, 0)))
        parsed.exporter.on_record(ring, StepPlan(5, 0, 3, 4, 1, 2 + replica, 0, 0, 0))
    trace = parsed.read()
    assert trace.counters["steps of e", "requests running"][0][1] == 2
    assert trace.counters["steps of e", "replica 1 requests running"][0][1] == 3
    assert not [name for _, name in trace.counters if "KV" in name], "there are none to be used"


@given(st.integers(0, 1 << 52))
def test_times_come_out_to_the_nanosecond(ns: int) -> None:
    assert nanoseconds(microseconds(ns)) == ns


def test_the_trace_begins_at_0_with_the_first_record_of_a_process(sample: Sample) -> None:
    slices = [each for found in sample.trace.slices.values() for each in found]
    first_s = min(each.start_ns for each in slices) / SECOND_NS
    assert 0 <= first_s < 1
    assert not any("ns_before_trace" in each.args for each in slices)


def test_what_began_before_the_first_record_is_cut_there_and_states_by_how_much() -> None:
    parsed = ParsedTrace()
    opened = RingOpened(5, 1, "engine", "core", 0, 1, "h", "b", 5, 0, False, 0)
    parsed.exporter.on_record(0, opened)
    parsed.exporter.on_record(1, EngineInfo(10 * SECOND_NS, "engine"))
    parsed.exporter.on_step(step(0, 9))
    parsed.exporter.on_step(step(1, 10 - 500e-9))
    parsed.exporter.on_step(step(2, 11))
    trace = parsed.read()
    assert trace.origin_ns == 10 * SECOND_NS
    (track,) = trace.of("steps of engine").values()
    assert [each.name.rpartition(" ")[2] for each in track] == ["1", "2"]
    cut, whole = track
    assert (cut.start_ns, cut.end_ns) == (0, 1500)
    assert cut.args["ns_before_trace"] == 500
    assert whole.start_ns == SECOND_NS


def test_a_machine_that_is_up_for_years_makes_no_difference(sample: Sample) -> None:
    years_ns = 20 * 365 * 86_400 * SECOND_NS
    parsed = ParsedTrace()
    for index in range(100):
        parsed.exporter.on_step(step(index, (years_ns + index * 777_777) / SECOND_NS))
    trace = parsed.read()
    (track,) = trace.of("steps of engine").values()
    assert all(each.end_ns - each.start_ns == 2000 for each in track)
