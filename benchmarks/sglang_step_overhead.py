"""Overhead per SGLang step before its dispatch, and the part hidden behind it.

A real SGLang engine on the CPU, offline, with random weights: its forward pass evicts the caches in
each step, as that of any engine does. In its scheduler's process every hook is put between two
readings of the thread's CPU clock, and so is what it is around. The hook's own time is what is left
of the first without the second, less the floor: what the same instrument reads, in batches between
the others, around a hook that does nothing, with the real one inside.
A hook's time before and after its original counts as

    path     everything but what follows `run_batch`: the device waits for it, or a client does
    hidden   what follows `run_batch`: the device computes

SGLang's batches alternate between both ways of recording: at once, as where the model runs within
`run_batch`, and behind the launch, as on a device. On a CPU nothing computes behind it; the work is
the same. A launch of 50 ms would have the probe's own thread write what is kept, as it does where a
device's launch hangs; with large batches this CPU takes longer, so here nothing is overdue. Steps
that decode an unchanged batch count; the first few of a batch do not.

    PEERS/venvs/sgl/bin/python benchmarks/sglang_step_overhead.py PEERS/tiny-qwen2 --out FILE

run in an environment where SGLang and inferscope are; the checkpoint gives the tokeniser only. The
rule: at most 20 µs on the path at any batch size, behind the launch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from host_events import QueuedEvents

LARGEST_PATH_US = 20.0
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "70m": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048,
    },
}  # fmt: skip
_HOOKS = (
    *("_get_next_batch_to_run", "_run_batch", "_forward", "_process_batch_result"),
    "_stream_output",
)
_PARTS = tuple(f"{name} {when}" for name in _HOOKS for when in ("before", "after"))
_HIDDEN = "_run_batch after"
_WARM_STEPS = 4
"""Steps of each batch that do not count: its prefill, and the first after a change."""
_WAYS = ((True, False), (False, False), (True, True))
"""In turn, batch by batch: recorded behind the launch, and measured as the floor."""
Hook = Callable[..., Any]


def defer(watch: Any, *, is_deferring: bool) -> None:
    """Record steps and time them, deferred as on a device or at once as on a CPU."""
    from inferscope.probe import EventTimer, HostTimer

    watch._is_deferring = watch._results._is_deferring = is_deferring
    spans = watch.probe._spans
    spans.timer = EventTimer(QueuedEvents()) if is_deferring else HostTimer()
    watch._marks = watch.probe.marks()


def _empty(_: Any, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


class Instrument:
    """Timer around the hooks in a scheduler's process, created by its `sitecustomize`."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._now = time.thread_time_ns
        self._step: dict[str, int] = defaultdict(int)
        self._rows: list[dict[str, Any]] = []
        self._team: list[Any] = []
        self._age = 0
        self._batches = 0
        self._is_floor = False

    def install(self) -> None:
        """Install the timer around the hooks of SGLang's scheduler."""
        from inferscope.adapters.sglang.hooks import SchedulerHooks
        from inferscope.probe import deferred

        deferred.OVERDUE_NS = 10**11
        for name in _HOOKS:
            setattr(SchedulerHooks, name, self._timed(getattr(SchedulerHooks, name), name))

    def _timed(self, hook: Hook, name: str) -> Hook:
        now = self._now
        before, after = f"{name} before", f"{name} after"

        def timed(hooks: Any, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_floor:
                around, within = _empty, partial(hook, hooks, original)
            else:
                around, within = hook, original
            start_ns = now()
            called_ns = returned_ns = start_ns

            def inner(*inner_args: Any, **inner_kwargs: Any) -> Any:
                nonlocal called_ns, returned_ns
                called_ns = now()
                try:
                    return within(*inner_args, **inner_kwargs)
                finally:
                    returned_ns = now()

            result = around(hooks, inner, *args, **kwargs)
            end_ns = now()
            step = self._step
            step[before] += called_ns - start_ns
            step[after] += end_ns - returned_ns
            step[name] += 1
            if name == "_get_next_batch_to_run":
                self._turn(hooks._watch, getattr(result, "batch_to_run", result))
            return result

        return timed

    def _turn(self, watch: Any, batch: Any) -> None:
        """Close a step's account: the scheduler has chosen the next batch."""
        step, self._step = self._step, defaultdict(int)
        # Scheduling counts with the step before: all steps that count are alike.
        if self._age > _WARM_STEPS and watch is not None and step["_run_batch"] == 1:
            self._rows.append(
                {
                    "batch": len(self._team),
                    "is_deferring": getattr(watch, "_is_deferring", None),
                    "is_floor": self._is_floor,
                    "read_ns": {part: step[part] for part in _PARTS},
                }
            )
        if batch is None:
            self._team, self._age = [], 0
            if self._rows:
                self._write()
                watch.flush()
                self._batches += 1
                is_deferring, self._is_floor = _WAYS[self._batches % len(_WAYS)]
                defer(watch, is_deferring=is_deferring)
            return
        is_same = batch.forward_mode.name == "DECODE" and batch.reqs == self._team
        self._age = self._age + 1 if is_same else 0
        self._team = list(batch.reqs)

    def _write(self) -> None:
        with self._out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in self._rows)
        self._rows = []


_SITE = """
import os, sys
if "SGLANG_STEP_OVERHEAD" in os.environ:
    import importlib.util
    from pathlib import Path
    sys.path.append(str(Path(os.environ["STEP_OVERHEAD"]).parent))
    spec = importlib.util.spec_from_file_location("step_overhead", os.environ["STEP_OVERHEAD"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Instrument(Path(os.environ["SGLANG_STEP_OVERHEAD"])).install()
"""


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each batch size and way of recording, in µs."""
    by_kind: dict[tuple[int, bool, bool], list[dict[str, int]]] = defaultdict(list)
    for row in rows:
        by_kind[row["batch"], row["is_floor"], row["is_deferring"]].append(row["read_ns"])
    found = []
    for (batch, is_floor, is_deferring), members in sorted(by_kind.items()):
        floors = by_kind.get((batch, True, True))
        if is_floor or floors is None:
            continue
        floor_ns = {part: statistics.median(read[part] for read in floors) for part in _PARTS}
        own = [{part: read[part] - floor_ns[part] for part in _PARTS} for read in members]
        found.append(
            {
                "batch": batch,
                "is_deferring": is_deferring,
                "steps": len(members),
                "path_us": _median_us(sum(each.values()) - each[_HIDDEN] for each in own),
                "hidden_us": _median_us(each[_HIDDEN] for each in own),
                "own_us": {part: _median_us(each[part] for each in own) for part in _PARTS},
            }
        )
    return found


def _median_us(values_ns: Any) -> float:
    return round(statistics.median(values_ns) / 1e3, 2)


def main() -> int:
    """Measure, print a table and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="70m", help="whose layers")
    parser.add_argument("--rounds", type=int, default=6, help="of each batch, in both ways")
    parser.add_argument("--steps", type=int, default=60, help="of a batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--no-overlap", action="store_true", help="schedule without overlap")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    from probe_cost import machine

    described = machine()
    scratch = tempfile.TemporaryDirectory()
    folder = Path(scratch.name)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    rows_path = folder / "rows.jsonl"
    path = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "INFERSCOPE": "1",
        "INFERSCOPE_DIR": str(folder / "rings"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SGLANG_STEP_OVERHEAD": str(rows_path),
        "STEP_OVERHEAD": str(Path(__file__).resolve()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    sglang: Any = importlib.import_module("sglang")  # not before its environment is set
    engine = sglang.Engine(
        model_path=str(options.checkpoint), load_format="dummy", device="cpu",
        json_model_override_args=json.dumps(SHAPES[options.model]), context_length=2048,
        max_running_requests=64, max_total_tokens=20000, mem_fraction_static=0.2,
        attention_backend="torch_native", sampling_backend="pytorch", disable_radix_cache=True,
        disable_overlap_schedule=options.no_overlap, skip_tokenizer_init=True, log_level="error",
    )  # fmt: skip
    sampling = {"max_new_tokens": options.steps, "ignore_eos": True, "temperature": 0}
    draw = random.Random(0)
    try:
        for _ in range(options.rounds):
            for size in options.batches:
                for _ in _WAYS:
                    prompts = [[draw.randrange(10, 4000) for _ in range(8)] for _ in range(size)]
                    engine.generate(input_ids=prompts, sampling_params=sampling)
                    time.sleep(0.2)  # until the scheduler has found nothing to do
    finally:
        engine.shutdown()
    rows = [json.loads(line) for line in rows_path.read_text(encoding="utf-8").splitlines()]
    found = [row for row in summary(rows) if row["batch"] in options.batches]
    for row in found:
        way = {True: "behind", False: "at once"}.get(row["is_deferring"], "as it is")
        print(
            f"batch {row['batch']:>3}  {way:<8} {row['steps']:>5} steps  "
            f"path {row['path_us']:6.1f} µs  hidden {row['hidden_us']:6.1f} µs"
        )
    passes = all(row["path_us"] <= LARGEST_PATH_US for row in found if row["is_deferring"])
    print(f"rule (path <= {LARGEST_PATH_US:g} µs): {'passed' if passes else 'FAILED'}")
    if options.out is not None:
        result = {
            "machine": described,
            "model": options.model,
            "overlap": not options.no_overlap,
            "rows": found,
            "passes": passes,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
