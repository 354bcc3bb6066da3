"""The table of shares sums to the measured time, whatever the rule and whatever it is summed by."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from inferscope.attribution.split_rules import RULES
from inferscope.fold.fold import Collector
from inferscope.insight.shares import By, Shares, SharesSink
from inferscope.readers.source import RecordingSource
from inferscope.text.shares import shares_json, shares_lines
from tests.fold.scripts import MS, Finals, Script

SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"
BYS: tuple[By, ...] = get_args(By)


def folded(
    script: Script, rule: str, *, until_ms: float = 900
) -> tuple[SharesSink, Finals, Collector]:
    """Fold a script into a tally, up to an instant after its last step."""
    tally, kept = SharesSink(rule), Finals()
    collector = Collector(tally, kept)
    for item in script.items(until_ms=until_ms):
        collector.fold(item.ring, item.record)
    return tally, kept, collector


def two_tenants() -> Script:
    """Steps of two tenants and of no tenant, one padded, one a dummy; one in progress."""
    script = Script()
    core = script.ring()
    a = core.queued("a", attributes={"tenant": "north"}, external_id="chat-a")
    b = core.queued("b", attributes={"tenant": "south"})
    c = core.queued("c", attributes={"tenant": "north"})
    d = core.queued("d")
    for index in (a, b, c, d):
        core.admitted(index)
    core.step(0, [(a, 700, 0)], start_ms=1, end_ms=21)
    core.step(1, [(a, 1, 700), (b, 300, 0), (c, 200, 100)], start_ms=30, end_ms=60)
    script.at(70)
    core.span(2, 62, 70, dummy=True)
    script.at(90)
    core.span(3, 72, 90, padded_tokens=64)
    core.slices(3, [(a, 1, 701), (b, 1, 300), (c, 1, 300), (d, 8, 0)])
    core.emitted([a, b, c])
    for index in (a, b):
        core.finished(index)
    core.health()
    return script


def assert_sums(table: Shares) -> None:
    rows_ns = sum(row.whole.share_ns for row in table.rows)
    beside_ns = table.padding_ns + table.idle_ns + table.unattributed_ns
    assert rows_ns + beside_ns == table.measured_ns
    assert all(row.prefill.share_ns >= 0 and row.decode.share_ns >= 0 for row in table.rows)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", BYS)
def test_rows_and_unattributed_time_sum_to_the_measured_time(rule: str, by: By) -> None:
    tally, kept, collector = folded(two_tenants(), rule)
    table = tally.table(by, collector)
    assert_sums(table)
    assert table.measured_ns == sum(step.measured_ns for step in kept.steps) == 76 * MS
    assert table.idle_ns == 8 * MS
    assert table.padding_ns == kept.steps[3].padding_ns > 0
    assert table.unattributed_ns == 0
    assert table.alone_ns == 20 * MS


def test_tenants_are_summed_those_still_under_way_too() -> None:
    tally, kept, collector = folded(two_tenants(), "fair")
    table = tally.table("tenant", collector)
    sums = Counter[str | None]()
    tenants = {"a": "north", "b": "south", "c": "north", "d": None}
    for step in kept.steps:
        for request_id, ns in zip(step.request_ids, step.shares_ns.tolist(), strict=True):
            sums[tenants[request_id]] += ns
    assert {request.request_id for request in kept.requests} == {"a", "b"}  # c, d go on
    assert {row.name: row.whole.share_ns for row in table.rows} == sums
    shares = [row.whole.share_ns for row in table.rows]
    assert shares == sorted(shares, reverse=True)


def test_requests_keep_their_names_and_phases_their_tokens() -> None:
    tally, _, collector = folded(two_tenants(), "fair")
    rows = {row.name: row for row in tally.table("request", collector).rows}
    assert rows["a"].external_id == "chat-a"
    assert rows["a"].engine == "engine"
    assert (rows["a"].prefill.tokens, rows["a"].decode.tokens) == (700, 2)
    assert (rows["d"].prefill.tokens, rows["d"].decode.tokens) == (8, 0)
    prefill, decode = sorted(
        tally.table("phase", collector).rows, key=lambda row: row.name or "", reverse=True
    )
    assert (prefill.name, prefill.whole.tokens) == ("prefill", 1208)
    assert (decode.name, decode.whole.tokens) == ("decode", 4)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_a_recorded_run_is_divided_as_its_requests_are(rule: str) -> None:
    tally, kept = SharesSink(rule), Finals()
    source = RecordingSource(SAMPLE, sinks=(tally, kept))
    source.advance()
    source.close()
    table = tally.table("request", source.collector)
    assert_sums(table)
    assert table.measured_ns == sum(step.measured_ns for step in kept.steps)
    if rule == "fair":
        rows = {row.name: row for row in table.rows}
        for request in kept.requests:
            row = rows[request.request_id]
            assert (row.prefill.share_ns, row.decode.share_ns) == (
                request.prefill_ns,
                request.decode_ns,
            )


def test_a_request_that_shared_no_step_has_no_discount() -> None:
    script = Script()
    core = script.ring()
    one, two = core.queued("a"), core.queued("b")
    core.admitted(one)
    core.step(0, [(one, 100, 0)], start_ms=1, end_ms=9)
    core.finished(one)
    core.admitted(two)
    core.step(1, [(two, 50, 0)], start_ms=10, end_ms=19)
    core.health()
    tally, _, collector = folded(script, "fair")
    for row in tally.table("request", collector).rows:
        assert abs(row.whole.discount_ns) <= 1
        assert abs(row.whole.share_ns - row.whole.marginal_ns) <= 1


def test_text_states_the_rule_and_what_is_modelled_and_hides_no_row_unsummed() -> None:
    tally, _, collector = folded(two_tenants(), "token")
    table = tally.table("request", collector)
    text = shares_lines(table, most=2)
    assert "`token` (Aumann-Shapley" in text
    assert "Modelled" in text
    assert "Apportioned" in text
    assert "chat-a (a)" in text
    assert "2 smaller ones" in text
    assert "idle (dummy steps)" in text
    assert shares_lines(table, most=None, ascii=True).isascii()
    assert len(shares_lines(table, most=None).splitlines()) == len(text.splitlines()) + 1


@pytest.fixture(scope="module")
def of_the_sample() -> Shares:
    tally = SharesSink("fair")
    source = RecordingSource(SAMPLE, sinks=(tally,))
    source.advance()
    source.close()
    return tally.table("request", source.collector)


@pytest.mark.thorough
@pytest.mark.parametrize("most", [1, 3, 7, 30, None])
def test_what_is_printed_adds_up(of_the_sample: Shares, most: int | None) -> None:
    _, table, *_ = shares_lines(of_the_sample, most=most, width=110).split("\n\n")
    *rows, (_, _, whole, of_all) = [printed(line) for line in table.splitlines()[1:]]
    assert whole == round(of_the_sample.measured_ns / 1e5)
    assert of_all == 1000
    assert sum(row[2] for row in rows) == whole
    assert sum(row[3] for row in rows) == of_all
    assert all(prefill + decode == both for prefill, decode, both, _ in rows[:-3])


@pytest.mark.thorough
@pytest.mark.parametrize("width", [74, 80, 109, 110, 200])
def test_no_line_of_a_table_is_wider_than_the_terminal(of_the_sample: Shares, width: int) -> None:
    text = shares_lines(of_the_sample, most=5, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert ("marginal ms" in text) is (width >= 110)
    assert ("need a wider terminal" in " ".join(text.split())) is (width < 110)


def printed(line: str) -> tuple[int, int, int, int]:
    """Return prefill, decode, total and part of a line, in units of their last digit."""
    cells = (line[at : at + 12].strip(" -%") for at in range(26, 74, 12))
    prefill, decode, whole, of_all = (round(10 * float(cell or 0)) for cell in cells)
    return prefill, decode, whole, of_all


def test_json_holds_all_rows_in_whole_nanoseconds() -> None:
    tally, _, collector = folded(two_tenants(), "phase")
    table = tally.table("request", collector)
    read = json.loads(shares_json(table))
    assert read["rule"] == "phase"
    assert read["provenance"]["share_ns"] == {"method": "apportioned", "source": "rule phase"}
    assert read["provenance"]["standalone_ns"]["method"] == "modelled"
    beside_ns = read["padding_ns"] + read["idle_ns"] + read["unattributed_ns"]
    assert sum(row["share_ns"] for row in read["rows"]) + beside_ns == read["measured_ns"]
    for row in read["rows"]:
        for amount in ("share_ns", "standalone_ns", "marginal_ns", "tokens"):
            assert row[amount] == row["prefill"][amount] + row["decode"][amount]


def test_more_requests_than_the_first_table_holds_are_counted() -> None:
    script = Script()
    core = script.ring()
    num = 300
    for n in range(num):
        script.at(10 * n + 1)
        mine = core.queued(f"r{n}")
        core.admitted(mine)
        core.step(n, [(mine, 8, 0)], start_ms=10 * n + 2, end_ms=10 * n + 6)
        core.finished(mine)
    tally, _, collector = folded(script, "fair", until_ms=10 * num + 900)
    table = tally.table("request", collector)
    assert len(table.rows) == num
    assert_sums(table)
