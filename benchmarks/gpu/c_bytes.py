"""(c) Model bytes against PM sampling and Nsight Compute, and what 100 ms windows make of them.

Decode and prefill phases run by themselves: bytes per step by the model and by the counters. Then,
with the device's memory free again, Nsight Compute counts one step of either phase, of a model of
the same widths with few layers: a whole step's kernels take it too long. PM sampling sees the
phases of that model just before, so that what is compared is of one shape. Last, the phases
alternate; the counters' windows are joined to 100 ms ones, as GPM has them, and the regression that
`collect` uses must find what the short windows say.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from load import Decoding, Phase, blocks_for, open_engine, prefill
from nsight import Counted, count_step
from one_step import DECODE_BATCH, DECODE_CONTEXT, FEW_LAYERS, PREFILL_TOKENS, few_layers
from part import Bank, Setting, Unmet, main, release, shown
from watched import Sampler, Traffic

from inferscope.attribution.regression import FEWEST_WINDOWS, condition, estimate
from inferscope.engine import Engine

LONG_NS = 100_000_000
_DECODES = ((1, 512), (DECODE_BATCH, DECODE_CONTEXT), (64, 512), (16, 4096))
_PREFILLS = (256, PREFILL_TOKENS)
_DECODE_STEPS, _PREFILL_PROMPTS = 40, 10
_FEW_STEPS, _FEW_PROMPTS = 160, 40
"""Steps and prompts of a model with few layers, whose steps are short."""
_LEAST_TURNS, _MOST_TURNS, _TURNS_S = 11, 60, 8.0
_STEPS_PER_TURN = 17
_TURN_STEPS = _MOST_TURNS * _STEPS_PER_TURN
"""Number of steps for 50 windows, with a margin."""
_NCU_S = 40.0
_MOST_KERNELS = 12
"""Kernels that are printed; the evidence has all."""
BOUNDS = {"decode": 0.05, "prefill": 0.20, "pm": 0.03}
"""Largest error of the model against Nsight Compute by phase, and of PM sampling."""


def measure(setting: Setting, bank: Bank) -> None:
    """Run the phases alone, then under Nsight Compute, then in turn."""
    setting.need_gpu()
    with bank.row("pm"):
        by_counters(setting, bank)
    release()
    few, of = replace(setting, model=few_layers(setting.model)), ""
    if few.model != setting.model:
        of = f"{FEW_LAYERS} layers, "
        with bank.row("pm of few layers"):
            of_few_layers(few, bank, of=of)
        release()
    # Nsight Compute runs a process of its own, with weights of its own.
    for phase, of_pm in (
        ("decode", decode_name(DECODE_BATCH, DECODE_CONTEXT)),
        ("prefill", prefill_name(PREFILL_TOKENS)),
    ):
        name = f"ncu {phase}"
        with bank.row(name):
            counted, modelled = count_step(few.model, phase, limit_s=_NCU_S)
            row = against(
                phase,
                counted_bytes=counted.read_bytes + counted.write_bytes,
                modelled=modelled,
                pm_over_model=bank.rows.get(of + of_pm, {}).get("pm_over_model"),
            )
            row |= {"model": few.model, "num_kernels": counted.num_kernels, **counted._asdict()}
            bank.keep(name, row, line_of(name, row), *kernel_lines(counted))
    with bank.row("100 ms regression"):
        by_regression(setting, bank)


def by_regression(setting: Setting, bank: Bank) -> None:
    """Alternate the phases on an engine, and keep what the 100 ms regression makes of them."""
    engine = open_engine(setting, num_blocks=blocks_for(DECODE_BATCH, DECODE_CONTEXT + _TURN_STEPS))
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        in_turn = alternate(engine)
        sampler.refresh()
        found = regress(in_turn, Traffic(sampler.of("pm")))
        bank.keep("100 ms regression", found, *regression_lines(found))


def by_counters(setting: Setting, bank: Bank) -> None:
    """Run the phases on one engine under PM sampling; nothing of it is left behind."""
    most = max(blocks_for(batch, context + 2 * _DECODE_STEPS) for batch, context in _DECODES)
    engine = open_engine(setting, num_blocks=most)
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        for batch, context in _DECODES:
            decode_row(bank, decode_name(batch, context), engine, sampler, batch, context)
        for num_tokens in _PREFILLS:
            prefill_row(bank, prefill_name(num_tokens), engine, sampler, num_tokens)


def of_few_layers(setting: Setting, bank: Bank, *, of: str) -> None:
    """Run the phases that Nsight Compute counts a step of, on the model that it sees.

    Args:
        setting: with that model.
        bank: of the part.
        of: what the rows' names begin with.
    """
    most = blocks_for(DECODE_BATCH, DECODE_CONTEXT + 2 * _FEW_STEPS)
    engine = open_engine(setting, num_blocks=max(most, blocks_for(1, PREFILL_TOKENS)))
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        decode_row(
            bank, of + decode_name(DECODE_BATCH, DECODE_CONTEXT), engine, sampler,
            DECODE_BATCH, DECODE_CONTEXT, num_steps=_FEW_STEPS,
        )  # fmt: skip
        prefill_row(
            bank, of + prefill_name(PREFILL_TOKENS), engine, sampler, PREFILL_TOKENS,
            num_prompts=_FEW_PROMPTS,
        )  # fmt: skip


def decode_row(
    bank: Bank,
    name: str,
    engine: Engine,
    sampler: Sampler,
    batch: int,
    context: int,
    *,
    num_steps: int = _DECODE_STEPS,
) -> None:
    """Keep a decode phase by itself."""
    with bank.row(name):
        with closing(Decoding(engine, batch=batch, context=context)) as decoding:
            decoding.run(4)
            phase = decoding.run(num_steps)
        keep_phase(bank, name, phase, sampler)


def prefill_row(
    bank: Bank,
    name: str,
    engine: Engine,
    sampler: Sampler,
    num_tokens: int,
    *,
    num_prompts: int = _PREFILL_PROMPTS,
) -> None:
    """Keep a prefill phase by itself."""
    with bank.row(name):
        prefill(engine, num_tokens=num_tokens, num_prompts=2)
        phase = prefill(engine, num_tokens=num_tokens, num_prompts=num_prompts)
        keep_phase(bank, name, phase, sampler)


def decode_name(batch: int, context: int) -> str:
    """Return what a decode phase is called."""
    return f"decode {batch} x {context}"


def prefill_name(num_tokens: int) -> str:
    """Return what a prefill phase is called."""
    return f"prefill {num_tokens}"


def keep_phase(bank: Bank, name: str, phase: Phase, sampler: Sampler) -> None:
    """Keep one phase's bytes per step, by the model and by the counters."""
    sampler.refresh()
    pm = Traffic(sampler.of("pm")).amount(phase.start_ns, phase.end_ns)
    row = {
        "step_ms": phase.step_ns / 1e6,
        "model_bytes": phase.bytes / phase.num_steps,
        "gather_bytes": phase.gather_bytes / phase.num_steps,
        "pm_bytes": None if pm is None else pm / phase.num_steps,
        "pm_over_model": None if pm is None else pm / phase.bytes,
        "pm_over_model_and_gather": None if pm is None else pm / (phase.bytes + phase.gather_bytes),
    }
    bank.keep(
        name,
        row,
        f"{name:<18} model {row['model_bytes'] / 1e9:6.2f} GB/step, gathers "
        f"{row['gather_bytes'] / 1e9:6.2f} more, PM "
        f"{shown(None if pm is None else pm / phase.num_steps / 1e9, '6.2f')}, PM/model "
        f"{shown(row['pm_over_model'], '.3f')}, with gathers "
        f"{shown(row['pm_over_model_and_gather'], '.3f')}",
    )


def alternate(engine: Engine) -> list[tuple[str, Phase]]:
    """Alternate decodes and prefills for as many windows as the regression needs."""
    # The same weights for prompts of their own: the batch stands still meanwhile, and every byte
    # that is moved between the first phase and the last belongs to one of them.
    options = replace(engine.options, num_blocks=blocks_for(4, PREFILL_TOKENS), max_running=4)
    beside = Engine(engine.model, options)
    found: list[tuple[str, Phase]] = []
    with closing(Decoding(engine, batch=DECODE_BATCH, context=DECODE_CONTEXT)) as decoding:
        until_s = time.monotonic() + _TURNS_S
        for at in range(_MOST_TURNS):
            if at >= _LEAST_TURNS and time.monotonic() > until_s:
                break
            found += [
                ("decode", decoding.run(_STEPS_PER_TURN)),
                ("prefill", prefill(beside, num_tokens=PREFILL_TOKENS, num_prompts=3)),
            ]
    return found


def regress(in_turn: list[tuple[str, Phase]], traffic: Traffic) -> dict[str, Any]:
    """Fit bytes of 100 ms windows to the phases' modelled bytes in them, and compare with PM's.

    Raises:
        Unmet: the regression declines: windows too few, or phases too much alike.
    """
    names = sorted({name for name, _ in in_turn})
    first, last = in_turn[0][1].start_ns, in_turn[-1][1].end_ns
    design, moved = [], []
    for start_ns in range(first, last - LONG_NS + 1, LONG_NS):
        amount = traffic.amount(start_ns, start_ns + LONG_NS)
        if amount is None:
            continue
        moved.append(amount)
        design.append(
            [sum(inside(phase, start_ns) for of, phase in in_turn if of == name) for name in names]
        )
    columns = np.array(design, dtype=np.float64).reshape(len(moved), len(names))
    found = estimate(columns, np.array(moved)) if moved else None
    if found is None:
        alike = f", condition {condition(columns):.0f}" if moved else ""
        raise Unmet(f"{len(moved)} windows of 100 ms, {FEWEST_WINDOWS} are needed{alike}")
    return {
        "num_windows": found.num_windows,
        "fit_error": found.fit_error,
        "phases": {
            name: {"by_regression": rate, "error": error, "by_pm": by_pm(name, in_turn, traffic)}
            for name, rate, error in zip(names, found.rates, found.errors, strict=True)
        },
    }


def regression_lines(found: dict[str, Any]) -> list[str]:
    """Return the regression as lines."""
    return [
        f"100 ms regression, {name}: {shown(phase['by_regression'], '.3f')} ± "
        f"{shown(phase['error'], '.3f')} of the model, PM says {shown(phase['by_pm'], '.3f')} "
        f"({found['num_windows']} windows, fit error {found['fit_error']:.1%})"
        for name, phase in found["phases"].items()
    ]


def inside(phase: Phase, start_ns: int) -> float:
    """Return the modelled bytes of a phase within a long window, spread evenly over the phase."""
    overlap = min(phase.end_ns, start_ns + LONG_NS) - max(phase.start_ns, start_ns)
    return phase.bytes * max(0, overlap) / (phase.end_ns - phase.start_ns)


def by_pm(name: str, in_turn: list[tuple[str, Phase]], traffic: Traffic) -> float | None:
    """Return what short windows say of all phases of a kind, over what the model says."""
    pm = model = 0.0
    for of, phase in in_turn:
        if of != name:
            continue
        amount = traffic.amount(phase.start_ns, phase.end_ns)
        if amount is not None:
            pm += amount
            model += phase.bytes
    return pm / model if model else None


def against(
    phase: str, *, counted_bytes: float, modelled: dict[str, Any], pm_over_model: float | None
) -> dict[str, Any]:
    """Hold model and PM sampling against Nsight Compute's bytes of one step.

    PM sampling saw other steps, of longer contexts: it is compared by way of the model, each with
    what that says of its own step.

    Args:
        phase: decode or prefill.
        counted_bytes: by Nsight Compute.
        modelled: of the same step: num_layers, bytes, gather_bytes.
        pm_over_model: of the steps that PM sampling saw, of the same model.
    """
    model_over_ncu = modelled["bytes"] / counted_bytes
    pm_over_ncu = None if pm_over_model is None else pm_over_model * model_over_ncu
    return {
        "num_layers": modelled["num_layers"],
        "ncu_bytes": counted_bytes,
        "model_bytes": modelled["bytes"],
        "gather_bytes": modelled["gather_bytes"],
        "model_over_ncu": model_over_ncu,
        "model_and_gather_over_ncu": (modelled["bytes"] + modelled["gather_bytes"]) / counted_bytes,
        "pm_over_ncu": pm_over_ncu,
        "model_over_pm": None if pm_over_model is None else 1 / pm_over_model,
        "is_model_within": abs(model_over_ncu - 1) <= BOUNDS[phase],
        "is_pm_within": None if pm_over_ncu is None else abs(pm_over_ncu - 1) <= BOUNDS["pm"],
    }


def kernel_lines(counted: Counted) -> list[str]:
    """Return a line for each of the kernels that moved the most bytes."""
    return [
        f"    {kernel:<76} {one.num:3} x {one.read_bytes / one.num / 1e6:7.1f} MB read, "
        f"{one.write_bytes / one.num / 1e6:7.1f} written"
        for kernel, one in list(counted.by_kernel.items())[:_MOST_KERNELS]
    ]


def line_of(name: str, row: dict[str, Any]) -> str:
    """Return a comparison with Nsight Compute as a line."""
    verdicts = {True: "within", False: "NOT within", None: "unknown whether within"}
    phase = name.removeprefix("ncu ")
    return (
        f"{name:<12} {row['num_layers']} layers, {row['num_kernels']} kernels, "
        f"{row['ncu_bytes'] / 1e9:.2f} GB; model/ncu "
        f"{row['model_over_ncu']:.3f} ({verdicts[row['is_model_within']]} {BOUNDS[phase]:.0%}; "
        f"with gathers {row['model_and_gather_over_ncu']:.3f}), PM/ncu "
        f"{shown(row['pm_over_ncu'], '.3f')} ({verdicts[row['is_pm_within']]} "
        f"{BOUNDS['pm']:.0%}), model/PM {shown(row['model_over_pm'], '.3f')}"
    )


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
