"""The law of a run's report: each number on it is one of the export of the same records.

Expected values are computed from the rows of the JSON Lines export, without the code of the report.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from inferscope_jsonl import JsonlExporter

from inferscope.insight import RequestSource
from inferscope.insight.run import RunFacts, RunSink, with_details
from inferscope.readers import catch_up, open_source
from inferscope.report import render
from inferscope.report.run import Source, run_page
from inferscope.ring import RecordingReader, RecordingWriter
from inferscope.slo import read_objectives
from inferscope.text import why
from tests.report.html import Parsed, parse

pytestmark = pytest.mark.thorough

SAMPLES = Path(__file__).parents[2] / "samples"
Row = dict[str, Any]
Values = dict[str, float | None]


class Run:
    """One recording: its report, and the rows of its export, of one fold."""

    def __init__(self, path: Path) -> None:
        objectives = read_objectives(SAMPLES / "slo.yaml")
        sink, out = RunSink(objectives), io.BytesIO()
        exporter = JsonlExporter(out)

        def listen(ring: int, record: Any) -> None:
            exporter.on_record(ring, record)
            sink.on_record(ring, record)

        source = open_source(path, sinks=(sink, exporter), listen=listen)
        sink.watch(source.collector)
        catch_up(source)
        source.close()
        exporter.close(source.collector.devices(), source.collector.totals())
        facts = sink.facts(source.collector)
        again = RequestSource(str(path), recording=path)
        self.facts: RunFacts = with_details(facts, again, objectives)
        self.html = render(run_page(self.facts, Source(path.name, False)))
        self.page: Parsed = parse(self.html)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        self.steps = [row for row in rows if row["kind"] == "step"]
        self.requests = [row for row in rows if row["kind"] == "request"]
        self.devices = [row for row in rows if row["kind"] == "device"]
        (self.run,) = (row for row in rows if row["kind"] == "run")


IDLE_NS = 9_670_060_000_000
"""A time at which no request of the sample is in flight; 36 have finished."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Report on the first seconds of the sample, up to a time without requests."""
    path = tmp_path_factory.mktemp("report") / "demo.isr"
    reader, writer = RecordingReader(SAMPLES / "demo.isr"), RecordingWriter(path)
    for frame in reader.frames():
        if frame.t_ns < IDLE_NS:
            writer.write(frame)
    reader.close()
    writer.close()
    run = Run(path)
    assert len(run.requests) == 36
    return run


def check(run: Run, section: str, expected: Values) -> None:
    """Check that a section has these numbers, and no other."""
    found = run.page.of(section)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (None if value is None else pytest.approx(value, rel=1e-12)), key


def rank_value(values: Iterable[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ttft_of(row: Row) -> int:
    first_ns: int = row["first_token_ns"]
    return first_ns - int(row["arrived_ns"])


def token_times(row: Row) -> list[int]:
    return list(accumulate(row["tbt_ns"], initial=row["first_token_ns"]))


def latencies(run: Run) -> dict[str, list[int]]:
    whole = [row for row in run.requests if not row["joined_late"]]
    return {
        "ttft": [ttft_of(row) for row in whole if row["first_token_ns"] is not None],
        "tbt": [gap for row in whole for gap in row["tbt_ns"]],
        "e2e": [
            row["last_token_ns"] - row["arrived_ns"]
            for row in whole
            if row["finish"] in ("stop", "length")
        ],
    }


def test_latencies_are_those_of_the_export(run: Run) -> None:
    found = run.page.of("latency")
    for name, values in latencies(run).items():
        assert found[f"{name}.num"] == len(values)
        assert found[f"{name}.mean_ns"] == round(sum(values) / len(values))
        assert found[f"{name}.max_ns"] == max(values)
        for percent in (50, 95, 99):
            exact = rank_value(values, percent / 100)
            assert found[f"{name}.p{percent}_ns"] == pytest.approx(exact, rel=0.0051)
    assert len(found) == 18


def test_headlines_are_those_of_the_export(run: Run) -> None:
    span_ns = max(row["delivered_ns"] for row in run.requests) - min(
        row["arrived_ns"] for row in run.requests
    )
    latency = run.page.of("latency")
    percentiles = ("ttft.p50_ns", "ttft.p95_ns", "tbt.p50_ns", "tbt.p99_ns", "e2e.p95_ns")
    expected: Values = {
        "finished": len(run.requests),
        "span_ns": span_ns,
        "finished_s": len(run.requests) * 1e9 / span_ns,
        **{key: latency[key] for key in percentiles},
        "in_flight": 0,
        "prompt_tokens": sum(row["prompt_tokens"] for row in run.requests),
        "output_tokens": sum(row["output_tokens"] for row in run.requests),
        "preemptions": sum(row["preemptions"] for row in run.requests),
    }
    cached = sum(row["cached_tokens"] for row in run.requests)
    expected["cached_share"] = cached / sum(row["prompt_tokens"] for row in run.requests)
    ends = Counter(row["finish"] for row in run.requests)
    expected |= {f"finish.{finish}": num for finish, num in ends.items()}
    check(run, "verdict", expected)


def test_device_time_is_that_of_the_export(run: Run) -> None:
    spent, tokens = Counter[str](), Counter[str]()
    for step in run.steps:
        for share in step["shares"]:
            phase = "prefill" if share["phase"] == "prefill" else "decode"
            spent[phase] += share["ns"]
            tokens[phase] += share["tokens"]
    measured_ns = sum(step["measured_ns"] for step in run.steps)
    found = run.page.of("phases")
    expected: Values = {"steps.measured_ns": measured_ns, "steps.num": len(run.steps)}
    for phase in ("prefill", "decode"):
        alone_ns = found[f"steps.{phase}_alone_ns"]
        assert alone_ns is not None
        expected |= {
            f"steps.{phase}_ns": spent[phase],
            f"steps.{phase}_share": spent[phase] / measured_ns,
            f"steps.{phase}_tokens": tokens[phase],
            f"steps.{phase}_alone_ns": alone_ns,  # modelled; no row of the export has it
            f"steps.{phase}_saved_share": (alone_ns - spent[phase]) / alone_ns,
        }
    (device,) = run.devices
    expected["device.0.wall_ns"] = device["wall_ns"]
    expected |= {f"device.0.{use}_ns": ns for use, ns in device["ns_by"].items() if ns}
    check(run, "phases", expected)


def e2e_ledger(row: Row) -> dict[str, int]:
    """Return a request's ledger up to its last token: delivery and output end it."""
    ledger, tail_ns = dict(row["ledger_ns"]), row["delivered_ns"] - row["last_token_ns"]
    for cause in ("delivery", "output"):
        cut_ns = min(tail_ns, ledger.get(cause, 0))
        ledger[cause] = ledger.get(cause, 0) - cut_ns
        tail_ns -= cut_ns
    assert tail_ns == 0
    return {cause: ns for cause, ns in ledger.items() if ns}


def test_ledgers_by_rank_are_means_of_the_export(run: Run) -> None:
    found = run.page.of("ledger")
    expected: Values = {}
    for name, took, ledger in (
        ("e2e", lambda row: row["last_token_ns"] - row["arrived_ns"], e2e_ledger),
        ("ttft", ttft_of, lambda row: row["ttft_ledger_ns"]),
    ):
        ordered = sorted(run.requests, key=took)
        ledgers = [ledger(row) for row in ordered]
        causes = {cause for each in ledgers for cause, ns in each.items() if ns}
        bands = (f"{name}.{band}.num" for band in range(4))
        sizes = [int(found[key] or 0) for key in bands if key in found]
        assert sum(sizes) == len(ordered)
        for reached, share in zip(accumulate(sizes), (0.5, 0.9, 0.99, 1.0), strict=False):
            assert reached >= share * len(ordered)
        end = 0
        for band, size in enumerate(sizes):
            start, end = end, end + size
            sums = Counter[str]()
            for each in ledgers[start:end]:
                sums.update(each)
            expected[f"{name}.{band}.num"] = size
            expected[f"{name}.{band}.sum_ns"] = sum(map(took, ordered[start:end])) / size
            for cause in causes:
                expected[f"{name}.{band}.{cause}_ns"] = sums[cause] / size
    check(run, "ledger", expected)


def test_the_slowest_requests_are_those_of_the_export(run: Run) -> None:
    slowest = sorted(run.requests, key=lambda row: row["arrived_ns"] - row["delivered_ns"])[:10]
    expected: Values = {}
    for number, row in enumerate(slowest, 1):
        gaps, life_ns = row["tbt_ns"], row["delivered_ns"] - row["arrived_ns"]
        expected |= {
            f"{number}.{key}": row[key]
            for key in ("prompt_tokens", "cached_tokens", "output_tokens")
        }
        expected[f"{number}.ttft_ns"] = ttft_of(row)
        expected[f"{number}.tbt_mean_ns"] = round(sum(gaps) / len(gaps)) if gaps else None
        expected[f"{number}.longest_gap_ns"] = max(gaps, default=None)
        expected[f"{number}.total_ns"] = expected[f"{number}.ledger.sum_ns"] = life_ns
        expected |= {
            f"{number}.ledger.{cause}_ns": ns for cause, ns in row["ledger_ns"].items() if ns
        }
        assert row["external_id"] in run.page.texts
    check(run, "slowest", expected)


def test_the_slowest_requests_have_their_evidence(run: Run) -> None:
    (engine,) = run.facts.engines
    assert len(engine.explained) == 5
    for request in engine.slowest[:5]:
        explained = why(engine.explained[request.request_id])
        assert explained.summary in run.page.texts
        assert {row.sentence for row in explained.rows if row.ns} <= set(run.page.texts)


def test_the_roofline_is_made_of_the_export(run: Run) -> None:
    expected: Values = {}
    for phase in ("prefill", "decode"):
        parts = [row["by_phase"][phase] for row in run.requests]
        compute_ns = sum(row["compute_ns"][phase] for row in run.requests)
        flops = sum(part["flops"] for part in parts)
        moved = sum(part["hbm_read_bytes"] + part["hbm_write_bytes"] for part in parts)
        tokens = sum(part["tokens"] for part in parts)
        expected |= {
            f"{phase}.tokens": tokens,
            f"{phase}.compute_ns": compute_ns,
            f"{phase}.tok_s": tokens * 1e9 / compute_ns,
            f"{phase}.flops_s": flops * 1e9 / compute_ns,
            f"{phase}.bytes_s": moved * 1e9 / compute_ns,
            f"{phase}.flops_per_byte": flops / moved,
        }
    check(run, "roofline", expected)


def test_the_worst_second_is_that_of_the_export(run: Run) -> None:
    sums: defaultdict[int, list[int]] = defaultdict(list)
    for row in run.requests:
        for end_ns, gap_ns in zip(token_times(row)[1:], row["tbt_ns"], strict=True):
            sums[end_ns // 10**9].append(gap_ns)
    waits = {at: sum(gap * gap for gap in gaps) / sum(gaps) for at, gaps in sums.items()}
    second = max(waits, key=lambda at: waits[at])
    start_ns = second * 10**9
    overlapping = [
        step
        for step in run.steps
        if step["end_ns"] > start_ns and step["start_ns"] < start_ns + 10**9
    ]
    overlapping.sort(key=lambda step: (step["start_ns"] - step["end_ns"], step["start_ns"]))
    expected: Values = {
        "start_ns": start_ns,
        "mean_wait_ns": round(waits[second]),
        "num_gaps": len(sums[second]),
        "longest_gap_ns": max(sums[second]),
        "median_ns": run.page.of("latency")["tbt.p50_ns"],
    }
    for key, step in enumerate(overlapping[:12], 1):
        tokens, spent = Counter[bool](), Counter[bool]()
        for share in step["shares"]:
            tokens[share["phase"] == "prefill"] += share["tokens"]
            spent[share["phase"] == "prefill"] += share["ns"]
        expected |= {
            f"{key}.step": step["step"],
            f"{key}.at_ns": step["start_ns"] - start_ns,
            f"{key}.took_ns": step["end_ns"] - step["start_ns"],
            f"{key}.requests": len({share["request"] for share in step["shares"]}),
            f"{key}.prefill_tokens": tokens[True],
            f"{key}.decode_tokens": tokens[False],
            f"{key}.prefill_share": spent[True] / (spent[True] + spent[False]),
        }
    check(run, "worst-second", expected)


def test_objectives_are_judged_as_the_export_shows(run: Run) -> None:
    found = run.page.of("objectives")
    late = [row for row in run.requests if ttft_of(row) > 500_000_000]
    gapped = [row for row in run.requests if max(row["tbt_ns"], default=0) > 200_000_000]
    assert found["ttft.bad"] == len(late)
    assert found["tbt.bad"] == len(gapped)
    either = {row["request"] for row in (*late, *gapped)}
    assert found["goodput.bad"] == len(either)
    assert found["availability.good"] == len(run.requests)
    for name, allowed in (("ttft", 0.01), ("tbt", 0.01), ("goodput", 0.05)):
        good, bad = found[f"{name}.good"], found[f"{name}.bad"]
        assert good is not None
        assert bad is not None
        assert found[f"{name}.good_share"] == good / (good + bad)
        assert found[f"{name}.burn"] == pytest.approx(bad / (allowed * (good + bad)))
        causes = [value for key, value in found.items() if key.startswith(f"{name}.causes.")]
        assert sum(causes) == bad  # type: ignore[arg-type]


def test_counts_of_records_are_those_of_the_export(run: Run) -> None:
    keys = ("records", "lost", "late", "unjoined", "probe_cost_ns")
    check(run, "records", {key: run.run[key] for key in keys})
    assert run.run["digest"] in run.page.texts


def test_every_number_on_the_page_belongs_to_a_section_of_these_tests(run: Run) -> None:
    tested = {"latency", "verdict", "phases", "ledger", "slowest", "roofline", "worst-second"}
    tested |= {"objectives", "records"}
    elsewhere = {"findings", "machine"}  # tested with the findings and the engine's description
    assert {section for section, _ in run.page.values} <= tested | elsewhere


def test_the_evidence_of_findings_is_on_the_page(run: Run) -> None:
    (engine,) = run.facts.engines
    assert engine.found.findings
    numbers = {
        f"{number}.{each.name}": each.value
        for number, finding in enumerate(engine.found.findings, 1)
        for each in finding.evidence
        if not isinstance(each.value, str)
    }
    assert run.page.of("findings") == pytest.approx(numbers)
    for finding in engine.found.findings:
        assert finding.title in run.page.texts
