"""Any call with any argument, in any state of the probe: nothing raises, no frame is unreadable."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.probe import NO_REQUEST, EngineInfo, Probe
from inferscope.records import (
    COLUMNS,
    CacheSample,
    Emitted,
    Live,
    ProbeHealth,
    RequestEvent,
    StepPlan,
    StepSlices,
    decode,
)
from inferscope.ring.control import SWITCHED_OFF, switch
from inferscope.ring.reader import Frame, RingReader
from tests.probe.c_forks import FIRST_CALLS
from tests.probe.fakes import FakeClock, everything, make_probe, of

MS = 1_000_000


class Evil:
    """Raises whatever it is asked."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("evil")

    __index__ = __int__ = __eq__ = __ne__ = __lt__ = __le__ = __str__ = __repr__ = _raise
    __len__ = __iter__ = __bool__ = __getitem__ = __contains__ = __format__ = _raise
    __hash__ = object.__hash__


class EvilText(str):
    __slots__ = ()

    def encode(self, *_: object, **__: object) -> bytes:
        raise RuntimeError("evil")

    __str__ = isascii = encode  # type: ignore[assignment]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400]),
    st.floats(),
    st.sampled_from([1.0, math.nan, math.inf, -0.0]),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "x" * 5000, "\x00", EvilText("evil")]),
    st.binary(max_size=8),
    st.integers(-(2**31), 2**31 - 1).map(np.int64),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
    st.builds(Evil),
    st.builds(object),
)
arrays = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(
    lambda cells: np.array(cells, "i8")
)
anything = st.one_of(
    scalars,
    arrays,
    st.lists(scalars, max_size=4),
    st.lists(scalars, max_size=4).map(tuple),
    st.lists(st.tuples(scalars, scalars), max_size=3),
    st.dictionaries(st.text(max_size=3), scalars, max_size=3),
)
COLUMN = [0, 1]
GOOD = {
    "request_id": "a",
    "index": 0,
    "prompt_tokens": 3,
    "reason": "stop",
    "num_bytes": 5,
    "start_ns": 1,
    "end_ns": 2,
    "peer": "p",
    "earlier": 1,
    "prompt": list(range(40)),
    "diverged_at": 2,
    "block_tokens": 16,
    "num_blocks": 4,
    "rate": 0.5,
    "digests": [1, 2**64 - 1],
    "step": 1,
    "feature": "pauses",
    "line": "something is wrong",
    "waiting": 0,
    "running": 1,
    "since_ns": 5,
    "counts": [[2, 0], [1, 1]],
    "per_token": 1,
    "write_overdue": lambda now_ns: None,
    **dict.fromkeys(("requests", "phases", "tokens", "contexts"), COLUMN),
}
"""Good values by name, for arguments without a default."""
OTHERS = {
    "open",
    "disabled",
    "clock",
    "on",
    "path",
    "live_requests",
    "fail",
    "close",
    "abandon",
    "is_shedding",
}
METHODS = sorted({name for name in dir(Probe) if not name.startswith("_")} - OTHERS)


def call_of(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Draw a call of a method in which some arguments are anything and the others good."""
    parameters = list(inspect.signature(getattr(Probe, name)).parameters.values())[1:]
    if name == "unsupported":  # asked to, it switches the probe off
        parameters = parameters[:1]
    drawn = {
        one.name: st.just(GOOD[one.name] if one.default is one.empty else one.default) | anything
        for one in parameters
    }
    return st.tuples(st.just(name), st.fixed_dictionaries(drawn))


calls = st.lists(st.one_of(*map(call_of, METHODS)), min_size=1, max_size=6)
STATES = ("open", "re-entrant", "off", "failed", "closed", "disabled", "forked")


def columns_agree(record: Any) -> None:
    lengths = {}
    for name, dtype in COLUMNS.items():
        cells = getattr(record, name, None)
        if isinstance(cells, bytes) and cells:
            assert len(cells) % np.dtype(dtype).itemsize == 0
            lengths[name] = len(cells) // np.dtype(dtype).itemsize
    assert len(set(lengths.values())) <= 1, (record, lengths)


def check_ring(path: Path) -> None:
    reader = RingReader(path)
    last_ns = 0
    for frame in everything(reader):
        assert isinstance(frame, Frame), frame
        record = decode(frame.code, frame.payload)
        assert record.t_ns >= last_ns
        last_ns = record.t_ns
        if isinstance(record, (StepSlices, Emitted, Live, CacheSample)):
            columns_agree(record)
    reader.close()


def make(folder: Path, state: str, number: int) -> tuple[Probe, FakeClock]:
    clock = FakeClock(step_ns=1000)
    if state == "disabled":
        return Probe.disabled(), clock
    name = f"{state}-{number}"
    probe = make_probe(folder, clock, name=name, capacity=1 << 18, has_switch=True)
    probe.queued("first", prompt_tokens=1)
    probe.queued("second", prompt_tokens=1)
    plain = {key: [1, 1] for key in ("phases", "tokens", "contexts", "sampled")}
    probe.slices(0, requests=COLUMN, **plain)  # what the first step may repeat
    if state == "off":
        switch(folder / f"{name}.ring", to=SWITCHED_OFF)
        probe._keeper.tend()
        probe.start(0)
    elif state == "failed":
        probe.fail(ValueError("lost count"))
    elif state == "closed":
        probe.close()
    elif state == "forked":
        probe._keeper.fork()
    return probe, clock


@contextmanager
def inside(probe: Probe, state: str) -> Iterator[None]:
    """Be in a call of the probe's, as a signal handler is."""
    if state == "re-entrant":
        with probe._log.lock:
            yield
    else:
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return SimpleNamespace(path=tmp_path_factory.mktemp("rings"), number=0)


@pytest.mark.parametrize("state", STATES)
@settings(max_examples=60)
@given(made=calls)
def test_any_arguments_cost_their_call_at_most(state: str, folder: Any, made: list[Any]) -> None:
    folder.number += 1
    probe, clock = make(folder.path, state, folder.number)
    path = None if probe._log.ring is None else probe._log.path
    with inside(probe, state):
        for name, arguments in made:
            result = getattr(probe, name)(**arguments)
            if name in ("received", "queued"):
                assert type(result) is int
                assert 0 <= result <= NO_REQUEST
            elif name == "same_step":
                assert type(result) is bool
            else:
                assert result is None
    is_on = state in ("open", "re-entrant")
    assert probe.on is is_on
    if is_on:
        clock.now_ns += 11_000 * MS  # a keyframe is due, which lists every request
        good = probe.queued("good", prompt_tokens=7)
        probe.plan(2**40, start_ns=0, end_ns=1, waiting=0, running=1)
        assert path is not None
        assert of(RequestEvent, path)[-1].index == good
        assert of(StepPlan, path)[-1].step == 2**40
        assert "good" in of(Live, path)[-1].request_ids
    probe.close()
    if path is not None:
        check_ring(path)
        path.unlink()


@settings(max_examples=30)
@given(error=anything)
def test_fail_with_any_argument_switches_the_probe_off(folder: Any, error: Any) -> None:
    folder.number += 1
    probe, _ = make(folder.path, "open", folder.number)
    path = probe.path
    assert path is not None
    probe.fail(error)
    assert not probe.on
    probe.close()
    check_ring(path)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(EngineInfo.__struct_fields__), anything))
def test_an_engine_is_described_by_what_can_be_read(folder: Any, fields: dict[str, Any]) -> None:
    os.environ["INFERSCOPE_DIR"] = str(folder.path)
    os.environ["INFERSCOPE_RING_MB"] = "0.1"
    try:
        info = EngineInfo(**{"t_ns": 0, "engine": "test", **fields})
        probe = Probe.open(info)
    finally:
        del os.environ["INFERSCOPE_DIR"], os.environ["INFERSCOPE_RING_MB"]
    path = probe.path
    assert path is not None
    assert probe.on
    probe.close()
    check_ring(path)
    path.unlink()


@pytest.mark.parametrize(
    ("given_value", "recorded", "num_odd"),
    [(np.int64(3), 3, 0), (1.0, 1, 0), (True, 1, 0), (None, None, 0), (-1, 0, 1),
     (2**32, 2**32 - 1, 1), (math.nan, None, 1), ("three", None, 1), (2.5, 2, 1),
     (Evil(), None, 1)],
)  # fmt: skip
def test_a_number_is_coerced_clamped_or_unknown_and_counted(
    tmp_path: Path, given_value: Any, recorded: int | None, num_odd: int
) -> None:
    probe, _ = make(tmp_path, "open", 0)
    path = probe.path
    index = probe.queued("r", prompt_tokens=given_value)
    assert index == 2
    probe.close()
    assert path is not None
    assert of(RequestEvent, path)[-1].prompt_tokens == recorded
    assert of(ProbeHealth, path)[-1].odd_values == num_odd


def test_an_index_that_no_request_has_is_not_another_requests(tmp_path: Path) -> None:
    probe, _ = make(tmp_path, "open", 0)
    path = probe.path
    assert path is not None
    for odd in (-1, 2**32, None, "0", 0.5, np.array([0, 1])):
        probe.finished(odd, "stop")  # type: ignore[arg-type]
    probe.emitted([-1, 1], [5, 6])
    probe.close()
    assert not [event for event in of(RequestEvent, path) if event.kind != 2]
    (emitted,) = of(Emitted, path)
    assert memoryview(emitted.requests).cast("I").tolist() == [NO_REQUEST, 1]
    health = of(ProbeHealth, path)[-1]
    assert (health.odd_values, health.errors) == (7, 0)
    assert "finished() was left out" in health.message


def test_what_is_left_out_is_reported_once_and_not_on_the_engines_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, _ = make(tmp_path, "open", 0)
    for _ in range(3):
        probe.emitted(None, None)  # type: ignore[arg-type]
    assert not caplog.records
    for _ in range(3):
        probe._life.write_messages()
    assert ["emitted() was left out: TypeError" in r.getMessage() for r in caplog.records] == [True]


def test_at_the_end_of_the_stack_a_call_is_lost_and_the_probe_is_not(tmp_path: Path) -> None:
    probe, _ = make(tmp_path, "open", 0)
    path = probe.path

    def dive() -> None:
        probe.emitted([0], [1])
        dive()

    with pytest.raises(RecursionError):
        dive()
    assert probe.on
    probe.emitted([0], [77])
    probe.close()
    assert path is not None
    assert memoryview(of(Emitted, path)[-1].tokens).cast("I").tolist() == [77]
    check_ring(path)


def test_a_disabled_probe_loads_nothing_to_digest_with() -> None:
    code = (
        "import sys; from inferscope.probe import EngineInfo, Probe;"
        "Probe.open(EngineInfo(0, 'x'));"
        "print('hashlib' in sys.modules, 'inferscope.calibration' in sys.modules)"
    )
    environment = {**os.environ, "INFERSCOPE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def forked(folder: Path, which: str) -> dict[str, Any]:
    """Return what children that C code forks from a process of their own have seen."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.probe.c_forks", folder, which],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["silent", "silent-unwiped"])
def test_a_child_forked_by_c_code_is_silent(tmp_path: Path, which: str) -> None:
    found = forked(tmp_path, which)
    assert set(found) == set(FIRST_CALLS)
    for first, seen in found.items():
        assert seen == {"child": [True, True], "unchanged": True, "on": True, "emitted": 1}, first


def test_a_child_forked_by_c_code_opens_a_ring_of_its_own(tmp_path: Path) -> None:
    found = forked(tmp_path, "own")
    assert found == {
        "own": {"child": [True, 1], "engines": ["parent"], "emitted": 0, "readable": True}
    }
