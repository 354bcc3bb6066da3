"""`diff` as a user or a gate runs it: exit statuses, refusals, and the HTML file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import inferscope
from tests.cli.test_bad_input import one_line
from tests.insight.test_why import SAMPLE


@pytest.mark.thorough
def test_a_recording_compared_with_itself_shows_no_difference(tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    words = (
        "diff",
        str(SAMPLE),
        str(SAMPLE),
        "--json",
        "-o",
        str(page),
        "--fail-on",
        "e2e_p50>+0%",
    )
    done = inferscope(*words, rings=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"].startswith("No difference shown between A and B: not in TTFT mean")
    assert document["comparison"]["num_paired"] == document["a"]["num_requests"] == 102
    (outcome,) = document["comparison"]["outcomes"]
    assert outcome["outcome"] == "met"
    assert "No difference shown" in page.read_text(encoding="utf-8")
    assert page.stat().st_mode & 0o077 == 0
    assert "--force" in one_line(*words, rings=tmp_path, code=2)
    assert "at least 500 requests" in one_line(
        "diff", str(SAMPLE), str(SAMPLE), "--fail-on", "ttft_p99>+5%", rings=tmp_path, code=2
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nowhere.isr", str(SAMPLE)), 1, "nowhere.isr"),
        (("{bad}", str(SAMPLE)), 1, "not an InferScope recording"),
        ((str(SAMPLE), str(SAMPLE), "--fail-on", "tbt_p98>+5%"), 2, "unknown measure tbt_p98"),
        ((str(SAMPLE), str(SAMPLE), "--fail-on", "tbt_p99"), 2, "is not a limit"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    bad = tmp_path / "bad.isr"
    bad.write_text("no recording", encoding="utf-8")
    asked = ("diff", *(word.format(bad=bad) for word in words))
    assert said in one_line(*asked, rings=tmp_path, code=code)
