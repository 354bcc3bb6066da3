"""Engines that one process starts have ids of their own while they run beside each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.frontend import FrontEndHooks
from inferscope.adapters.vllm.starts import Starts
from tests.adapters.toy_vllm import AsyncLLM, MPClient, Options, config

SETTING = config(Options())
VARIABLE = "INFERSCOPE_ENGINE_ID"


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv(VARIABLE, "own")
    patches = Patches("vLLM")
    starts = Starts(patches)
    starts.install(MPClient)
    FrontEndHooks(patches, starts.id_of).install(AsyncLLM)
    yield patches
    patches.restore()
    for probe in patches.probes:
        probe.close()


def test_an_engine_beside_others_has_an_id_of_its_own_until_it_ends(patches: Patches) -> None:
    first, second, third = (MPClient(SETTING) for _ in range(3))
    ids = [each.inherited[VARIABLE] for each in (first, second, third)]
    assert ids == ["own", "own-2", "own-3"]
    assert os.environ[VARIABLE] == "own"
    second.shutdown()
    assert MPClient(SETTING).inherited[VARIABLE] == "own-2"
    del first
    gc.collect()
    assert MPClient(SETTING).inherited[VARIABLE] == "own"


def test_a_client_of_an_engine_that_runs_elsewhere_starts_none(patches: Patches) -> None:
    clients = [MPClient(SETTING, client_addresses={"input_address": "tcp"}) for _ in range(2)]
    assert {each.inherited[VARIABLE] for each in clients} == {"own"}
    assert MPClient(SETTING).inherited[VARIABLE] == "own"


def test_an_engine_that_does_not_start_leaves_its_id_to_the_next(patches: Patches) -> None:
    first = MPClient(SETTING)
    failures = []  # they keep their clients alive
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not start") as failure:
            MPClient(SETTING, fails=True)
        failures.append(failure)
        assert os.environ[VARIABLE] == "own"
    assert MPClient(SETTING).inherited[VARIABLE] == "own-2"
    assert first.inherited[VARIABLE] == "own"


def test_a_front_end_has_the_id_of_its_own_core(patches: Patches, tmp_path: Path) -> None:
    offline = MPClient(SETTING)
    server = AsyncLLM(SETTING)
    assert server.engine_core.inherited[VARIABLE] == "own-2"
    assert [path.name for path in tmp_path.iterdir()] == ["own-2"]
    del offline
