"""The table of what works states what tests have shown, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines_real.conformance import (
    ENGINES,
    FEATURES,
    LEVELS,
    Cell,
    Claim,
    Evidence,
    Finding,
    Outcome,
    Table,
    update,
)

ROOT = Path(__file__).resolve().parents[2]
CELL = ("vLLM", FEATURES[0])
FOUND = ("vLLM", "vllm", FEATURES[0])


def judged(*ends: Outcome | None, claims: list[Claim] | None = None) -> dict[Finding, str]:
    evidence = Evidence()
    for number, end in enumerate(ends):
        test = f"test[{number}]"
        evidence.claims_by_test[test] = [(claims or [Claim(*CELL)] * len(ends))[number]]
        if end is not None:
            evidence.happened(test, "passed", is_call=False)
            evidence.happened(test, end, is_call=end != "skipped")
            evidence.happened(test, "passed", is_call=False)
    return evidence.findings()


def test_a_feature_is_shown_if_all_its_tests_have_passed() -> None:
    assert judged("passed", "passed") == {FOUND: "full"}
    assert judged("passed", "failed", "skipped") == {FOUND: "fails"}


@pytest.mark.parametrize("missing", ["skipped", None])
def test_what_was_not_run_shows_nothing(missing: Outcome | None) -> None:
    assert judged("passed", missing) == {}


def test_a_test_that_fails_after_its_call_has_failed() -> None:
    evidence = Evidence({"test": [Claim(*CELL)]})
    evidence.happened("test", "passed", is_call=True)
    evidence.happened("test", "failed", is_call=False)
    assert evidence.findings() == {FOUND: "fails"}


def test_the_least_that_is_claimed_counts() -> None:
    claims = [Claim(*CELL), Claim(*CELL, "partial", "one rank"), Claim(*CELL)]
    assert judged("passed", "passed", "passed", claims=claims) == {FOUND: "partial: one rank"}


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("TGI", FEATURES[0]), "'TGI' is none of vLLM"),
        (("vLLM", "telepathy"), "'telepathy' is none of"),
        (("vLLM", FEATURES[0], "mostly"), "'mostly' is none of full"),
        (("vLLM", FEATURES[0], "partial"), "'' is no note"),
        (("vLLM", FEATURES[0], "partial", "a | b"), "is no note"),
        (("vLLM", FEATURES[0], "full", "but"), "'but' is no note"),
    ],
)
def test_a_claim_that_the_table_cannot_hold_is_refused(words: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.replace("|", r"\|")):
        Claim(*words)  # type: ignore[arg-type]


versions = st.sampled_from(["1.0", "0.32.0+cpu", "0.9.1"])
cells = st.dictionaries(
    st.tuples(st.sampled_from(list(ENGINES)), versions, st.sampled_from(FEATURES)),
    st.sampled_from(["fails", *LEVELS[:1], "partial: no CUDA", "unsupported: beams"]),
)


@given(cells=cells)
def test_a_page_is_read_as_it_was_written(cells: dict[Cell, str]) -> None:
    page = Table(cells).render()
    assert Table.parse(page) == Table(cells)
    for engine, part in zip(ENGINES, parts(page), strict=True):
        named = {feature for of, _, feature in cells if of == engine}
        rows = [line.split(" | ")[0].removeprefix("| ") for line in part if "|" in line]
        assert rows[2:] == [name for name in FEATURES if name in named]


def parts(page: str) -> list[list[str]]:
    """Return the lines of each engine's table."""
    lines = {line: [""] for line in ENGINES}
    engine = ""
    for line in page.splitlines():
        engine = line.removeprefix("## ") if line.startswith("## ") else engine
        if engine:
            lines[engine].append(line)
    return list(lines.values())


def test_the_newest_version_stands_first() -> None:
    old = {("vLLM", version, FEATURES[0]): "full" for version in ("0.9.1", "0.32.0+cpu", "0.28.0")}
    assert "| feature | 0.32.0+cpu | 0.28.0 | 0.9.1 |" in Table(old).render()


def environment(peers: Path, version: str, folder: str = "vllm") -> None:
    """Make what passes for an environment with a vLLM of a version in it."""
    home = peers / "venvs" / folder
    packages = home / "packages" / f"vllm-{version}.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (home / "bin").mkdir(exist_ok=True)
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o700)


def test_the_column_names_the_version_that_was_tested_and_the_others_stay(tmp_path: Path) -> None:
    environment(tmp_path, "1.2.3")
    page = tmp_path / "page.md"
    update(page, tmp_path, {("SGLang", "sgl", FEATURES[0]): "full"})
    assert not page.exists()  # of an engine that is not there nothing was seen
    update(page, tmp_path, {FOUND: "full"})
    environment(tmp_path, "1.1.0", "vllm-1.1.0")
    update(page, tmp_path, {("vLLM", "vllm-1.1.0", FEATURES[0]): "partial: one rank"})
    text = page.read_text()
    assert "## vLLM\n\n| feature | 1.2.3 | 1.1.0 |" in text
    assert f"| {FEATURES[0]} | full | partial: one rank |" in text
    assert "SGLang\n" not in text


TESTS = """
import pytest

from tests.engines_real.conformance import Claim

@pytest.mark.conformance("vLLM", "prefix cache")
@pytest.mark.conformance("vLLM", "stop strings", "partial", "one at a time")
@pytest.mark.parametrize("number", ["first", "second"])
def test_two(number):
    pass

@pytest.mark.conformance("vLLM", "LoRA adapters")
def test_that_learns(show):
    show(Claim("vLLM", "LoRA adapters", "partial", "one"))

@pytest.mark.conformance("vLLM", "offline, without a server")
def test_wrong():
    assert False

@pytest.mark.conformance("vLLM", "tensor ranks")
def test_absent():
    pytest.skip("no ranks")
"""


def run_pytest(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.engines_real.conftest", "--rootdir", str(folder), "-c", "/dev/null"),
            *("-o", "markers=conformance", *words),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "INFERSCOPE_PEERS": str(folder),
            "INFERSCOPE_CONFORMANCE": "page.md",
        },
    )
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_a_session_writes_what_its_tests_have_shown(tmp_path: Path) -> None:
    environment(tmp_path, "1.2.3")
    (tmp_path / "test_toy.py").write_text(TESTS)
    page = tmp_path / "page.md"
    run_pytest(tmp_path, "test_toy.py::test_two[first]")
    run_pytest(tmp_path, "-k", "first")
    assert not page.exists()
    run = run_pytest(tmp_path)
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| prefix cache | full |",
        "| stop strings | partial: one at a time |",
        "| LoRA adapters | partial: one |",
        "| offline, without a server | fails |",
    ], run
    (tmp_path / "test_toy.py").write_text(TESTS.replace("prefix cache", "telepathy"))
    assert "test_two[first]: 'telepathy' is none of" in run_pytest(tmp_path)
