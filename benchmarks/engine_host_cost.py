"""Host time of the reference engine's step: everything but the forward pass and sampling.

Each engine decodes 32 requests with uneven contexts while 10 to 10,000 others wait. Measured is the
CPU time of the loop's thread in `Engine.step`, less that in the forward pass and in sampling, which
is mostly the argmax over the logits. It is divided into scheduling, batch preparation, and the
rest, which is the launch and the commit. The engines share one model and take turns,
A B C D D C B A, in rounds of some steps. Reported are the median and the 90th percentile over all
steps, and the extremes of the rounds' medians.

The small model leaves the host's code in the cache; the weights of the large one push it out
between two steps, as in an engine that serves. The probe is off, and once on: its cost is measured
on its own (probe_cost.py).

The rule: scheduling, preparation and commit take at most 150 µs a step in the median, with every
number of waiting requests.

    python benchmarks/engine_host_cost.py --out benchmarks/results/engine_host_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from probe_cost import machine

from inferscope.engine import Engine, EngineOptions, Sampling, runner
from inferscope.engine.load import describe, load_model
from inferscope.engine.model import Model, forward
from inferscope.engine.sampler import choose_tokens
from inferscope.probe import Probe

_P = ParamSpec("_P")
_R = TypeVar("_R")

BATCH = 32
WAITING = (10, 100, 1_000, 10_000)
TARGET_US = 150.0
MODELS = ("random:tiny", "random:small-100m")
PARTS = ("schedule", "prepare", "commit", "sample")
_NUM_PROMPT, _SPREAD = 64, 4
"""Tokens of the shortest prompt, and by how many each is longer than the one before."""


class Meter:
    """CPU time of this thread in named parts of a step.

    Attributes:
        spent_ns: Time in each part since the step began.
    """

    def __init__(self) -> None:
        self.spent_ns = dict.fromkeys((*PARTS, "forward"), 0)

    def timed(self, part: str, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a function that adds the time of `call` to a part."""

        def run(*args: _P.args, **options: _P.kwargs) -> _R:
            began_ns = time.thread_time_ns()
            try:
                return call(*args, **options)
            finally:
                self.spent_ns[part] += time.thread_time_ns() - began_ns

        return run

    def watch(self, engine: Engine) -> None:
        """Time the parts of an engine."""
        scheduler, steps = engine.scheduler, engine._runner
        assert isinstance(steps, runner.Runner)
        scheduler.schedule = self.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        steps.prepare = self.timed("prepare", steps.prepare)  # type: ignore[method-assign]

    def step(self, engine: Engine) -> dict[str, float]:
        """Run a step and return the microseconds of each part, and those of the host."""
        self.spent_ns = dict.fromkeys((*PARTS, "forward"), 0)
        began_ns = time.thread_time_ns()
        engine.step()
        step_ns = time.thread_time_ns() - began_ns
        host_ns = step_ns - self.spent_ns["forward"] - self.spent_ns["sample"]
        self.spent_ns["commit"] = host_ns - self.spent_ns["schedule"] - self.spent_ns["prepare"]
        return {"host": host_ns / 1e3, **{part: self.spent_ns[part] / 1e3 for part in PARTS}}


def decoding(model: Model, *, num_waiting: int, num_steps: int) -> Engine:
    """Return an engine that decodes 32 requests for `num_steps` while others wait."""
    longest = _NUM_PROMPT + _SPREAD * BATCH + num_steps + BATCH
    options = EngineOptions(
        max_running=BATCH,
        max_waiting=num_waiting + BATCH,
        max_model_tokens=longest,
        dtype="float32",
    )
    engine = Engine(model, options)
    for number in range(BATCH + num_waiting):
        # Each prompt is its own: none is found in the prefix cache.
        first = (number % 500, number // 500)
        length = _NUM_PROMPT + _SPREAD * (number % BATCH)
        prompt = [*first, *(position % 500 for position in range(2, length))]
        engine.submit(prompt, Sampling(max_tokens=num_steps + BATCH, ignore_eos=True))
    while len(running := engine.scheduler.running) < BATCH or not running[-1].num_output:
        engine.step()
    assert len(engine.scheduler.waiting) == num_waiting
    return engine


def measure(name: str, *, is_on: bool, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each number of waiting requests."""
    model = load_model(name, EngineOptions(dtype="float32"))
    engines = [
        decoding(model, num_waiting=num, num_steps=rounds * steps + steps) for num in WAITING
    ]
    meter = Meter()
    runner.forward = meter.timed("forward", forward)
    runner.choose_tokens = meter.timed("sample", choose_tokens)
    for engine in engines:
        if is_on:
            engine.probe = Probe.open(describe(engine, name=name))
        for _ in range(steps):
            engine.step()
        meter.watch(engine)
    found: list[list[list[dict[str, float]]]] = [[] for _ in WAITING]
    places = range(len(WAITING))
    for number in range(rounds):
        for place in places if number % 2 == 0 else reversed(places):
            found[place].append([meter.step(engines[place]) for _ in range(steps)])
    for engine in engines:
        assert len(engine.scheduler.running) == BATCH, "a request ended within the measurement"
        engine.probe.close()
        engine.close()
    return [row(num, each) for num, each in zip(WAITING, found, strict=True)]


def row(num_waiting: int, rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Sum up the steps of an engine."""
    hosts = [[step["host"] for step in each] for each in rounds]
    everything = [us for each in hosts for us in each]
    medians = [statistics.median(each) for each in hosts]
    parts = {
        part: round(statistics.median(step[part] for each in rounds for step in each), 1)
        for part in PARTS
    }
    return {
        "waiting": num_waiting,
        "host_us": round(statistics.median(everything), 1),
        "p90_us": round(statistics.quantiles(everything, n=10)[-1], 1),
        "least_round_us": round(min(medians), 1),
        "most_round_us": round(max(medians), 1),
        "parts_us": parts,
        "steps": len(everything),
    }


def main() -> int:
    """Measure, print a table and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="steps of each engine in a round")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    about = machine()
    size = {"rounds": options.rounds, "steps": options.steps}
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        for name, is_on in ((name, is_on) for name in options.models for is_on in (False, True)):
            for found in measure(name, is_on=is_on, **size):
                rows.append({"model": name, "probe": "on" if is_on else "off", **found})
                print(_line(rows[-1]), flush=True)
    about["load_average_after"] = os.getloadavg()[0]
    passes = all(row["host_us"] <= TARGET_US for row in rows if row["probe"] == "off")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"target (<= {TARGET_US:.0f} µs with the probe off): {'met' if passes else 'missed'}")
    if options.out is not None:
        result = {"machine": about, "batch": BATCH, "rows": rows, "passes": passes}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if passes else 1


def _line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {us:.0f}" for part, us in row["parts_us"].items())
    spread = f"rounds {row['least_round_us']:.0f} to {row['most_round_us']:.0f}"
    return (
        f"{row['model']}, probe {row['probe']}, {row['waiting']:6,d} waiting: "
        f"{row['host_us']:.0f} µs (p90 {row['p90_us']:.0f}, {spread}): {parts}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
