"""Our own faults in a real vLLM server: reported, and without effect on any answer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.frontend import FrontEndHooks
from inferscope.adapters.vllm.worker import WorkerHooks
from tests.engines_real.clients import Ask, ask_all, mixed_asks
from tests.engines_real.vllm_server import needs_vllm, serving, stop

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]

SABOTAGE = """
from inferscope.adapters.vllm import frontend as vllm_frontend
from inferscope.adapters.vllm import steps as vllm_steps
from inferscope.adapters.vllm import worker as vllm_worker

def broken(*args, **kwargs):
    raise RuntimeError("our own mistake")

vllm_steps.Core.write_outcome = broken
vllm_worker.WorkerHooks.stop = broken
vllm_frontend.FrontEndHooks.processed = broken
"""


@pytest.mark.conformance("vLLM", "a fault of ours changes no answer")
def test_faults_of_ours_are_reported_once_and_every_answer_comes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(tmp_path / "server", PYTHONPATH=path) as server:
        asks = mixed_asks(6, 12, prompts=(10, 300), outputs=(5, 40))
        ask_all(server.url, asks, at_once=4)
        assert stop(server) == 0
    whole = [ask for ask in asks if ask.is_whole]
    assert len(whole) > 8
    for ask in whole:
        assert ask.usage["completion_tokens"] == ask.body["max_tokens"] * ask.body.get("n", 1)
    lines = [line for line in server.log().splitlines() if "our own mistake" in line]
    assert len(lines) == 3, lines


EVERY_HOOK_FAILS = """
import functools, itertools, sys
from inferscope.adapters import edge
from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.frontend import FrontEndHooks
from inferscope.adapters.vllm.worker import WorkerHooks

def failing(owner, name):
    hook, calls = getattr(owner, name), itertools.count()

    @functools.wraps(hook)
    def wrapper(*args, **kwargs):
        result = hook(*args, **kwargs)
        if next(calls) % 2 == 0:
            raise RuntimeError("our own mistake")
        return result

    setattr(owner, name, wrapper)

for owner in (CoreHooks, FrontEndHooks, WorkerHooks):
    for name in list(vars(owner)):
        if not name.startswith("_") and name not in ("install", "is_computing_on_host"):
            failing(owner, name)
for name in ("_begin", "_leaving"):
    failing(edge, name)
for name in ("_sent", "_end"):
    failing(edge.Edge, name)

def fail(patches, hook, error):
    print(f"fault in {hook.__qualname__}.", file=sys.stderr, flush=True)

Patches.fail = fail
"""
NOT_CALLED = {
    *("WorkerHooks.idling", "WorkerHooks.idled", "WorkerHooks.closed"),
    *("CoreHooks.closed", "CoreHooks.turned", "CoreHooks.unplanned"),
    *("WorkerHooks.forwarding", "WorkerHooks.mark", "WorkerHooks.sign_overdue"),
    *("WorkerHooks.stop", "WorkerHooks.sign", "WorkerHooks.is_computing_on_host"),
    *("CoreHooks.made_otherwise", "CoreHooks.forget", "WorkerHooks.forget"),
}
"""Only replicas have idle steps; a stopped server ends core and workers where they are; no client
pauses it; a CPU has no device spans. Faults in a wrapper that is written out are named by it."""
EDGE = {"_begin", "_leaving", "Edge._sent", "Edge._end"}


def _greedy(folder: Path, *, is_observed: bool, path: str = "") -> tuple[list[str], str]:
    """Ask one at a time, then many at once; return the former's answers, and the server's log."""
    asks = [
        Ask(
            f"same-{number}",
            {
                "model": "tiny",
                "prompt": list(range(10, 60 + number)),
                "max_tokens": 40,
                "ignore_eos": True,
                "temperature": 0,
                "stream": number % 2 == 0,
            },
        )
        for number in range(8)
    ]
    with serving(
        folder, is_observed=is_observed, **({"PYTHONPATH": path} if path else {})
    ) as server:
        ask_all(server.url, asks, at_once=1)
        mixed = mixed_asks(6, 16, prompts=(10, 700), outputs=(5, 40))
        ask_all(server.url, mixed, at_once=5)
        assert stop(server) == 0
    assert {ask.status for ask in asks} == {200}
    whole = [ask for ask in mixed if ask.is_whole and ask.usage]
    assert len(whole) > 8
    for ask in whole:
        assert ask.usage["completion_tokens"] == ask.body["max_tokens"] * ask.body.get("n", 1)
    return [ask.text for ask in asks], server.log()


@pytest.mark.conformance("vLLM", "a fault of ours changes no answer")
def test_with_a_fault_in_every_hook_every_answer_is_the_same(tmp_path: Path) -> None:
    """Each hook fails at every other call, and none is switched off: so all are reached."""
    (tmp_path / "sitecustomize.py").write_text(EVERY_HOOK_FAILS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    faulty, log = _greedy(tmp_path / "faulty", is_observed=True, path=path)
    hooks = {
        f"{owner.__name__}.{name}"
        for owner in (CoreHooks, FrontEndHooks, WorkerHooks)
        for name in vars(owner)
        if not name.startswith("_") and name != "install"
    }
    found = set(re.findall(r"fault in (\S+)\.$", log, re.M))
    assert found >= EDGE | hooks - NOT_CALLED
    assert any(name.endswith(".sample_tokens") for name in found), "of WorkerHooks.stop"
    untouched, _ = _greedy(tmp_path / "untouched", is_observed=False)
    assert faulty == untouched
