"""(f) The fair split against the truth: mixed steps measured with every part of their batch.

As benchmarks/attribution_truth.py, but timed by the device: the model learns from a served load,
is frozen, and is asked about steps that it has never seen. A step is taken apart if 10 rounds of
its coalitions fit into the time that is left; the others are listed as omitted.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import served
import torch
from ablation import SETTLING_STEPS, Scene, StepShape, Stopwatch, WorkTotals, coalitions
from ablation import measure as measure_coalitions
from part import Bank, Setting, Unmet, main
from torch import Tensor
from truth_score import RULES, judge

from inferscope.engine import Engine, EngineOptions
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe, load_model
from inferscope.engine.runner import Runner
from inferscope.probe import Probe
from inferscope.readers.source import open_replay

REPEATS, _DRY_REPEATS = 10, 2
"""Rounds of a step's coalitions, besides one that only warms up."""
_GAP = 4.0
_LEARN_SHARE = 0.4
_NUM_SHAPES, _DRY_SHAPES = 24, 4
_BLOCK_TOKENS = 16
_LEAST_STEPS = 256
_GOLDEN = 0.6180339887498949


def measure(setting: Setting, bank: Bank) -> None:
    """Learn, freeze, take steps apart."""
    began_s = time.monotonic()
    ranges = served.ON_CPU if setting.is_dry else served.ON_GPU
    num_blocks = ranges.max_running * (ranges.longest_request // _BLOCK_TOKENS + 1)
    options = EngineOptions(
        device=setting.device, token_budget=ranges.token_budget, max_running=ranges.max_running,
        num_blocks=num_blocks, max_model_tokens=ranges.longest_request, prefix_cache=False,
        cuda_graphs=False,  # or coalitions of decodes alone would be steps of another mode
    )  # fmt: skip
    model = load_model(setting.model, options)
    runner = Runner.of(model, options, num_blocks=num_blocks)
    engine = Engine(model, options, runner=runner)
    until_s = began_s + _LEARN_SHARE * setting.seconds
    frozen = learn(engine, setting, ranges, until_s=until_s)
    bank.keep(
        "learned",
        {"num_steps": frozen.num_steps, "sha256": frozen.sha256, "residual": frozen.residual},
        f"learned from {frozen.num_steps} steps, residual {frozen.residual:+.1%}, "
        f"coefficients {frozen.sha256[:16]}",
    )
    until_s = max(began_s + setting.seconds, time.monotonic() + setting.seconds / 4)
    draw, rows, left_out = random.Random("gpu steps"), list[dict[str, Any]](), list[str]()
    num_shapes = _DRY_SHAPES if setting.is_dry else _NUM_SHAPES
    for shape in interleaved(served.step_shapes(random.Random("gpu shapes"), num_shapes, ranges)):
        if time.monotonic() > until_s:
            break
        name = name_of(shape)
        with bank.row(name):
            scene = Scene(
                engine, runner, shape, draw,
                stopwatch=stopwatch(model.device),
                settling_steps=0 if setting.is_cuda else SETTLING_STEPS,
            )  # fmt: skip
            try:
                row = taken_apart(scene, shape, frozen, draw, setting, until_s=until_s)
            except TooLong as reason:
                left_out.append(f"{name}: {reason}")
            else:
                rows.append(row)
                bank.keep(name, row)
            finally:
                scene.close()
        bank.keep("score", score(rows, left_out), *score_lines(rows, left_out))
    if not rows:
        raise Unmet("no step's coalitions fit into the time; give more --seconds")


class TooLong(Exception):
    """A step's coalitions would take longer than there is time."""


def taken_apart(
    scene: Scene,
    shape: StepShape,
    frozen: served.Frozen,
    draw: random.Random,
    setting: Setting,
    *,
    until_s: float,
) -> dict[str, Any]:
    """Measure a step's coalitions and judge every rule by them.

    Raises:
        TooLong: that is known before anything of it is.
    """
    run = coalitions(shape, _GAP)
    repeats = _DRY_REPEATS if setting.is_dry else REPEATS
    scene.sample(run.members[-1])  # new sizes: memory is taken, kernels are chosen and loaded
    began_s = time.monotonic()
    scene.sample(run.members[-1])
    step_s = time.monotonic() - began_s
    needed_s = (len(run.members) - 1) * (repeats + 1) * step_s
    left_s = until_s - time.monotonic()
    if needed_s > left_s and not setting.is_dry:
        raise TooLong(f"takes about {needed_s:.0f} s, {left_s:.0f} are left")
    for members in run.members[1:]:
        scene.sample(members)
    runs = measure_coalitions(scene, run.members, repeats=repeats, draw=draw, until_s=until_s)
    return judge(frozen, shape, run, runs) | {"repeats": int(runs.round.max()) + 1}


def stopwatch(device: torch.device) -> Stopwatch:
    """Return what times a step from its first launch to its sampled tokens, as the probe does."""
    if device.type != "cuda":
        return by_host

    def by_device(work: WorkTotals) -> tuple[Tensor, int]:
        with torch.cuda.device(device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            tokens = work()
            last.record()
            last.synchronize()
        return tokens, round(first.elapsed_time(last) * 1e6)

    return by_device


def by_host(work: WorkTotals) -> tuple[Tensor, int]:
    """Time by the host's clock."""
    began_ns = time.perf_counter_ns()
    tokens = work()
    return tokens, time.perf_counter_ns() - began_ns


def interleaved(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Order steps so that the first few, however many there is time for, are of all sizes."""
    by_size = sorted(shapes, key=lambda shape: len(shape.parts))
    places = sorted(range(len(by_size)), key=lambda at: (at + 1) * _GOLDEN % 1)
    return [by_size[at] for at in places]


def name_of(shape: StepShape) -> str:
    """Return what a step is called: its size, and its chunks as tokens after context."""
    chunks = " + ".join(f"{part.num_tokens}@{part.context}" for part in shape.chunks)
    return f"step of {len(shape.parts)}, prefills {chunks}"


def score(rows: Sequence[dict[str, Any]], left_out: Sequence[str]) -> dict[str, Any]:
    """Return what all steps come to."""
    return {
        "num_steps": len(rows),
        "left_out": list(left_out),
        "misallocated": {
            name: sum(row["misallocated"][name] for row in rows) / len(rows) if rows else None
            for name in RULES
        },
        "split_half_misallocated": (
            sum(row["split_half_misallocated"] for row in rows) / len(rows) if rows else None
        ),
    }


def score_lines(rows: Sequence[dict[str, Any]], left_out: Sequence[str]) -> list[str]:
    """Return the score as lines, a step's first."""
    lines = [
        f"batch {len(row['chunks']) + row['decodes']:>2}: {row['step_ms']:.2f} ms, modelled "
        f"{row['modelled_ms']:.2f}; misallocated "
        + ", ".join(f"{name} {row['misallocated'][name]:.1%}" for name in RULES)
        + f"; halves {row['split_half_misallocated']:.1%}, {row['repeats']} rounds"
        for row in rows
    ]
    if rows:
        misallocated = score(rows, left_out)["misallocated"]
        shares = ", ".join(f"{name} {share:.1%}" for name, share in misallocated.items())
        lines.append(f"{len(rows)} steps, mean of what goes to the wrong requests: {shares}")
    if left_out:
        lines.append(f"left out for want of time: {'; '.join(left_out)}")
    return lines


def learn(
    engine: Engine, setting: Setting, ranges: served.Ranges, *, until_s: float
) -> served.Frozen:
    """Serve under the probe, timed by the device, and freeze what the fold has learned.

    Raises:
        Unmet: too few steps for a fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        timer = step_timer(engine.model.device)
        engine.probe = Probe.open(describe(engine, name=setting.model), timer=timer)
        num_steps, draw = 0, random.Random("gpu load")
        while time.monotonic() < until_s or num_steps < _LEAST_STEPS:
            num_steps += served.serve(engine, draw, 64, ranges)
        time.sleep(0.3)
        engine.probe.close()
        engine.probe = Probe.disabled()
        source = open_replay(Path(folder))
        source.advance()
        source.close()
    (fold,) = source.collector.engines.values()
    mode = fold.book.mode("eager")
    if mode.model.source != "fit" or mode.healthy_ratio is None or mode.residual is None:
        raise Unmet(f"{num_steps} steps are too few to learn from; give more --seconds")
    digest = served.digest(mode.model)
    return served.Frozen(mode.model, mode.healthy_ratio, mode.residual, digest, num_steps)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
