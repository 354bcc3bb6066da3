from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferscope.engine import EngineOptions, Sampling, load_engine, load_tokenizer
from inferscope.engine.frontend import FrontEnd
from inferscope.engine.load import describe
from inferscope.probe import Probe
from inferscope.records import CAUSES, RequestEvent
from tests.children import child
from tests.cli.running import Run, inferscope
from tests.probe.fakes import of


def test_every_step_sums_to_what_was_measured(demo: Run) -> None:
    steps = demo.of_kind("step")
    assert steps
    for step in steps:
        parts = [share["ns"] for share in step["shares"]]
        assert min(parts) >= 0
        assert sum(parts) + step["padding_ns"] + step["unattributed_ns"] == step["measured_ns"]


def test_every_ledger_closes(demo: Run) -> None:
    requests = demo.of_kind("request")
    assert requests
    for request in requests:
        ledger = request["ledger_ns"]
        assert set(ledger) <= set(CAUSES)
        assert min(ledger.values()) >= 0
        assert sum(ledger.values()) == request["delivered_ns"] - request["arrived_ns"]
        ttft_ns = request["first_token_ns"] - request["arrived_ns"]
        assert sum(request["ttft_ledger_ns"].values()) == ttft_ns
        assert not request["joined_late"]


def test_the_parts_of_every_prompt_sum_to_what_its_prefill_cost(demo: Run) -> None:
    names: dict[str, set[str]] = {"chat": set(), "rag": set(), "agent": set()}
    for request in demo.of_kind("request"):
        parts = request["prompt_parts"]
        assert sum(part["tokens"] for part in parts) == request["prompt_tokens"]
        assert sum(part["cached_tokens"] for part in parts) == request["cached_tokens"]
        assert sum(part["compute_ns"] for part in parts) == request["compute_ns"]["prefill"]
        own_ns = request["ttft_ledger_ns"].get("prefill_own", 0)
        assert sum(part["ttft_ns"] for part in parts) == own_ns
        flops = request["by_phase"]["prefill"]["flops"]
        assert sum(part["flops"] for part in parts) == flops
        kind = request["external_id"].partition("-")[0]
        names[kind] |= {part["name"] for part in parts} - {"output"}
    assert names["chat"] == {"user"}
    assert names["rag"] == {"retrieved", "user"}
    assert {"system", "user"} <= names["agent"] <= {"system", "history", "user"}


def test_a_requests_compute_is_the_sum_of_its_shares(demo: Run) -> None:
    spent: dict[tuple[str, bool], int] = {}
    for step in demo.of_kind("step"):
        for share in step["shares"]:
            key = (share["request"], share["phase"] == "prefill")
            spent[key] = spent.get(key, 0) + share["ns"]
    for request in demo.of_kind("request"):
        assert request["compute_ns"]["prefill"] == spent.get((request["request"], True), 0)
        assert request["compute_ns"]["decode"] == spent.get((request["request"], False), 0)


def test_tokens_are_conserved(demo: Run) -> None:
    for request in demo.of_kind("request"):
        assert sum(request["tokens_per_event"]) == request["output_tokens"]
        assert len(request["tbt_ns"]) == len(request["tokens_per_event"]) - 1


def test_device_time_sums_to_the_wall(demo: Run) -> None:
    (device,) = demo.of_kind("device")
    assert sum(device["ns_by"].values()) == device["wall_ns"]


def test_host_and_output_take_a_small_part_of_latency(demo: Run) -> None:
    ledgers = [request["ledger_ns"] for request in demo.of_kind("request")]
    whole = sum(sum(ledger.values()) for ledger in ledgers)
    host = sum(ledger.get("output", 0) + ledger.get("cpu_gap", 0) for ledger in ledgers)
    assert host <= 0.3 * whole  # on a quiet machine half of it: test_demo_whole.py


def test_nothing_was_lost_late_or_unjoined(demo: Run) -> None:
    (run,) = demo.of_kind("run")
    assert (run["lost"], run["late"], run["unjoined"]) == (0, 0, 0)


@pytest.mark.thorough
def test_the_recording_replays_to_the_numbers_seen_live(demo: Run) -> None:
    recording = str(demo.folder / "demo.isr")
    check = inferscope("replay", recording, "--check", rings=demo.rings)
    assert check.stdout.strip() == demo.of_kind("run")[0]["digest"] == demo.snapshot["digest"]
    assert check.stderr == ""


def test_attach_shows_the_numbers_that_the_export_has(demo: Run) -> None:
    recording = str(demo.folder / "demo.isr")
    attached = inferscope(
        "attach", recording, "--once", "--json", "--window", "300", rings=demo.rings
    )
    (engine,) = json.loads(attached.stdout)["engines"]
    requests = demo.of_kind("request")
    assert engine["num_finished"] == len(requests)
    (device,) = demo.of_kind("device")
    assert engine["device_total_ns"] == device["ns_by"]
    totals = {cause: 0 for request in requests for cause in request["ledger_ns"]}
    for request in requests:
        for cause, ns in request["ledger_ns"].items():
            totals[cause] += ns
    assert engine["ledger_ns"] == totals
    ttfts = [request["first_token_ns"] - request["arrived_ns"] for request in requests]
    assert engine["ttft"]["num"] == len(ttfts)
    assert engine["ttft"]["mean_ns"] == pytest.approx(statistics.fmean(ttfts))
    assert engine["ttft"]["p50_ns"] == pytest.approx(sorted(ttfts)[(len(ttfts) - 1) // 2], rel=0.02)
    gaps = sorted(gap for request in requests for gap in request["tbt_ns"])
    assert engine["tbt"]["num"] == len(gaps)
    assert engine["tbt"]["p99_ns"] == pytest.approx(gaps[math.ceil(0.99 * len(gaps)) - 1], rel=0.05)


def test_the_clients_own_clock_agrees(demo: Run) -> None:
    by_name = {request["external_id"]: request for request in demo.of_kind("request")}
    late_by_ns = []
    for line in (demo.folder / "client.jsonl").read_text(encoding="utf-8").splitlines():
        client = json.loads(line)
        assert client["error"] == ""
        request = by_name[client["name"]]
        assert client["tokens"] == request["output_tokens"]
        ours_ns = request["last_token_ns"] - request["arrived_ns"]
        late_by_ns.append(client["last_token_ns"] - client["sent_ns"] - ours_ns)
    # The client's clock starts before ours and stops after it. How much after is measured, not
    # tested: benchmarks/client_agreement.py.
    assert min(late_by_ns) >= 0


def test_the_trace_opens_as_a_chrome_trace(demo: Run) -> None:
    trace = json.loads((demo.folder / "trace.json").read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert len(named) == 2
    assert sum(" step " in event["name"] for event in slices) == len(demo.of_kind("step"))
    assert all(event["dur"] >= 0 for event in slices)
    # Slices on one track must nest: that is how the UI stacks them.
    tracks: dict[tuple[int, int], list[dict[str, float]]] = {}
    for event in slices:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in tracks.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[float] = []
        for event in events:
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            if open_until:
                assert event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])


def test_files_are_private(demo: Run) -> None:
    for name in ("demo.isr", "demo.jsonl", "trace.json", "client.jsonl"):
        assert (demo.folder / name).stat().st_mode & 0o077 == 0


def test_prompts_are_recorded_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    canary = "canary-b7e2-in-a-coal-mine"
    engine = load_engine("builtin", EngineOptions(dtype="float32"))
    tokenizer = load_tokenizer("builtin")
    engine.probe = Probe.open(describe(engine, name="builtin"))
    probe = Probe.open(describe(engine, name="builtin"), role="frontend")
    front_end = FrontEnd(engine, tokenizer, probe=probe)

    async def ask() -> str:
        front_end.start()
        parts = [d.text async for d in front_end.generate(canary, Sampling(max_tokens=12))]
        front_end.close()
        return "".join(parts)

    answer = asyncio.run(ask())
    engine.probe.close()
    probe.close()
    assert len(answer) > 3
    ids = tokenizer.encode(canary)
    secrets = [canary.encode(), answer.encode(), array("I", ids).tobytes()]
    rings = list(tmp_path.glob("**/*.ring"))
    assert len(rings) == 2
    for ring in rings:
        content = ring.read_bytes()
        assert b"fe-1" in content  # the request itself is there
        assert not any(secret in content for secret in secrets)


def _children_of(demo: subprocess.Popen[bytes]) -> list[int]:
    wanted = f"INFERSCOPE_ENGINE_ID=demo-{demo.pid}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@contextmanager
def _demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with child(
        [sys.executable, "-m", "inferscope", "demo", "--headless", *options, "--out", folder],
        env={**os.environ, "INFERSCOPE_DIR": str(folder / "rings"), "INFERSCOPE_RING_MB": "4"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        yield process


def _was_started(demo: subprocess.Popen[bytes], folder: Path) -> bool:
    return True


def _has_an_engine(demo: subprocess.Popen[bytes], folder: Path) -> bool:
    return bool(_children_of(demo))


def _is_under_load(demo: subprocess.Popen[bytes], folder: Path) -> bool:
    return any(of(RequestEvent, ring) for ring in folder.glob("rings/*/frontend-*.ring"))


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came to be so"
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("is_so", [_was_started, _has_an_engine, _is_under_load])
def test_ctrl_c_at_any_moment_leaves_no_process_behind(
    tmp_path: Path, is_so: Callable[[subprocess.Popen[bytes], Path], bool]
) -> None:
    with _demo(tmp_path, "--rate", "3", "--duration", "60") as process:
        _wait_until(lambda: is_so(process, tmp_path))
        stderr = _ctrl_c_until_it_ends(process)
        assert process.returncode != 0
        if is_so is not _was_started:
            # Python itself, while it starts, may die of the signal in its own ways.
            assert process.returncode in (130, -signal.SIGINT), stderr
            assert b"Traceback" not in stderr.partition(b"Exception ignored")[0]
        _wait_until(lambda: not _children_of(process))


def _ctrl_c_until_it_ends(process: subprocess.Popen[bytes]) -> bytes:
    """Press Ctrl-C, and again each 10 s: Python drops one that falls into a weakref's callback.

    An import has such callbacks; a user who sees no reaction presses Ctrl-C again.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    raise AssertionError(f"still there after 40 s: {process.communicate()[1]!r}")


@pytest.mark.thorough
def test_killing_the_demo_takes_its_engine_along(tmp_path: Path) -> None:
    with _demo(tmp_path) as process:
        _wait_until(lambda: _has_an_engine(process, tmp_path))
        process.kill()
        process.wait()
        _wait_until(lambda: not _children_of(process))


@pytest.mark.thorough
def test_an_engine_that_dies_under_load_fails_the_demo(tmp_path: Path) -> None:
    with _demo(tmp_path, "--rate", "3", "--duration", "60") as process:
        _wait_until(lambda: _is_under_load(process, tmp_path))
        for pid in _children_of(process):
            os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert stderr.startswith(b"demo: starting the engine")
        assert b"exited under load" in stderr


@pytest.mark.thorough
def test_a_headless_demo_states_how_far_it_is(tmp_path: Path) -> None:
    with _demo(tmp_path, "--rate", "3", "--duration", "60") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        found = next(line for line in lines if b"requests finished" in line)
    assert found.startswith(b"demo: ")
    assert b" running" in found
