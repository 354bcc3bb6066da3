"""The page of a comparison states its rows, its levels and its verdict in a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.insight.compare import Comparison, compare
from inferscope.text import ComparisonDocument, comparison_page, verdict_sentence
from tests.insight.test_compare import NUM_RUNS, runs


def document(comparison: Comparison) -> ComparisonDocument:
    return ComparisonDocument(
        a="--no-prefix-cache", b="--prefix-cache", model="builtin", seed=7, num_requests=12,
        requests_s=6.25, num_rounds=NUM_RUNS, comparison=comparison,
        verdict=verdict_sentence(
            comparison.headlines, a="--no-prefix-cache", b="--prefix-cache"
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def shifted() -> Comparison:
    draw, again = np.random.default_rng(1), np.random.default_rng(1)
    return compare(runs(draw), runs(again, prefill=0.5))


def test_the_verdict_names_what_changed_by_how_much_and_what_did_not(shifted: Comparison) -> None:
    sentence = document(shifted).verdict
    assert sentence.startswith("With --prefix-cache instead of --no-prefix-cache, TTFT p50 is ")
    (row,) = (row for row in shifted.rows if row.name == "ttft_p50")
    least_ms, most_ms = -row.high / 1e6, -row.low / 1e6
    size = 100 * abs(row.difference / row.a)
    assert f"TTFT p50 is {size:.0f}% lower (by {least_ms:.1f} to {most_ms:.1f} ms)" in sentence
    assert sentence.endswith("no difference shown in TBT p50 and TBT p99.")


def test_equal_sides_have_a_verdict_too() -> None:
    draw = np.random.default_rng(2)
    sentence = document(compare(runs(draw), runs(draw))).verdict
    assert sentence == (
        "No difference shown between --no-prefix-cache and --prefix-cache: not in TTFT p50, "
        "TBT p50, TBT p99, E2E p50 and goodput."
    )


def test_without_enough_runs_there_is_no_verdict() -> None:
    few = [run[:1] for run in runs(np.random.default_rng(3))[:2]]
    comparison = compare(few, few)
    assert verdict_sentence(comparison.headlines, a="x", b="y").startswith("No verdict")
    assert "No verdict" in comparison_page(document(comparison), width=100, ascii=True)


@pytest.mark.parametrize("width", [80, 110, 200])
def test_the_page_has_every_row_and_ends_with_the_verdict(shifted: Comparison, width: int) -> None:
    page = comparison_page(document(shifted), width=width, ascii=True)
    assert page.isascii()
    lines = page.splitlines()
    ledger = lines[next(i for i, line in enumerate(lines) if line.startswith("ledger")) :]
    for row in shifted.rows:
        if row.group == "ledger":
            (line,) = (line for line in ledger if line.startswith(f"{row.name} "))
            assert f"{row.a / 1e6:.1f}" in line
    assert "8 rounds in the order A B, B A" in page.replace("\n", " ")
    assert "twice the medians" in page.replace("\n", " ")
    assert " ".join(page.split("Verdict: ")[1].split()) == document(shifted).verdict
