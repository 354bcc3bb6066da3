"""What a twenty-second demo must show on any CPU; slow, and the machine's other work counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inferscope.records import CAUSES
from tests.cli.running import inferscope

pytestmark = pytest.mark.slow

ELSEWHERE = {
    "upstream",  # needs a proxy's header
    "encode",  # multimodal
    "kv_load",
    "kv_transfer",
    "draft",
    "rank_wait",
    "not_scheduled",  # this scheduler leaves no running request out of a step
    "paused",
    "engine_lost",
}
"""Causes that the reference engine on one CPU does not know."""

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    folder = tmp_path_factory.mktemp("whole")
    done = inferscope(
        "demo", "--headless", "--duration", "20", "--out", str(folder),
        rings=tmp_path_factory.mktemp("rings"), timeout_s=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (folder / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    return folder, [json.loads(line) for line in lines]


def of_kind(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def test_every_cause_that_can_occur_here_does(rows: tuple[Path, Rows]) -> None:
    spent_ns: Counter[str] = Counter()
    for request in of_kind(rows[1], "request"):
        spent_ns.update(request["ledger_ns"])
    assert {cause for cause in CAUSES if spent_ns[cause]} == set(CAUSES) - ELSEWHERE


def test_a_fifth_of_the_steps_hold_both_phases(rows: tuple[Path, Rows]) -> None:
    phases = [{share["phase"] for share in step["shares"]} for step in of_kind(rows[1], "step")]
    assert sum({"prefill", "decode"} <= kinds for kinds in phases) >= 0.2 * len(phases)


def test_the_host_takes_little_and_nothing_goes_unattributed(rows: tuple[Path, Rows]) -> None:
    ledgers = [request["ledger_ns"] for request in of_kind(rows[1], "request")]
    host_ns = sum(ledger.get("output", 0) + ledger.get("cpu_gap", 0) for ledger in ledgers)
    assert host_ns <= 0.15 * sum(sum(ledger.values()) for ledger in ledgers)
    steps = of_kind(rows[1], "step")
    unattributed_ns = sum(step["unattributed_ns"] for step in steps)
    assert unattributed_ns <= 0.02 * sum(step["measured_ns"] for step in steps)


@pytest.mark.parametrize("edge", ["first_token_ns", "last_token_ns"])
def test_the_clients_clock_agrees_to_five_milliseconds(rows: tuple[Path, Rows], edge: str) -> None:
    ours = {request["external_id"]: request for request in of_kind(rows[1], "request")}
    later_ns = []
    for line in (rows[0] / "client.jsonl").read_text(encoding="utf-8").splitlines():
        client = json.loads(line)
        request = ours[client["name"]]
        seen_ns = client[edge] - client["sent_ns"]
        later_ns.append(seen_ns - (request[edge] - request["arrived_ns"]))
    assert min(later_ns) >= 0
    assert sorted(later_ns)[int(0.99 * len(later_ns))] <= 5_000_000
