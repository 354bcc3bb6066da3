"""(c) Model bytes against PM sampling and Nsight Compute, and what 100 ms windows make of them.

Decode and prefill phases run by themselves: bytes per step by the model and by the counters. Then
they alternate; the counters' windows are joined to 100 ms ones, as GPM has them, and a regression
on the model's bytes per phase must find what the short windows say.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from load import Decoding, Phase, open_engine, prefill
from part import Setting, main
from watched import Sampler, Windows

from inferscope.engine import Engine

_LONG_NS = 100_000_000
_NCU_S = 60
_NCU_METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"


def measure(setting: Setting) -> dict[str, Any]:
    """Run the phases alone, then in turn."""
    setting.need_gpu()
    engine = open_engine(setting)
    # The same weights for prompts of their own: the batch stands still meanwhile, and every byte
    # that is moved between the first phase and the last belongs to one of them.
    beside = Engine(engine.model, replace(engine.options, num_blocks=512, max_running=4))
    phases: dict[str, Phase] = {}
    alternating: list[tuple[str, Phase]] = []
    with Sampler("pm") as sampler:
        for batch, context in ((1, 512), (16, 512), (64, 512), (16, 4096)):
            decoding = Decoding(engine, batch=batch, context=context)
            decoding.run(4)
            phases[f"decode {batch} x {context}"] = decoding.run(40)
            decoding.close()
        for num_tokens in (256, 2048):
            prefill(engine, num_tokens=num_tokens, num_prompts=2)
            name = f"prefill {num_tokens}"
            phases[name] = prefill(engine, num_tokens=num_tokens, num_prompts=10)
        decoding = Decoding(engine, batch=16, context=512)
        for _ in range(8):
            alternating += [
                ("decode", decoding.run(17)),
                ("prefill", prefill(beside, num_tokens=2048, num_prompts=3)),
            ]
        decoding.close()
    samples = sampler.of("pm")
    read, write = (Windows(samples, f"dram_{way}_bytes") for way in ("read", "write"))
    rows = [row(name, phase, read, write) for name, phase in phases.items()]
    regression = regress(alternating, read, write)
    ncu = nsight(setting)
    lines = [
        f"{each['phase']:<18} model {each['model_bytes'] / 1e9:7.2f} GB/step, PM "
        + ("-" if each["pm_bytes"] is None else f"{each['pm_bytes'] / 1e9:7.2f} GB/step, ")
        + ("" if each["pm_over_model"] is None else f"ratio {each['pm_over_model']:.3f}")
        for each in rows
    ]
    lines += [
        f"100 ms regression, {name}: {told['by_regression']:.3f} of the model, "
        f"PM says {told['by_pm']:.3f}"
        for name, told in regression.items()
    ]
    lines.append(f"Nsight Compute: {ncu.get('reason') or ncu}")
    return {"phases": rows, "regression": regression, "ncu": ncu, "lines": lines}


def row(name: str, phase: Phase, read: Windows, write: Windows) -> dict[str, Any]:
    """Return one phase's bytes per step, by the model and by the counters."""
    parts = [windows.amount(phase.start_ns, phase.end_ns) for windows in (read, write)]
    pm = None if None in parts else sum(part or 0.0 for part in parts)
    return {
        "phase": name,
        "step_ms": phase.step_ns / 1e6,
        "model_bytes": phase.bytes / phase.num_steps,
        "pm_bytes": None if pm is None else pm / phase.num_steps,
        "pm_over_model": None if pm is None else pm / phase.bytes,
    }


def regress(
    told: list[tuple[str, Phase]], read: Windows, write: Windows
) -> dict[str, dict[str, float]]:
    """Fit bytes of 100 ms windows to the phases' modelled bytes in them, and compare with PM's."""
    names = sorted({name for name, _ in told})
    first, last = told[0][1].start_ns, told[-1][1].end_ns
    design, moved = [], []
    for start in range(first, last - _LONG_NS, _LONG_NS):
        amounts = [windows.amount(start, start + _LONG_NS) for windows in (read, write)]
        if None in amounts:
            continue
        moved.append(sum(amount or 0.0 for amount in amounts))
        design.append(
            [sum(inside(phase, start) for of, phase in told if of == name) for name in names]
        )
    if len(moved) < 2 * len(names):
        return {}
    scales = np.linalg.lstsq(np.array(design), np.array(moved), rcond=None)[0]
    return {
        name: {
            "by_regression": float(scale),
            "by_pm": by_pm(name, told, read, write),
            "num_windows": len(moved),
        }
        for name, scale in zip(names, scales, strict=True)
    }


def inside(phase: Phase, start_ns: int) -> float:
    """Return the modelled bytes of a phase within a long window, spread evenly over the phase."""
    overlap = min(phase.end_ns, start_ns + _LONG_NS) - max(phase.start_ns, start_ns)
    return phase.bytes * max(0, overlap) / (phase.end_ns - phase.start_ns)


def by_pm(name: str, told: list[tuple[str, Phase]], read: Windows, write: Windows) -> float:
    """Return what short windows say of all phases of a kind, over what the model says."""
    pm = model = 0.0
    for of, phase in told:
        amounts = [windows.amount(phase.start_ns, phase.end_ns) for windows in (read, write)]
        if of == name and None not in amounts:
            pm += sum(amount or 0.0 for amount in amounts)
            model += phase.bytes
    return pm / model if model else float("nan")


def nsight(setting: Setting) -> dict[str, Any]:
    """Count one decode step's bytes with Nsight Compute, kernel by kernel, if it is there."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return {"reason": "ncu is not installed here"}
    command = [
        ncu, "--metrics", _NCU_METRICS, "--csv", "--profile-from-start", "off",
        sys.executable, str(Path(__file__).with_name("one_step.py")), setting.model,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NCU_S, check=False)
    except subprocess.TimeoutExpired:
        return {"reason": f"ncu took longer than {_NCU_S} s"}
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        cells = [cell.strip('"') for cell in line.split('","')]
        for metric in _NCU_METRICS.split(","):
            if metric in cells:
                unit, value = cells[cells.index(metric) + 1 : cells.index(metric) + 3]
                factor = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(unit, np.nan)
                amount = float(value.replace(",", "").rstrip('"')) * factor
                found[metric] = found.get(metric, 0.0) + amount
    return found or {"reason": (done.stderr or done.stdout)[-300:]}


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
