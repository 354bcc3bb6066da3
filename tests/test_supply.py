"""Agreement of the supply page with the package's requirements."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "supply.md"
ROW = re.compile(r"^\| ([\w-]+) \| (\w*) ?\| (.+) \|$", re.MULTILINE)
LISTED = {
    name: (extra, licence)
    for name, extra, licence in ROW.findall(PAGE.read_text(encoding="utf-8"))
    if name != "package"
}
_ASKED = re.compile(r"([\w-]+)[^;]*(?:;.*extra == .(\w+).)?")


def test_each_package_that_is_asked_for_is_listed_with_its_extra() -> None:
    asked: dict[str, set[str]] = {}
    for line in metadata.requires("inferscope-llm") or ():
        name, extra = _ASKED.fullmatch(line).groups("")  # type: ignore[union-attr]
        if extra not in ("core", "dev", "all") and name != "inferscope-llm":
            asked.setdefault(name.lower(), set()).add(extra)
    assert set(LISTED) == set(asked)
    for name, (extra, _) in LISTED.items():
        assert extra in asked[name], name


@pytest.mark.parametrize("name", LISTED)
def test_its_licence_is_the_one_in_its_metadata(name: str) -> None:
    try:
        metadata_of = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    words = [metadata_of.get(key) or "" for key in ("License-Expression", "License")]
    words += [
        each for each in metadata_of.get_all("Classifier") or () if each.startswith("License")
    ]
    family = re.split(r"[-,;]", LISTED[name][1])[0]
    assert family in " ".join(words), words


def test_no_page_and_no_advice_installs_the_package_of_another_project() -> None:
    root = PAGE.parents[1]
    installs = re.compile(r"pip\b.{0,40}\binstall\b.{0,20}\binferscope(?!-llm)")
    found = [
        (path, line)
        for folder in ("docs", "dashboards", "samples", "inferscope", "exporters")
        for path in [root / "README.md", *(root / folder).rglob("*")]
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".json")
        for line in path.read_text(encoding="utf-8").splitlines()
        if installs.search(line)
    ]
    assert found == []
