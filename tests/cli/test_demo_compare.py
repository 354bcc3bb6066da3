"""`demo --compare`: option sets are checked before anything starts; two runs give one page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from inferscope.cli.demo.compare import fold_runs
from inferscope.cli.demo.link import PlannedRun
from inferscope.cli.demo.options import option_set_engine
from inferscope.cli.demo.rounds import run_load, serve_run
from inferscope.cli.main import build_parser
from inferscope.engine import EngineOptions, load_tokenizer
from inferscope.errors import BadInput
from inferscope.insight.compare import complete
from inferscope.probe import ENGINE_ID_VARIABLE
from tests.cli.running import inferscope

pytestmark = pytest.mark.thorough


def parsed(*words: str) -> argparse.Namespace:
    return build_parser(["demo"]).parse_args(["demo", *words])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("--no-prefix-cache", "--prefix-cache"),
        ("--token-budget 32", "--token-budget=256 --max-running 4"),
        ("", " "),
    ],
)
def test_option_sets_may_begin_with_dashes(a: str, b: str) -> None:
    given = parsed("--compare", a, b, "--json", "--rounds", "9")
    assert given.compare == [a.strip(), b.strip()]
    assert (given.json, given.rounds) == (True, 9)


def test_an_option_set_stands_on_the_commands_own_options() -> None:
    given = parsed("--block-tokens", "8", "--no-prefix-cache", "--compare", "", "--prefix-cache")
    a, b = (option_set_engine(text, given) for text in given.compare)
    assert (a.block_tokens, a.num_blocks, a.prefix_cache) == (8, 320, False)
    assert (b.block_tokens, b.num_blocks, b.prefix_cache) == (8, 320, True)
    assert option_set_engine("--token-budget 32", given).token_budget == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--no-prefix-cash", 'demo --help` lists'),
        ("--token-budget", "expected one argument"),
        ("--token-budget much", "invalid int value"),
        ("--token-budget 0", "token_budget is 0. Give at least 1."),
        ("--seed 7", "unrecognized arguments: --seed 7"),
        ("builtin", "unrecognized arguments: builtin"),
        ("'--block-tokens", "cannot be split into words"),
    ],
)  # fmt: skip
def test_an_impossible_option_set_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        option_set_engine(text, parsed())
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compare", "--max-running", "--prefix-cache"), "--max-running"),
        (("--compare", "", "", "--rounds", "7"), "--rounds is 7. Give at least 8"),
        (("--compare", "--prefix-cache"), "expected 2 arguments"),
    ],
)
def test_a_comparison_is_checked_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = inferscope("demo", "--out", str(tmp_path / "out"), *words, rings=tmp_path / "rings")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "rings").exists()
    assert not (tmp_path / "out").exists()


def test_options_that_the_model_cannot_have_are_refused_before_the_first_run(
    tmp_path: Path,
) -> None:
    done = inferscope(
        "demo", "--compare", "", "--num-blocks 100000000", "--out", str(tmp_path),
        rings=tmp_path / "rings",
    )  # fmt: skip
    assert done.returncode == 2
    assert "100000000 KV blocks" in done.stderr
    assert "round 1" not in done.stderr


def test_a_worker_of_a_run_writes_into_the_rings_of_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "4")
    monkeypatch.setenv(ENGINE_ID_VARIABLE, "demo-1")
    run = PlannedRun("demo-1-b1", "round 1", EngineOptions(num_blocks=160, overlap=True), 0)
    serve_run(run, "builtin", load_tokenizer("builtin"), list(run_load(run, 40.0, 2)))
    roles = {path.name.partition("-")[0] for path in (tmp_path / "demo-1-b1").glob("*.ring")}
    assert roles == {"core", "frontend", "worker"}
    (requests,) = fold_runs(["demo-1-b1"], tmp_path / "b.isr")
    assert len(requests) == 2
    assert all(map(complete, requests))


def test_two_option_sets_give_one_document_and_two_recordings(tmp_path: Path) -> None:
    done = inferscope(
        "demo", "--compare", "--no-prefix-cache", "--prefix-cache", "--json", "--rate", "40",
        "--duration", "0.05", "--seed", "3", "--out", str(tmp_path),
        rings=tmp_path / "rings", timeout_s=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round 8 of 8, A: --no-prefix-cache" in done.stderr
    document = json.loads(done.stdout)
    assert (document["a"], document["b"]) == ("--no-prefix-cache", "--prefix-cache")
    assert (document["num_rounds"], document["num_requests"], document["requests_s"]) == (8, 2, 40)
    comparison = document["comparison"]
    assert comparison["num_a"] == comparison["num_b"] == 8 * 2
    rows = {(row["group"], row["name"]): row for row in comparison["rows"]}
    assert rows["load", "cached_prompt"]["a"] == 0
    assert {name for group, name in rows if group == "phase"} >= {"prefill", "decode"}
    assert sum(row["is_headline"] for row in rows.values()) == 5
    assert document["verdict"].endswith(".")
    for side in "ab":
        recording = tmp_path / f"compare-{side}.isr"
        read = inferscope("attach", str(recording), "--once", "--json", rings=tmp_path / "none")
        engines = json.loads(read.stdout)["engines"]
        assert len(engines) == 8
        assert sum(engine["num_finished"] for engine in engines) == 8 * 2
    assert not list((tmp_path / "rings").glob("demo-*-[ab]*"))
