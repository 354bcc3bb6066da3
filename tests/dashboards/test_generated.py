"""What is checked in is what the generator writes."""

from __future__ import annotations

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="it is in the extra dev, for Python >= 3.11")

from grafana_foundation_sdk.models import units

from dashboards.generate.__main__ import dashboards
from tests.dashboards.lint import UNITS
from tests.dashboards.reading import FOLDER


def test_the_json_is_pythons_own() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert dashboards() == there, "run: python -m dashboards.generate"


def test_units_are_grafanas() -> None:
    assert {value for value in vars(units).values() if isinstance(value, str)} >= UNITS
