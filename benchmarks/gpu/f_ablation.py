"""(f) The fair split against the truth: mixed steps measured with every part of their batch.

As benchmarks/attribution_truth.py, but timed by the device: the model learns from a served load,
is frozen, and is asked about steps that it has never seen.
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
from ablation import Scene, coalitions
from ablation import measure as measure_coalitions
from load import wait_for
from part import Setting, Unmet, main
from truth_score import judge

from inferscope.collector.source import open_replay
from inferscope.engine import Engine, EngineOptions
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe, load_model
from inferscope.engine.runner import Runner
from inferscope.probe import Probe

_LEARN_SHARE = 0.5
_NUM_BLOCKS = 2400
_LEAST_STEPS = 256


class DeviceScene(Scene):
    """A scene timed from before the launch to the device's end; a GPU has no thread's time."""

    def __init__(self, engine: Engine, runner: Runner, shape: Any, draw: random.Random) -> None:
        self._engine = engine
        super().__init__(engine, runner, shape, draw)

    def sample(self, members: Sequence[int]) -> tuple[list[int], int]:
        """Run a step of some requests; return the sampled tokens and nanoseconds."""
        wait_for(self._engine)
        began_ns = time.perf_counter_ns()
        tokens, _ = super().sample(members)
        wait_for(self._engine)
        return tokens, time.perf_counter_ns() - began_ns


def measure(setting: Setting) -> dict[str, Any]:
    """Learn, freeze, take steps apart."""
    options = EngineOptions(
        device=setting.device, token_budget=served.TOKEN_BUDGET, max_running=served.MAX_RUNNING,
        num_blocks=_NUM_BLOCKS, max_model_tokens=served.LONGEST_REQUEST, prefix_cache=False,
    )  # fmt: skip
    model = load_model(setting.model, options)
    runner = Runner.of(model, options, num_blocks=_NUM_BLOCKS)
    engine = Engine(model, options, runner=runner)
    frozen = learn(engine, setting)
    until_s = time.monotonic() + (1 - _LEARN_SHARE) * setting.seconds
    draw, rows = random.Random("gpu steps"), []
    for shape in served.step_shapes(random.Random("gpu shapes"), 24):
        if time.monotonic() > until_s and rows:
            break
        scene = DeviceScene(engine, runner, shape, draw)
        run = coalitions(shape, 4.0)
        runs = measure_coalitions(scene, run.members, repeats=4, draw=draw)
        scene.close()
        rows.append(judge(frozen, shape, run, runs))
    wrong = {name: sum(row["misallocated"][name] for row in rows) / len(rows) for name in RULES}
    lines = [
        f"{len(rows)} steps, learned from {frozen.num_steps}: wrongly allocated "
        + ", ".join(f"{name} {share:.1%}" for name, share in wrong.items())
    ]
    return {"steps": rows, "misallocated": wrong, "served": frozen.num_steps, "lines": lines}


RULES = ("fair", "tokens", "equal")


def learn(engine: Engine, setting: Setting) -> served.Frozen:
    """Serve under the probe, timed by the device, and freeze what the fold has learned."""
    until_s = time.monotonic() + _LEARN_SHARE * setting.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        timer = step_timer(engine.model.device)
        engine.probe = Probe.open(describe(engine, name=setting.model), timer=timer)
        num_steps, draw = 0, random.Random("gpu load")
        while time.monotonic() < until_s or num_steps < _LEAST_STEPS:
            num_steps += served.serve(engine, draw, 64)
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
