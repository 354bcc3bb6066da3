"""Where a version of vLLM or SGLang cannot be observed whole, no ledger is wrong."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real import hidden_method, sglang_server, vllm_server
from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.commands import import_at_start, inferscope
from tests.engines_real.vllm_laws import of_kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
VENVS = vllm_server.PEERS / "venvs"
VLLMS = ("vllm", "vllm-0.30.0")
SGLANGS = ("sgl", "sgl-0.5.21")
NUM = 12
_FEATURE = "an unsupported scheduler: no ledger, and the reason shown"
Lines = list[dict[str, Any]]


def _claiming(engine: str, name: str) -> Any:
    """Return the parameter of the version that the table of what works has a column for."""
    return pytest.param(name, marks=pytest.mark.conformance(engine, _FEATURE))


def vllm_at(name: str) -> Path:
    program = VENVS / name / "bin" / "vllm"
    if not (program.exists() and vllm_server.CHECKPOINT.exists()):
        pytest.skip(f"no {name} or no checkpoint under {vllm_server.PEERS}: set INFERSCOPE_PEERS")
    return program


def sglang_at(name: str) -> Path:
    python = VENVS / name / "bin" / "python"
    sglang_server.require(python)
    return python


def without(folder: Path, method: str) -> dict[str, str]:
    """Return the variables under which a method is hidden from our hooks."""
    import_at_start(hidden_method, folder)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "HIDE": method}


def asks() -> list[Ask]:
    return [
        Ask(
            f"ask-{number}",
            {
                "model": "tiny",
                "prompt": list(range(10, 60 + 40 * number)),
                "max_tokens": 8 + number,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        for number in range(NUM)
    ]


async def ask_sglang(server: sglang_server.Server) -> None:
    async with aiohttp.ClientSession() as session:
        gathered = [
            sglang_server.ask(session, server, f"ask-{i}", [9 + i] * (50 + 40 * i), 8 + i)
            for i in range(NUM)
        ]
        answers = await asyncio.gather(*gathered)
    assert [answer.usage["completion_tokens"] for answer in answers] == [8 + i for i in range(NUM)]


def hold_to_no_ledger(requests: Lines) -> None:
    """Check requests of a core that is not observed: no ledger, and the times of the front end."""
    assert len(requests) == NUM
    for request in requests:
        assert request["ledger_ns"] is request["ttft_ledger_ns"] is None
        assert request["ledger_missing"] == "core not observed"
        assert request["compute_ns"] == {"prefill": None, "decode": None}
        assert request["arrived_at"] == request["delivered_at"] == "http"
        assert not request["joined_late"]
        assert request["arrived_ns"] < request["first_token_ns"] <= request["last_token_ns"]
        assert request["last_token_ns"] <= request["delivered_ns"]


def check_reports(rings: Path, log: str, name: str, method: str) -> None:
    """Check what is unsupported: once in the log, and on every screen."""
    lines = [line for line in log.splitlines() if "unsupported: the scheduler" in line]
    assert len(lines) == 1, lines
    assert method in lines[0]
    (engine,) = json.loads(inferscope(rings, "attach", name, "--once", "--json"))["engines"]
    assert engine["health"]["probe_state"] == "unsupported"
    assert any(method in feature for feature in engine["health"]["unsupported"])
    assert engine["ledger_missing"] == "core not observed"
    assert engine["ttft"]["num"] > 0
    screen = inferscope(rings, "attach", name, "--once")
    assert "core not observed" in screen
    assert "unsupported: the scheduler" in screen
    assert "frontend" not in screen
    why = inferscope(rings, "why", "ask-3", str(rings / name), "--pick", "1")
    assert "It has no ledger (core not observed)" in why


@pytest.mark.parametrize("name", [_claiming("vLLM", VLLMS[0]), *VLLMS[1:]])
def test_a_vllm_without_a_scheduler_method_has_no_ledgers(tmp_path: Path, name: str) -> None:
    method = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"
    record, hidden = tmp_path / "run.isr", without(tmp_path / "hide", method)
    program = vllm_at(name)
    with vllm_server.serving(tmp_path, vllm=program, record=record, **hidden) as server:
        ask_all(server.url, asks(), at_once=4)
        rings = server.folder / "rings"
        check_reports(rings, server.log(), server.home.name, "update_from_output")
        vllm_server.stop(server)
    hold_to_no_ledger(of_kind(vllm_server.export(server, record), "request"))


@pytest.mark.parametrize("name", [_claiming("SGLang", SGLANGS[0]), *SGLANGS[1:]])
def test_a_sglang_without_a_scheduler_method_has_no_ledgers(tmp_path: Path, name: str) -> None:
    method = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
    record, hidden = tmp_path / "run.isr", without(tmp_path / "hide", method)
    python, options = sglang_at(name), ("--max-total-tokens", "20000")
    with sglang_server.serving(
        tmp_path, *options, python=python, record=record, **hidden
    ) as server:
        asyncio.run(ask_sglang(server))
        log = server.log.read_text()
        check_reports(server.rings, log, server.home.name, "process_batch_result")
        server.stop()
    rows = of_kind(server.export(tmp_path / "out.jsonl", record), "request")
    hold_to_no_ledger([row for row in rows if row["request"].startswith("ask")])
