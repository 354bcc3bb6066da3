"""An export keeps the contract, and each damage to one breaks the law that it should."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscope.exporting import load_exporter
from inferscope.fold import json_of
from inferscope.readers.source import open_source
from tests.export_contract import check

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, Any]]


def exported(sample: str) -> Rows:
    """Return the export of a sample recording."""
    out = io.BytesIO()
    exporter = load_exporter("jsonl")(out)
    source = open_source(ROOT / "samples" / sample, sinks=(exporter,))
    source.advance()
    exporter.close(source.collector.devices(), source.collector.totals())
    source.close()
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Return the export of the demo's recording."""
    return exported("demo.isr")


def of(rows: Rows, kind: str) -> dict[str, Any]:
    """Return a row of a kind that the laws apply to in full."""
    return next(
        row
        for row in rows
        if row["kind"] == kind
        and (kind != "step" or len(row["shares"]) > 1)
        and (kind != "request" or (row["ledger_ns"] and row["finish"] == "length"))
        and not row.get("joined_late")
    )


@pytest.mark.thorough
def test_the_export_of_the_sample_breaks_no_law(rows: Rows) -> None:
    totals = check(rows)
    assert totals.breaches == []
    assert totals.num_requests > 10
    assert totals.is_kept(min_requests=10, min_mixed=0.05)


@pytest.mark.parametrize(
    ("sample", "engine", "version", "model"),
    [
        ("vllm", "vllm", "0.32.0+cpu", "tiny"),
        ("sglang", "sglang", "0.5.23", "tiny"),
        ("h100", "inferscope", "0.1.0", "random:llama-8b"),
    ],
)
def test_the_exports_of_real_engines_break_no_law(
    sample: str, engine: str, version: str, model: str
) -> None:
    rows = exported(f"{sample}.isr")
    totals = check(rows)
    assert totals.breaches == []
    assert totals.is_kept(min_requests=40, min_mixed=0.05)
    source = open_source(ROOT / "samples" / f"{sample}.isr")
    source.advance()
    snapshot = source.snapshot(10**9)
    (view,) = snapshot.engines
    source.close()
    assert (view.engine, view.version, view.model) == (engine, version, model)
    assert view.has_ended, "it was stopped, not lost"
    assert '"/' not in json_of(snapshot), "a path of the machine that it was recorded on"


def test_a_gpu_s_steps_are_timed_by_its_own_clock_and_its_counters_divided() -> None:
    rows = exported("h100.isr")
    steps = [row for row in rows if row["kind"] == "step"]
    assert {step["clock"] for step in steps} == {"device"}
    assert {step["mode"] for step in steps} == {"eager", "graph"}
    (device,) = (row for row in rows if row["kind"] == "device")
    assert sum(device["ns_by"].values()) == device["wall_ns"]
    gap_share = device["ns_by"]["idle_host_gap"] / device["wall_ns"]
    assert 0.01 < gap_share < 0.2
    source = open_source(ROOT / "samples" / "h100.isr")
    source.advance()
    counters = source.snapshot(60 * 10**9).engines[0].counters
    source.close()
    assert counters is not None
    assert counters.sources["sm_active_ns"] == "gpm"
    for phase in ("prefill", "decode"):
        assert 0 < (counters.use[phase].sm_share or 0) <= 1


def shift_share(rows: Rows) -> None:
    of(rows, "step")["shares"][0]["ns"] += 1


def make_padding_negative(rows: Rows) -> None:
    step = of(rows, "step")
    step["unattributed_ns"] += step["padding_ns"] + 1
    step["padding_ns"] = -1


def move_between_requests(rows: Rows) -> None:
    first, second = of(rows, "step")["shares"][:2]
    first["ns"], second["ns"] = first["ns"] - 1, second["ns"] + 1


def shift_ledger(rows: Rows) -> None:
    of(rows, "request")["ledger_ns"]["decode_own"] += 1


def make_row_negative(rows: Rows) -> None:
    ledger = of(rows, "request")["ledger_ns"]
    ledger["output"] = ledger.get("output", 0) + ledger["decode_own"] + 1
    ledger["decode_own"] = -1


def rename_cause(rows: Rows) -> None:
    ledger = of(rows, "request")["ledger_ns"]
    ledger["mystery"] = ledger.pop("decode_own")


def shift_ttft_ledger(rows: Rows) -> None:
    of(rows, "request")["ttft_ledger_ns"]["prefill_own"] += 1


def drop_ledger_without_reason(rows: Rows) -> None:
    of(rows, "request").update(ledger_ns=None, ttft_ledger_ns=None, ledger_missing=None)


def shift_compute(rows: Rows) -> None:
    of(rows, "request")["compute_ns"]["decode"] += 1


def claim_more_prompt(rows: Rows) -> None:
    of(rows, "request")["prompt_tokens"] += 10_000


def emit_fewer_tokens(rows: Rows) -> None:
    of(rows, "request")["tokens_per_event"].pop()


def shift_device_time(rows: Rows) -> None:
    of(rows, "device")["wall_ns"] += 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "breach"),
    [
        (shift_share, "parts sum to"),
        (make_padding_negative, "a part is negative"),
        (move_between_requests, "its steps' shares"),
        (shift_ledger, ": ledger sums to"),
        (make_row_negative, "ledger has a negative row"),
        (rename_cause, "unknown causes ['mystery']"),
        (shift_ttft_ledger, "TTFT ledger sums to"),
        (drop_ledger_without_reason, "no ledger, and no reason"),
        (shift_compute, "decode compute is"),
        (claim_more_prompt, "computed"),
        (emit_fewer_tokens, "emitted"),
        (shift_device_time, "ns_by does not sum to wall_ns"),
    ],
)
def test_a_damaged_export_breaks_its_law(
    rows: Rows, damage: Callable[[Rows], None], breach: str
) -> None:
    damaged = copy.deepcopy(rows)
    damage(damaged)
    assert any(breach in found for found in check(damaged).breaches)


def test_a_refused_prompt_of_unknown_length_breaks_no_law(rows: Rows) -> None:
    (row, *_) = (row for row in rows if row["kind"] == "request" and row["ledger_ns"])
    refused = {
        "request": "refused",
        "finish": "rejected",
        "prompt_tokens": None,
        "output_tokens": 0,
        "first_token_ns": None,
        "compute_ns": {"prefill": 0, "decode": 0},
        "cache": None,
        "ledger_ns": {"frontend": row["delivered_ns"] - row["arrived_ns"]},
    }
    assert check([*rows, {**row, **refused}]).breaches == []


@pytest.mark.thorough
def test_time_that_is_hidden_as_unattributed_is_refused(rows: Rows) -> None:
    damaged = copy.deepcopy(rows)
    for row in damaged:
        if row["kind"] == "step":
            row["unattributed_ns"] += row["measured_ns"] // 20
            row["measured_ns"] += row["measured_ns"] // 20
    totals = check(damaged)
    assert totals.breaches == []
    assert not totals.is_kept(min_requests=0, min_mixed=0)


def test_shares_by_token_counts_alone_are_refused() -> None:
    share = {"request": "r", "phase": "decode", "tokens": 1, "ns": 1000}
    step = {"kind": "step", "engine": "e", "step": 1, "measured_ns": 4000}
    step |= {"shares": [share] * 4, "padding_ns": 0, "unattributed_ns": 0}
    totals = check([step])
    assert totals.breaches == []
    assert not totals.is_kept(min_requests=0, min_mixed=0)


@pytest.mark.thorough
@pytest.mark.process
def test_the_command_exits_1_on_a_breach(tmp_path: Path, rows: Rows) -> None:
    damaged = copy.deepcopy(rows)
    shift_ledger(damaged)
    for found, code in ((rows, 0), (damaged, 1)):
        file = tmp_path / "export.jsonl"
        file.write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
        command = [sys.executable, "-m", "tests.export_contract", str(file), "--min-mixed", "0.05"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout
        assert f"{code} breaches" in done.stdout
