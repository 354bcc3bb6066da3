from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.load.open_loop import ClientTimes, Outcome
from inferscope.load.report import live_line, summary_text
from inferscope.load.summary import LoadStats

MS = 1_000_000


def request(
    outcome: Outcome = "finished", *, at_ms: int = 0, late_ms: int = 0, error: str = "HTTP 500"
) -> ClientTimes:
    """Return a request that took 20 ms to its first token, then 5 and 7, 90 ms in all."""
    scheduled_ns = 10**12 + at_ms * MS
    sent_ns = scheduled_ns + late_ms * MS
    times = ClientTimes("a", "chat", scheduled_ns, sent_ns, 0, outcome=outcome)
    times.ended_ns = sent_ns + 90 * MS
    if outcome == "finished":
        times.first_token_ns, times.last_token_ns = sent_ns + 20 * MS, sent_ns + 32 * MS
        times.tbt_ns = [5 * MS, 7 * MS]
        times.tokens, times.prompt_tokens, times.output_tokens = 3, 100, 4
    elif outcome == "error":
        times.error, times.detail = error, "words"
    return times


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    summary = LoadStats().summary()
    assert summary.ttft.p50_ns is None
    assert summary.prompt_tokens is None
    assert "Nothing was sent" in summary_text(summary)


def test_a_servers_text_moves_no_cursor() -> None:
    tally, failed = LoadStats(), request("error")
    failed.detail = "\x1b[2J\x9b5m\r\n"
    tally.add(failed)
    assert "1 x HTTP 500: ?[2J?5m??" in (text := summary_text(tally.summary()))
    assert text.replace("\n", "").isprintable()


@given(st.lists(st.sampled_from(get_args(Outcome)), max_size=30))
def test_every_request_is_counted_under_one_heading(outcomes: list[Outcome]) -> None:
    tally = LoadStats()
    for outcome in outcomes:
        tally.add(request(outcome))
    summary = tally.summary()
    assert summary.scheduled == len(outcomes)
    assert summary.scheduled == (
        summary.finished + sum(summary.failed.values()) + summary.refused + summary.abandoned
    )
    assert summary.sent == summary.scheduled - summary.refused
    assert summary.finished == outcomes.count("finished")
    assert summary.ttft.num == summary.e2e.num == summary.finished
    assert summary.tbt.num == 2 * summary.finished


def test_latencies_start_at_sending_and_lateness_is_separate() -> None:
    tally = LoadStats()
    tally.add(request(late_ms=50))
    summary = tally.summary()
    assert summary.ttft.max_ns == 20 * MS
    assert summary.e2e.max_ns == 32 * MS
    assert summary.tbt.max_ns == 7 * MS
    assert summary.late.max_ns == 50 * MS


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end() -> None:
    tally = LoadStats()
    for at_ms in (0, 910):
        tally.add(request(at_ms=at_ms))
    summary = tally.summary()
    assert summary.span_ns == 1000 * MS
    assert summary.requests_s == 2.0
    assert summary.output_tok_s == 8.0
    assert (summary.prompt_tokens, summary.output_tokens) == (200, 8)


def test_failures_are_sorted_by_how_often_they_came() -> None:
    tally = LoadStats()
    for error in ("timeout", "HTTP 429", "HTTP 429"):
        tally.add(request("error", error=error))
    assert list(tally.summary().failed.items()) == [("HTTP 429", 2), ("timeout", 1)]
    assert "2 x HTTP 429: words" in summary_text(tally.summary())


@pytest.mark.parametrize(("late_ms", "message"), [(4, "kept up"), (6, "FELL BEHIND")])
def test_a_generator_that_was_late_reports_it_with_numbers(late_ms: int, message: str) -> None:
    tally = LoadStats()
    tally.add(request(late_ms=late_ms))
    output = summary_text(tally.summary())
    assert message in output
    assert f"{late_ms}.0 ms at most" in output
    assert tally.summary().fell_behind == (message == "FELL BEHIND")


def test_tokens_counted_for_want_of_usage_are_marked() -> None:
    tally = LoadStats()
    without = request()
    without.prompt_tokens = without.output_tokens = None
    tally.add(without)
    summary = tally.summary()
    assert (summary.prompt_tokens, summary.output_tokens) == (None, 3)
    assert "the server sent no usage" in summary_text(summary)


@pytest.mark.parametrize(
    ("cached", "repeated", "was_seen"),
    [(32, 0.0, False), (90, 0.0, True), (90, 0.5, True), (50, 0.5, False), (90, 0.9, False)],
)
def test_a_load_that_measures_the_prefix_cache_reports_it(
    cached: int, repeated: float, was_seen: bool
) -> None:
    tally = LoadStats()
    for _ in range(3):
        one = request()
        one.cached_tokens, one.repeated_share = cached, repeated
        tally.add(one)
    summary = tally.summary()
    assert summary.cached_share == cached / 100
    assert summary.was_seen_before == was_seen
    assert ("THE SERVER HAD CACHED THESE PROMPTS" in summary_text(summary)) == was_seen
    assert f"({3 * cached} from its cache, {cached}%)" in summary_text(summary)


def test_the_line_shown_while_it_runs_has_what_matters() -> None:
    tally = LoadStats()
    tally.add(request())
    line = live_line(tally, elapsed_s=1.5, num_scheduled=3, num_open=2)
    assert "\n" not in line
    assert "sent 3  open 2  done 1  failed 0" in line
    assert "TTFT p50 20.0 ms  late p99" in line


@pytest.mark.parametrize("num", [0, 99, 12_345, 10**9, 10**15])
@pytest.mark.parametrize("elapsed_s", [0.0, 99_999.9, 1e9])
def test_the_line_shown_while_it_runs_fits_80_columns(num: int, elapsed_s: float) -> None:
    tally = LoadStats()
    tally.add(request())
    line = live_line(tally, elapsed_s=elapsed_s, num_scheduled=num, num_open=num)
    assert len(line) < 80
    assert f"sent {num}  open {num}" in line
