"""The text of a comparison of two recordings, its limits and its findings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from inferscope.errors import BadInput
from inferscope.insight.compare import (
    NO_DIFFERENCE,
    RecordingComparison,
    columns_of,
    compare_recordings,
    finding_changes,
    parse_limit,
)
from inferscope.insight.findings import EngineFindings, Finding
from inferscope.text import (
    DiffDocument,
    DiffEngine,
    DiffSide,
    diff_document,
    diff_page,
    finding_sentence,
)
from tests.insight.recordings import recording
from tests.slo.requests import MS


def side(name: str, **changes: object) -> DiffSide:
    engine = DiffEngine(f"engine-{name}", "vllm", "0.32.0", "tiny", False)
    made = DiffSide(
        name=f"{name}.isr", engines=(engine,), num_requests=120, num_failed=0, num_left_out=0,
        span_ns=30_000 * MS,
    )  # fmt: skip
    return replace(made, **changes)


def held(*limits: str, prefill: float = 1.3) -> RecordingComparison:
    """Return the comparison with recordings of slower prompts, held against limits."""
    a, b = (
        columns_of(recording(7, load_seed=7, named=True)),
        columns_of(recording(8, load_seed=7, named=True, prefill=prefill)),
    )
    parsed = [parse_limit(text) for text in limits]
    return compare_recordings(a, b, level=0.95, seed=0, change_limits=parsed)


@pytest.fixture(scope="module")
def slower() -> RecordingComparison:
    return held(
        "ttft_mean>+5%", "ttft_mean>+900%", "tbt_p50>+0%", "prefill_own>+1ms", "goodput<-99%"
    )


def document(comparison: RecordingComparison, **changes: object) -> DiffDocument:
    return diff_document(side("a"), side("b", **changes), comparison, ())


# --- the page -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 110])
def test_the_page_states_verdict_causes_and_limits(slower: RecordingComparison, width: int) -> None:
    made = document(slower)
    page = diff_page(made, width=width, ascii=True)
    assert page.isascii()
    whole = " ".join(page.split())
    assert made.verdict.startswith("With B instead of A, TTFT mean is ")
    assert made.verdict in whole
    assert "same 120 requests by name" in whole
    named = whole.partition("TTFT mean: the ledger's rows that differ with it, per request: ")[2]
    assert "prefill_own (" in named.partition(".")[0] + named.partition(".")[2].partition(".")[0]
    assert "ttft_mean>+5%: failed. TTFT mean changed by" in whole
    rows = {row.name: row for row in slower.rows}
    for name in ("prefill_own", "queue"):
        (line,) = (each for each in page.splitlines() if each.startswith(f"{name} "))
        assert f"{rows[name].a / 1e6:.1f}" in line


def test_other_models_engines_and_partly_observed_requests_are_notes(
    slower: RecordingComparison,
) -> None:
    other = DiffEngine("engine-b", "sglang", "0.5.23", "other", True)
    made = document(slower, engines=(other,), num_left_out=3)
    assert "model differs: tiny in A, other in B." in made.notes
    assert "engine differs: vllm in A, sglang in B." in made.notes
    assert "version differs: 0.32.0 in A, 0.5.23 in B." in made.notes
    assert any(note.startswith("3 requests of B were observed in part") for note in made.notes)
    assert "the records of B are synthetic." in made.notes
    assert document(slower).notes == ()


def test_workloads_that_differ_too_much_have_no_verdict() -> None:
    a, b = columns_of(recording(3)), columns_of(recording(4, prompt=8.0, prefill=1 / 8))
    made = document(compare_recordings(a, b, level=0.95, seed=0))
    assert made.verdict.startswith("None: the workloads differ too much to compare.")


# --- limits -------------------------------------------------------------------------------------


def test_a_limit_fails_if_the_change_is_beyond_it_and_shown(slower: RecordingComparison) -> None:
    outcomes = {each.limit: each for each in slower.outcomes}
    assert list(outcomes) == [
        "ttft_mean>+5%", "ttft_mean>+900%", "tbt_p50>+0%", "prefill_own>+1ms", "goodput<-99%",
    ]  # fmt: skip
    assert outcomes["ttft_mean>+5%"].outcome == "failed"
    assert outcomes["ttft_mean>+900%"].outcome == "met"
    assert outcomes["prefill_own>+1ms"].outcome == "failed"
    assert outcomes["goodput<-99%"].outcome == "met"
    row = outcomes["ttft_mean>+5%"].row
    assert outcomes["ttft_mean>+5%"].allowed == pytest.approx(0.05 * row.a)
    assert outcomes["prefill_own>+1ms"].allowed == MS
    assert all(each.row.level == pytest.approx(1 - 0.05 / 5) for each in slower.outcomes)


def test_a_change_that_is_not_shown_does_not_fail() -> None:
    (outcome,) = held("queue>+0ms", prefill=1.0).outcomes
    assert outcome.row.verdict == NO_DIFFERENCE
    assert outcome.outcome == ("not shown" if outcome.row.difference > 0 else "met")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tbt_p98>+5%", "unknown measure tbt_p98. There are: requests, failed"),
        ("nonsense", "is not a limit"),
        ("tbt_p99>5%", "is not a limit"),
        ("tbt_p99>-5%", ">- is not a limit"),
        ("tbt_p99>+5", "takes a time such as 20ms"),
        ("throughput<-5ms", "takes a number of tok/s"),
        ("", "is not a limit"),
    ],
)
def test_an_impossible_limit_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_limit(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "amount", "is_relative"),
    [
        ("tbt_p99>+5%", 0.05, True),
        (" queue > +20ms ", 20 * MS, False),
        ("decode_interference<-1.5s", -1500 * MS, False),
        ("ttft.queue>+100us", 1e5, False),
        ("goodput<-10%", -0.1, True),
        ("throughput<-3", -3, False),
        ("failed>+1%", 0.01, False),
    ],
)
def test_a_limit_is_parsed(text: str, amount: float, is_relative: bool) -> None:
    limit = parse_limit(text)
    assert limit.amount == pytest.approx(amount)
    assert limit.is_relative == is_relative
    assert limit.text == text.strip()


def test_a_limit_on_a_percentile_of_too_few_values_names_the_number() -> None:
    with pytest.raises(BadInput, match="ttft_p99 needs at least 500 requests on each side"):
        held("ttft_p99>+5%")


# --- findings -----------------------------------------------------------------------------------


def found(*findings: tuple[str, float, tuple[str, ...]]) -> Sequence[EngineFindings]:
    made = tuple(
        Finding(name, f"Title of {name}", lost, (), (), "Try it.", causes=causes)
        for name, lost, causes in findings
    )
    return (EngineFindings("e", "tiny", 120, 0, made, None),)


def test_findings_come_go_and_stay(slower: RecordingComparison) -> None:
    a = found(("gone", 0.4, ("decode_own",)), ("stays", 0.2, ("prefill_own",)))
    b = found(("stays", 0.3, ("prefill_own", "decode_own")), ("new", 0.05, ()))
    changes = finding_changes(a, b, slower.rows)
    assert [each.id for each in changes] == ["gone", "stays", "new"]
    gone, stays, new = changes
    assert (gone.a_lost_share, gone.b_lost_share, gone.differs) == (0.4, None, ())
    assert (stays.a_lost_share, stays.b_lost_share) == (0.2, 0.3)
    assert stays.differs == ("prefill_own",)
    assert finding_sentence(gone).startswith("finding, gone in B: Title of gone (40.0% to - of")
    assert "with prefill_own" in finding_sentence(stays)
    assert "no row of it differs" in finding_sentence(new)
