"""What is recorded behind SGLang's launches, as on a device, against what is recorded at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from inferscope.records import (
    COLUMNS,
    EVENTS,
    Emitted,
    RequestEvent,
    StepPlan,
    StepSlices,
    StepSpan,
)
from tests.engines_real import deferring
from tests.engines_real.sglang_server import (
    PEERS,
    PYTHON,
    TIMEOUT_S,
    Answer,
    Server,
    ask,
    require,
    serving,
)
from tests.probe.fakes import facts_of, of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]
_COLUMNS = ("phases", "tokens", "contexts", "flags", "sampled", "proposed", "accepted")
_OLDER = PEERS / "venvs" / "sgl-0.5.21" / "bin" / "python"


def _variables(folder: Path, *, defers: bool) -> dict[str, str]:
    site = folder / "site"
    site.mkdir(parents=True)
    shutil.copy(Path(deferring.__file__), site / "sitecustomize.py")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "DEFERS": str(int(defers))}


def _core(server: Server) -> Path:
    (ring,) = server.home.glob("core-*.ring")
    return ring


def facts_by_request(ring: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the facts in a ring of each request that a test sent, without times and numbers."""
    events = of(RequestEvent, ring)
    names = {event.index: event.request_id for event in events if event.request_id}
    facts: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        fields = (EVENTS[event.kind], event.prompt_tokens, event.cached_tokens, event.reason)
        facts[names[event.index]]["events"].append(fields)
    plans = {plan.step: plan for plan in facts_of(StepPlan, ring)}
    spans = {span.step: span for span in of(StepSpan, ring)}
    for slices in facts_of(StepSlices, ring):
        plan, span = plans[slices.step], spans[slices.step]
        assert span.digest == slices.digest
        assert plan.start_ns <= plan.end_ns <= span.launch_start_ns
        columns = [
            np.frombuffer(getattr(slices, name), dtype=COLUMNS[name]).tolist()
            or [0] * len(slices.phases)
            for name in _COLUMNS
        ]
        around = (plan.waiting, plan.running, plan.binding, span.mode, span.padded_tokens)
        indices = np.frombuffer(slices.requests, dtype="<u4").tolist()
        for index, *row in zip(indices, *columns, strict=True):
            facts[names[index]]["rows"].append((*row, *around))
    for record in facts_of(Emitted, ring):
        indices = np.frombuffer(record.requests, "<u4").tolist()
        assert record.left_ns >= spans[record.step].launch_start_ns
        for index, count in zip(indices, np.frombuffer(record.tokens, "<u4").tolist(), strict=True):
            facts[names[index]]["emitted"].append(count)
    return {
        name: {kind: list(values) for kind, values in each.items()}
        for name, each in facts.items()
        if name.startswith("same")
    }


async def _one_after_another(server: Server) -> list[Answer]:
    """Ask for prompts of one chunk and of several, and for what is in the cache; leave one."""
    async with aiohttp.ClientSession() as session:
        answers = [
            await ask(session, server, f"same-{at}", list(range(100, 100 + num)), 20)
            for at, num in enumerate((3, 60, 1200, 1200, 700))
        ]
        answers.append(
            await ask(session, server, "same-stop", list(range(7, 60)), 30, leave_after=4)
        )
        return answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("python", [PYTHON, _OLDER], ids=["newest", "0.5.21"])
def test_facts_recorded_behind_launches_are_those_recorded_at_once(
    tmp_path: Path, python: Path, overlap: bool
) -> None:
    require(python)
    options = ["--max-total-tokens", "20000", *([] if overlap else ["--disable-overlap-schedule"])]
    facts, texts = [], []
    for defers in (False, True):
        folder = tmp_path / str(defers)
        variables = _variables(folder, defers=defers)
        with serving(folder, *options, python=python, **variables) as server:
            answers = asyncio.run(_one_after_another(server))
            _wait_until_ended(server, "same-stop")
            facts.append(facts_by_request(_core(server)))
            texts.append([answer.text for answer in answers[:-1]])
    left = [each.pop("same-stop") for each in facts]
    assert facts[1] == facts[0]
    assert texts[1] == texts[0]
    # How many tokens it has when its client leaves differs from run to run.
    for each in left:
        num_rows, emitted = len(each["rows"]), sum(each["emitted"])
        assert num_rows - 2 <= emitted <= num_rows
        assert each["events"][-1][3] == "client_cancel"
    assert len(facts[0]) == 5


def _wait_until_ended(server: Server, name: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S / 4
    while time.monotonic() < deadline:
        events = of(RequestEvent, _core(server))
        (index,) = {event.index for event in events if event.request_id == name}
        if any(event.index == index and event.reason for event in events):
            return
        time.sleep(0.2)
    raise AssertionError(f"{name} has not ended")


@pytest.mark.parametrize("is_stopped_first", [False, True])
def test_requests_in_flight_are_lost_when_a_scheduler_that_defers_is_killed(
    tmp_path: Path, is_stopped_first: bool
) -> None:
    require()

    async def asking(server: Server) -> None:
        async with aiohttp.ClientSession() as session:
            began = [asyncio.Event() for _ in range(3)]
            tasks = [
                asyncio.create_task(
                    ask(session, server, f"killed-{at}", [at + 5] * 50, 1900, began=one)
                )
                for at, one in enumerate(began)
            ]
            await asyncio.gather(*(one.wait() for one in began))
            core = server.pid_of("core")
            if is_stopped_first:  # within a launch, after it, between two: wherever it is
                os.kill(core, signal.SIGSTOP)
                await asyncio.sleep(2)
            os.kill(core, signal.SIGKILL)
            await asyncio.wait(tasks, timeout=5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    variables = _variables(tmp_path / "variables", defers=True)
    with serving(tmp_path, "--max-total-tokens", "20000", **variables) as server:
        asyncio.run(asking(server))
        time.sleep(7)  # that a process was killed is known by its silence, after 5 s
        rows = server.export(tmp_path / "out.jsonl")
    requests = {row["request"]: row for row in rows if row["kind"] == "request"}
    for at in range(3):
        killed = requests[f"killed-{at}"]
        assert killed["finish"] == "engine_lost"
        assert killed["output_tokens"] > 0
        assert sum(killed["ledger_ns"].values()) == killed["delivered_ns"] - killed["arrived_ns"]
    run = next(row for row in rows if row["kind"] == "run")
    assert run["lost"] == 0
