"""Overhead per vLLM step: its hooks in place against removed, in one process.

vLLM's `LLM` with random weights on the CPU, core and worker in this process, driven step by step:
no second server, no client and no socket add their noise (`vllm_overhead.py` has them all). A
batch of requests is served to its end with our hooks in place, and one without them, in random
order: a pair. A reader in another process follows the rings. From all pairs: the median ratio of
the mean step (throughput), and from groups of ten pairs the median ratio of the 99th percentile
(TBT: one token per request and step), each with a bootstrap interval.

The rule (ENGINE.md): both intervals' upper ends <= 2 % on a CPU. What the hooks cost is a time,
much the same for every model, so what share it is depends on the step beside it: `70m` is smaller
than anything that is served, `0.5b` has the layers of Qwen2.5-0.5B.

With `--device-ms` a device is emulated: the step ends that long after its forward, in a wait that
computes nothing and holds no lock. The hooks then write while it "computes", as with a real device
and unlike on a CPU in one process, where they write at once. They time steps by events as on CUDA,
whose own cost of recording one is not included. `--path` measures not wall time but the CPU time of
the hooks on the critical path (`path_time.py`), and, with a device, of everything between the end
of its wait and its next forward, with the hooks less without (the goals: 20 µs, and 10 µs either
way).

    PEERS/venvs/vllm/bin/python benchmarks/vllm_step_overhead.py PEERS/tiny-qwen2 --out FILE
    … --path --batches 1 16 64                      beside a forward that evicts the caches
    … --path --batches 1 16 64 --device-ms 5 --model tiny
    … --device-ms 9 --model tiny

run in an environment where vLLM and inferscope are; the checkpoint gives the tokeniser only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from host_events import HostEvents
from pairs import Pair, grouped, interval, mean_ratio, tail_ratio
from path_time import HIDDEN, PathTimes
from probe_cost import machine
from vllm_overhead import LARGEST_OVERHEAD, READER, SHAPE

from inferscope.adapters.vllm.hooks import CORE, PATCHES, WORKER
from inferscope.probe import EventTimer

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "70m": SHAPE,
    "0.5b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864,
    },
}  # fmt: skip
_WARM_PAIRS = 3
_WARM_STEPS = 4
"""Number of excluded steps of each batch: its prefill and the first steps after a change."""


LARGEST_PATH_US = 20
LARGEST_AFTER_WAKE_US = 10


class Device:
    """A device that computes for a given time beside the host, and its critical path.

    Attributes:
        after_wake_ns: thread CPU time from the end of each wait to the next forward.
    """

    def __init__(self, llm: Any, wait_ns: int) -> None:
        """Wrap an engine's model runner; its steps end `wait_ns` after their forward pass."""
        self.after_wake_ns: list[int] = []
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        runner = executor.driver_worker.worker.model_runner
        self._runner = runner
        self._wait_ns = wait_ns
        self._begun_ns = self._woken_ns = 0
        runner._model_forward, runner.sample_tokens = self._forwards, self._samples

    def _forwards(self, *args: Any, **kwargs: Any) -> Any:
        if self._woken_ns:
            self.after_wake_ns.append(time.thread_time_ns() - self._woken_ns)
        # By its class: the hooks there come and go.
        result = type(self._runner)._model_forward(self._runner, *args, **kwargs)
        self._begun_ns = time.perf_counter_ns()
        return result

    def _samples(self, *args: Any, **kwargs: Any) -> Any:
        result = type(self._runner).sample_tokens(self._runner, *args, **kwargs)
        left_ns = self._begun_ns + self._wait_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        self._woken_ns = time.thread_time_ns()
        return result


def observe_as_on_a_device(llm: Any) -> None:
    """Make the hooks defer and time steps as on CUDA, except for the cost of events."""
    assert CORE.kept is not None
    CORE.kept.is_early = WORKER.is_early = False
    WORKER._probe._spans.timer = EventTimer(HostEvents())
    WORKER.mark()
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    WORKER._hook_device_span(executor.driver_worker.worker)


class Hooks:
    """The adapter's replacements in this process, which can be removed and restored."""

    def __init__(self) -> None:
        self._replaced = list(PATCHES._replaced)
        assert self._replaced, "vLLM is not observed: is inferscope installed here?"

    def put(self, *, is_on: bool) -> None:
        """Install the hooks, or the original functions."""
        assert not PATCHES.is_off, "a hook has failed: see the log"
        for owner, name, own, ours in self._replaced:
            if is_on:
                setattr(owner, name, ours)
            elif callable(own):
                setattr(owner, name, own)
            elif name in vars(owner):  # it was inherited
                delattr(owner, name)


def batch(engine: Any, sampling: Any, number: int, size: int) -> list[int]:
    """Serve a batch to its end; return the nanoseconds of its decode steps."""
    draw = random.Random(number)
    for at in range(size):
        prompt = {"prompt_token_ids": [draw.randrange(10, 4000) for _ in range(8)]}
        engine.add_request(f"{number}-{at}", prompt, sampling)
    took = []
    while engine.has_unfinished_requests():
        began_ns = time.perf_counter_ns()
        engine.step()
        took.append(time.perf_counter_ns() - began_ns)
    return took[_WARM_STEPS:-1]


def compare(llm: Any, sampling: Any, hooks: Hooks, *, size: int, pairs: int) -> dict[str, Any]:
    """Run the pairs at one batch size."""
    draw = random.Random(size)
    measured = []
    number = 0
    for pair in range(-_WARM_PAIRS, pairs):
        took = {}
        for is_on in draw.sample([True, False], 2):
            hooks.put(is_on=is_on)
            number += 1
            took[is_on] = batch(llm.llm_engine, sampling, number + 10**6 * size, size)
        if pair >= 0:
            measured.append(Pair(took[True], took[False]))
    mean, tail = interval(measured, mean_ratio), interval(grouped(measured), tail_ratio)
    step_ms = statistics.median(ns for pair in measured for ns in pair.off) / 1e6
    return {
        "batch": size,
        "step_ms": step_ms,
        "cost_us": 1e3 * step_ms * mean[0],
        "mean_overhead": mean,
        "p99_overhead": tail,
        "passes": mean[2] <= LARGEST_OVERHEAD and tail[2] <= LARGEST_OVERHEAD,
    }


def path(
    llm: Any, sampling: Any, device: Device | None, *, size: int, rounds: int
) -> dict[str, Any]:
    """Measure the hooks' CPU time on the critical path at one batch size."""
    hooks, times = Hooks(), PathTimes(PATCHES._replaced)
    draw = random.Random(size)
    medians: dict[bool, list[dict[tuple[str, str], float]]] = {True: [], False: []}
    after_wake: dict[bool, list[float]] = {True: [], False: []}
    number = 0
    for turn in range(-_WARM_PAIRS, rounds):
        for is_on in draw.sample([True, False], 2):
            number += 1
            times.instrument(is_on=is_on)
            batch(llm.llm_engine, sampling, number + 10**6 * size, size)
            if turn >= 0:
                medians[is_on].append(times.medians_us())
        times.restore()
        if device is None:
            continue
        for is_on in draw.sample([True, False], 2):
            number += 1
            hooks.put(is_on=is_on)
            device.after_wake_ns.clear()
            batch(llm.llm_engine, sampling, number + 10**6 * size, size)
            if turn >= 0:
                steps = device.after_wake_ns[_WARM_STEPS:-1]
                after_wake[is_on].append(statistics.median(steps) / 1e3)
        hooks.put(is_on=True)
    parts = sorted(medians[True][0])
    costs = [
        {part: on[part] - off[part] for part in parts}
        for on, off in zip(medians[True], medians[False], strict=True)
    ]
    on_path = [sum(us for part, us in cost.items() if part not in HIDDEN) for cost in costs]
    hidden = [sum(us for part, us in cost.items() if part in HIDDEN) for cost in costs]
    row = {
        "batch": size,
        "path_us": interval(on_path, statistics.median),
        "path_p10_p90_us": [statistics.quantiles(on_path, n=10)[at] for at in (0, 8)],
        "hidden_us": interval(hidden, statistics.median),
        "parts_us": {
            " ".join(part): statistics.median(cost[part] for cost in costs) for part in parts
        },
    }
    passes = row["path_us"][2] <= LARGEST_PATH_US
    if device is not None:
        more = [on - off for on, off in zip(after_wake[True], after_wake[False], strict=True)]
        row["after_wake_us"] = interval(more, statistics.median)
        passes &= abs(row["after_wake_us"][0]) <= LARGEST_AFTER_WAKE_US
    return {**row, "passes": passes}


def _keep_apart(reader_pid: int) -> None:
    """Pin the engine's threads to a core that the reader does not use."""
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    os.sched_setaffinity(reader_pid, others)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def main() -> int:
    """Measure, print a table and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="70m", help="whose layers")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="float32 where the host has no instructions for bfloat16",
    )
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20, help="of a batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--path", action="store_true", help="CPU time of the hooks on the path")
    parser.add_argument(
        "--device-ms", type=float, default=0, help="of an emulated device's step; 0: none"
    )
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    described = machine()
    rings = tempfile.TemporaryDirectory()
    os.environ |= {
        "INFERSCOPE": "1",
        "INFERSCOPE_DIR": rings.name,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    vllm: Any = importlib.import_module("vllm")  # not before its environment is set
    llm = vllm.LLM(
        model=str(options.checkpoint), load_format="dummy", dtype=options.dtype,
        hf_overrides=SHAPES[options.model], max_model_len=2048, max_num_seqs=64,
        max_num_batched_tokens=2048, enforce_eager=True, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=options.steps, ignore_eos=True, temperature=0)
    reader = subprocess.Popen([sys.executable, "-c", READER, rings.name])
    _keep_apart(reader.pid)
    if options.path or options.device_ms:  # else everything is written at once: see `is_early`
        observe_as_on_a_device(llm)
    hooks = Hooks()
    device = Device(llm, int(options.device_ms * 1e6)) if options.device_ms else None
    try:
        rows = [
            path(llm, sampling, device, size=size, rounds=options.pairs)
            if options.path
            else compare(llm, sampling, hooks, size=size, pairs=options.pairs)
            for size in options.batches
        ]
    finally:
        hooks.put(is_on=True)
        reader.kill()
        reader.wait()
    print(f"{options.model}: {options.pairs} pairs of batches of {options.steps} steps")
    for row in rows if options.path else ():
        low, high = row["path_p10_p90_us"]
        line = f"batch {row['batch']:>3}  path {row['path_us'][0]:.1f} µs [{low:.1f} {high:.1f}]"
        line += f"  hidden {row['hidden_us'][0]:.0f} µs"
        if "after_wake_us" in row:
            line += "  after the wait {:+.1f} µs [{:+.1f} {:+.1f}]".format(*row["after_wake_us"])
        print(line)
    for row in () if options.path else rows:
        mean, tail = row["mean_overhead"], row["p99_overhead"]
        print(
            f"batch {row['batch']:>3}  {row['step_ms']:.1f} ms a step  {row['cost_us']:.0f} µs  "
            f"mean {mean[0]:+.2%} [{mean[1]:+.2%} {mean[2]:+.2%}]  "
            f"p99 {tail[0]:+.2%} [{tail[1]:+.2%} {tail[2]:+.2%}]"
        )
    passes = all(row["passes"] for row in rows)
    rule = "path <= 20 µs, after the wait within 10 µs" if options.path else "upper ends <= 2 %"
    print(f"rule ({rule}): {'passed' if passes else 'FAILED'}")
    if options.out is not None:
        result = {
            "machine": described,
            "model": options.model,
            "dtype": options.dtype,
            "pairs": options.pairs,
            "device_ms": options.device_ms,
            "rows": rows,
            "passes": passes,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
