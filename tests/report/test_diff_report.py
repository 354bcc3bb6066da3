"""The page of a comparison: every number of every row, and nothing that loads or runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from inferscope.report import diff_report, render
from inferscope.text import DiffDocument
from tests.insight.test_diff_page import document, held
from tests.report.html import parse
from tests.report.test_page import ALLOWED, HOSTILE


@pytest.fixture(scope="module")
def made() -> DiffDocument:
    return document(held("ttft_mean>+5%"))


def test_the_page_has_every_row_with_its_exact_numbers(made: DiffDocument) -> None:
    parsed = parse(render(diff_report(made)))
    for row in made.comparison.rows:
        suffix = {"ns": "_ns", "requests/s": "_s", "tok/s": "_s"}.get(row.unit, "")
        for key in ("a", "b", "difference", "low", "high"):
            printed = parsed.values[row.group, f"{row.name}.{key}{suffix}"]
            assert printed == pytest.approx(getattr(row, key))
    assert made.verdict in parsed.texts
    assert {tag for tag, _ in parsed.tags} <= ALLOWED


@pytest.mark.parametrize("text", HOSTILE[:2])
def test_a_hostile_name_of_a_recording_is_shown_and_never_markup(
    made: DiffDocument, text: str
) -> None:
    parsed = parse(render(diff_report(replace(made, a=replace(made.a, name=text)))))
    assert {tag for tag, _ in parsed.tags} <= ALLOWED
    assert text in parsed.texts
