"""The product's server with one injected fault, timed by the fault's own clock.

    python benchmarks/injecting.py serve FAULT_AS_JSON
    python benchmarks/injecting.py burn FAULT_AS_JSON

The processes are those of `inferscope serve`: each child runs the product's module after the fault
has been put around a function of it, so that the measured code has no switch for faults. A fault
sleeps until the file `armed` is there. When its process ends, it leaves what it did in the folder:
`strikes-*.json`, and `steps-*.json` with the stopwatch around every forward pass.

    sleep       the scheduler sleeps before it plans a step             (engine)
    tokenise    the tokeniser takes its time, in a thread of its own    (API server)
    blocks      another holder takes most of the KV blocks               (engine)
    forget      compiled shapes are forgotten; compiling again sleeps   (engine)
    burn        a co-tenant computes on the step loop's core            (a process of its own)
    none        the server is well; its clients may not be
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from inferscope.engine.config import EngineOptions
from inferscope.engine.server.launch import ServeSettings, Supervisor, listen

Kind = Literal["sleep", "tokenise", "blocks", "forget", "burn", "none"]
_VARIABLE = "INJECTED_FAULT"
_CORE, _API = "inferscope.engine.server.core", "inferscope.engine.server.api"
_LOOK_S = 0.02


class Fault(msgspec.Struct, frozen=True):
    """A fault to inject, and the file for its report."""

    kind: Kind
    seed: int
    folder: str
    chance: float = 0.0
    """Probability per step or per prompt."""
    least_ms: float = 0.0
    most_ms: float = 0.0
    """Upper bound of a fault's random length, in milliseconds."""
    blocks: int = 0
    """Number of KV blocks left free."""
    core: int | None = None
    """Core to which the step loop is pinned; None leaves the choice to the system."""

    def draw(self) -> random.Random:
        """Return the fault's own random generator."""
        return random.Random(f"{self.seed}/{self.kind}")


class FaultInterval(msgspec.Struct, frozen=True, array_like=True):
    """Start and end of one occurrence of the fault, and its requests (by the engine's IDs)."""

    what: str
    start_ns: int
    end_ns: int
    request_ids: list[str]


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """A forward pass timed by a stopwatch around it."""

    start_ns: int
    end_ns: int
    robbed_ns: int
    """Nanoseconds of it without a core, except for the fault's own sleep."""
    robbed_before_ns: int
    """The same between the last pass and this one, if they share a request."""
    request_ids: list[str]
    chunks: dict[str, int]
    """Tokens of the requests with more than one."""


class Notes:
    """Observations of a faulty process, kept in memory until it ends."""

    def __init__(self, fault: Fault) -> None:
        self._folder = Path(fault.folder)
        self._armed = self._folder / "armed"
        self._looked_s = 0.0
        self._is_armed = False
        self.strikes: list[FaultInterval] = []
        self.steps: list[Forward] = []

    def poll_armed(self) -> bool:
        """Return whether the fault may occur; check the file now and then."""
        now_s = time.monotonic()
        if not self._is_armed and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._is_armed = self._armed.exists()
        return self._is_armed

    def write(self) -> None:
        """Write everything to the folder."""
        for name, noted in (("strikes", self.strikes), ("steps", self.steps)):
            if noted:
                path = self._folder / f"{name}-{os.getpid()}.json"
                path.write_bytes(msgspec.json.encode(noted))


# --- the engine's process -------------------------------------------------------------------------


def break_engine(fault: Fault, notes: Notes) -> None:
    """Wrap functions of the engine with the fault and the stopwatch."""
    from inferscope.engine.runner import Runner
    from inferscope.engine.scheduler import Scheduler

    plan_step, run, execute = Scheduler.schedule, Runner.run, Runner.execute
    draw = fault.draw()
    is_placed, is_taken = False, False
    plan_now: list[Any] = [None]
    held_since: dict[str, int] = {}
    last = [0, 0, 0]  # end of the last pass: by the clock, of the thread's own time; slept by then
    slept_ns = 0

    def strike(what: str, ids: list[str]) -> None:
        nonlocal slept_ns
        struck = _slept(what, drawn_s(), ids)
        notes.strikes.append(struck)
        slept_ns += struck.end_ns - struck.start_ns

    def drawn_s() -> float:
        return draw.uniform(fault.least_ms, fault.most_ms) / 1e3

    def schedule(self: Any) -> Any:
        nonlocal is_placed, is_taken
        if not is_placed and fault.core is not None:
            is_placed = True
            os.sched_setaffinity(0, {fault.core})  # this is the step loop's thread
        if fault.kind == "sleep" and self.running and notes.poll_armed():
            if draw.random() < fault.chance:
                strike("sleep", [request.request_id for request in self.running])
        elif fault.kind == "blocks" and not is_taken and notes.poll_armed():
            surplus = self.pool.num_available - fault.blocks
            if surplus > 0 and not self.running:
                self.pool.allocate(surplus)
                is_taken = True
        plan = plan_step(self)
        for request in plan.preempted:
            held_since[request.request_id] = time.monotonic_ns()
        for request in plan.admitted:
            since_ns = held_since.pop(request.request_id, None)
            if since_ns is not None:
                ids = [request.request_id]
                notes.strikes.append(FaultInterval("held", since_ns, time.monotonic_ns(), ids))
        return plan

    def run_noted(self: Any, step: int, plan: Any, probe: Any) -> Any:
        plan_now[0] = plan
        if fault.kind == "forget" and notes.poll_armed() and draw.random() < fault.chance:
            self._seen_buckets.clear()
        return run(self, step, plan, probe)

    def execute_timed(self: Any, batch: Any) -> Any:
        start_ns, cpu_ns, before_ns = time.monotonic_ns(), time.thread_time_ns(), slept_ns
        slices = plan_now[0].slices
        ids = [part.request.request_id for part in slices]
        if fault.kind == "forget" and batch.is_cold and notes.poll_armed():
            strike("compile", ids)
        tokens = execute(self, batch)
        end_ns, end_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        gone_ns, own_ns = end_ns - start_ns, end_cpu_ns - cpu_ns + slept_ns - before_ns
        gap_ns, gap_own_ns = start_ns - last[0], cpu_ns - last[1] + before_ns - last[2]
        last[:] = end_ns, end_cpu_ns, slept_ns
        chunks = {p.request.request_id: p.num_tokens for p in slices if p.num_tokens > 1}
        notes.steps.append(
            Forward(start_ns, end_ns, gone_ns - own_ns, gap_ns - gap_own_ns, ids, chunks)
        )
        return tokens

    Scheduler.schedule = schedule  # type: ignore[method-assign]
    Runner.run = run_noted  # type: ignore[method-assign]
    Runner.execute = execute_timed  # type: ignore[method-assign]


def _slept(what: str, seconds: float, request_ids: list[str]) -> FaultInterval:
    start_ns = time.monotonic_ns()
    time.sleep(seconds)
    return FaultInterval(what, start_ns, time.monotonic_ns(), request_ids)


# --- the API servers' processes -------------------------------------------------------------------


def break_front_end(fault: Fault, notes: Notes) -> None:
    """Wrap functions of the API server with the fault, and record completion times."""
    from inferscope.engine.server.exchange import Choice, Exchange

    tokens_of, take_tokens = Exchange._tokens, Choice.take_tokens
    draw = fault.draw()

    async def tokenise(self: Any, call: Any) -> Any:
        if notes.poll_armed() and draw.random() < fault.chance:
            seconds = draw.uniform(fault.least_ms, fault.most_ms) / 1e3
            ids = [choice.request_id for choice in self.choices]
            # In a thread, as the server itself does with prompts that take long.
            notes.strikes.append(await asyncio.to_thread(_slept, "tokenise", seconds, ids))
        return await tokens_of(self, call)

    def take(self: Any, tokens: Any, finish: Any, logprobs: Any = ()) -> None:
        if finish is not None:
            now_ns = time.monotonic_ns()
            notes.strikes.append(FaultInterval("complete", now_ns, now_ns, [self.request_id]))
        take_tokens(self, tokens, finish, logprobs)

    if fault.kind == "tokenise":
        Exchange._tokens = tokenise  # type: ignore[method-assign]
    Choice.take_tokens = take  # type: ignore[method-assign]


# --- processes ------------------------------------------------------------------------------------


class _FaultySupervisor(Supervisor):
    """Launcher that starts this file in place of the product's modules."""

    async def _start(self, name: str, *modules: str, settings: dict[str, object]) -> Any:
        return await super()._start(
            name, Path(__file__).stem, settings={**settings, "module": modules[-1]}
        )


def serve(fault: Fault, *, num_blocks: int, max_running: int) -> int:
    """Serve the built-in model until a signal; the folder's file `port` holds the port."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ[_VARIABLE] = msgspec.json.encode(fault).decode()
    folder = Path(fault.folder)
    listening = listen("127.0.0.1", 0)
    settings = ServeSettings(
        model="builtin", served_name="builtin", host="127.0.0.1", port=0, num_api_servers=1,
        drain_s=5.0, client_timeout_s=60.0,
        options=EngineOptions(
            dtype="float32", num_blocks=num_blocks, max_running=max_running, prefix_cache=False
        ),
    )  # fmt: skip

    def on_ready() -> None:
        (folder / "port.new").write_text(str(listening.getsockname()[1]), encoding="utf-8")
        (folder / "port.new").rename(folder / "port")

    asyncio.run(_FaultySupervisor(settings, listening, sys.stderr.write).run(on_ready))
    return 0


def run_child() -> int:
    """Run one of the product's modules with the fault in it."""
    module: str = msgspec.json.decode(sys.argv[1])["module"]
    fault = msgspec.json.decode(os.environ[_VARIABLE], type=Fault)
    notes = Notes(fault)
    (break_engine if module == _CORE else break_front_end)(fault, notes)
    try:
        code: int = importlib.import_module(module).main()
        return code
    finally:
        notes.write()


def burn(fault: Fault) -> int:
    """Compute on the step loop's core until a signal."""
    assert fault.core is not None
    os.sched_setaffinity(0, {fault.core})
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    while not is_over.is_set():
        pass
    return 0


def main() -> int:
    """Run as one of the processes."""
    if len(sys.argv) == 2:
        return run_child()
    fault = msgspec.json.decode(sys.argv[2], type=Fault)
    if sys.argv[1] == "burn":
        return burn(fault)
    return serve(fault, num_blocks=1024, max_running=32)


if __name__ == "__main__":
    sys.exit(main())
