"""The lab's page agrees with its results, and its comparisons with their documents."""

from __future__ import annotations

import json
import re
from math import ceil
from pathlib import Path

import msgspec
import pytest

from inferscope.cost import peaks_of
from inferscope.engine import Engine, EngineOptions, Sampling, load_model
from inferscope.text import ComparisonDocument, comparison_page

LAB = Path(__file__).parents[1] / "samples" / "lab"
PAGE = (LAB / "README.md").read_text(encoding="utf-8")
COMPARISONS = sorted((LAB / "comparisons").glob("*.json"))
DEVICES = {
    "A100 SXM 40 GB": "A100-SXM4-40GB",
    "A100 PCIe 80 GB": "A100 80GB PCIe",
    "A100 SXM 80 GB": "A100-SXM4-80GB",
    "H100 SXM": "H100",
}


@pytest.mark.parametrize("device", DEVICES)
def test_a_ridge_on_the_page_is_peak_by_bandwidth(device: str) -> None:
    (row,) = re.findall(rf"^\| {device} \| (\S+) \| (\S+) \| (\d+) \|$", PAGE, re.MULTILINE)
    peaks = peaks_of(DEVICES[device])
    assert (float(row[0]), float(row[1])) == (peaks.bf16_flops_s, peaks.memory_bytes_s)
    assert int(row[2]) == round(peaks.bf16_flops_s / peaks.memory_bytes_s)


def test_the_page_has_the_ridge_that_was_measured() -> None:
    ceilings = json.loads((LAB / "results.json").read_text(encoding="utf-8"))["ceilings"]
    ridge = ceilings["flops_s"] / ceilings["read_bytes_s"]
    assert re.search(rf"^\| this machine, measured \|.*\| {ridge:.1f} \|$", PAGE, re.MULTILINE)


def test_the_page_shows_each_picture_and_each_comparison() -> None:
    shown = set(re.findall(r"\((pictures/\w+\.svg|comparisons/\w+\.txt)\)", PAGE))
    there = {*LAB.glob("pictures/*.svg"), *LAB.glob("comparisons/*.txt")}
    assert {LAB / name for name in shown} == there
    assert all(path.with_suffix(".png").is_file() for path in LAB.glob("pictures/*.svg"))


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_the_page_of_a_comparison_is_that_of_its_document(path: Path) -> None:
    document = msgspec.json.decode(path.read_bytes(), type=ComparisonDocument)
    page = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert page.endswith(comparison_page(document, width=110, ascii=False))
    a = "" if document.a == "the defaults" else document.a
    command = f'inferscope demo --compare "{a}" "{document.b}"'
    if path.stem == "disaggregation":  # of two servers
        command = f"python samples/lab/compare.py {path.stem}"
    assert page.startswith(f"$ {command}\n")
    assert document.comparison.headlines


def test_two_engines_have_the_prefill_and_the_cache_hits_of_both() -> None:
    path = LAB / "comparisons" / "disaggregation.json"
    document = msgspec.json.decode(path.read_bytes(), type=ComparisonDocument)
    rows = {row.name: row for row in document.comparison.rows}
    assert rows["cached_prompt"].a == pytest.approx(rows["cached_prompt"].b, abs=0.01)
    assert 0.5 < rows["prefill"].b / rows["prefill"].a < 2
    assert rows["kv_transfer"].a == 0 < rows["kv_transfer"].b


@pytest.mark.parametrize(("prompt", "budget"), [(40, 64), (40, 16), (64, 64)])
def test_the_first_token_comes_with_the_last_chunk_of_the_prompt(prompt: int, budget: int) -> None:
    options = EngineOptions(token_budget=budget, num_blocks=16, prefix_cache=False)
    engine = Engine(load_model("random:tiny", options), options)
    engine.submit(list(range(prompt)), Sampling(max_tokens=2, ignore_eos=True))
    num_steps = 1
    while not engine.step():
        num_steps += 1
    assert num_steps == ceil(prompt / budget)
