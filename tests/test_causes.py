"""Laws of the table of causes: ledger, blame and documentation follow it."""

from __future__ import annotations

import re
from pathlib import Path

from inferscope.attribution.blame import BLAMED
from inferscope.records import CAUSE_BY_NAME, CAUSE_ROWS, CAUSES, cause_named
from tests.export_contract import CAUSES as CONTRACT

NUMBERS = (Path(__file__).parents[1] / "docs" / "numbers.md").read_text(encoding="utf-8")


def causes_in(heading: str) -> list[str]:
    """Return the causes in the first column of the first table after a heading."""
    table = NUMBERS.partition(heading)[2].partition("| cause |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_each_cause_has_one_row_with_its_label_meaning_and_advice() -> None:
    assert len(CAUSE_BY_NAME) == len(CAUSE_ROWS)
    for row in CAUSE_ROWS:
        assert row.label
        assert row.meaning
        assert row.advice.endswith(".")
        assert len(row.label) <= 34  # a column of the ledger's screen


def test_the_documentation_explains_each_cause_that_is_booked() -> None:
    explained = causes_in("**Delay** (`ledger_ns`)")
    assert sorted(explained) == sorted(row.name for row in CAUSE_ROWS if not row.is_reserved)
    reserved = next(line for line in NUMBERS.splitlines() if "are reserved" in line)
    assert re.findall(r"`(\w+)`", reserved) == [r.name for r in CAUSE_ROWS if r.is_reserved]


def test_blame_is_divided_for_the_causes_that_the_table_blames_on_others() -> None:
    blamed = {row.name for row in CAUSE_ROWS if row.blamed}
    assert blamed == set(BLAMED) == set(causes_in("## Blame"))


def test_exports_are_held_to_the_same_list() -> None:
    assert set(CONTRACT) == set(CAUSES)


def test_a_cause_of_a_newer_version_is_named_as_one() -> None:
    row = cause_named("quantum_tunnelling")
    assert row.name == "quantum_tunnelling"
    assert "newer version" in row.meaning
