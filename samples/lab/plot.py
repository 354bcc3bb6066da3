"""Draw the lab's results: prefill, decode, batches and the roofline dots that follow from them.

python samples/lab/plot.py

Reads results.json beside this file and writes pictures/*.svg and *.png. FLOPs and bytes of the dots
come from InferScope's cost model of the same shape; the ceilings are those of results.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

from inferscope.cost import Rates, rates_of
from inferscope.engine import EngineOptions, describe_model
from inferscope.engine.load import load_model

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "lab"  # equal results give equal files
import matplotlib.pyplot as plt  # noqa: E402  the back end is chosen first
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402

FOLDER = Path(__file__).parent
RESULTS, PICTURES = FOLDER / "results.json", FOLDER / "pictures"
COLOURS = {"inferscope": "#0b7285", "transformers": "#d9480f", "llama-cpp-python": "#5f3dc4"}
Results = dict[str, Any]


def step_work(rates: Rates, *, tokens: int, context: int, batch: int) -> tuple[int, int]:
    """Return the FLOPs and bytes of a step of `batch` equal slices with one row of logits each."""
    weights = rates.hbm.weights.of_step(tokens * batch, batch)
    moved = rates.hbm.reads(tokens, context, 1) + rates.hbm.writes(tokens, 1)
    return batch * rates.flops.of_slices(tokens, context, 1), weights + batch * moved


def model_rates(results: Results) -> Rates:
    """Return the FLOP and byte rates of the measured model."""
    options = EngineOptions(dtype=results["dtype"], num_blocks=8)
    model = load_model(results["model"], options)
    rates = rates_of(describe_model(model, options, name=results["model"], num_blocks=8).shape)
    assert rates is not None
    return rates


def prefill_figure(results: Results) -> Figure:
    """Draw prefill time against prompt length."""
    figure, axes = _axes("Prefill: time against prompt length", "prompt, tokens", "seconds")
    for name, curves in results["engines"].items():
        _curve(axes, name, curves["prefill"], 1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_yscale("log")
    axes.legend()
    return figure


def decode_figure(results: Results) -> Figure:
    """Draw the time of one decoded token against its position."""
    figure, axes = _axes("Decode: time of a token against its position", "position", "ms")
    for name, curves in results["engines"].items():
        _curve(axes, name, curves["decode"], 1e3)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def batch_figure(results: Results) -> Figure:
    """Draw TBT and throughput against the batch size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, title, unit in ((left, "TBT", "ms"), (right, "Throughput", "tokens/s")):
        axes.set(title=f"{title} against batch size", xlabel="sequences", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    for name, curves in results["engines"].items():
        _curve(left, name, curves["batch"], 1e3)
        rates_s = [[num, num / took_s] for num, took_s in curves["batch"]]
        _curve(right, name, rates_s, 1.0)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend()
    return figure


def roofline_figure(results: Results, rates: Rates) -> Figure:
    """Draw the measured ceilings, and each measured step of the reference engine as a dot."""
    figure, axes = _axes("Roofline of this machine", "FLOPs per byte", "GFLOP/s")
    peak, read = results["ceilings"]["flops_s"], results["ceilings"]["read_bytes_s"]
    ridge = peak / read
    xs = [0.1, ridge, 1000]
    axes.plot(xs, [min(peak, read * x) / 1e9 for x in xs], color="#495057", label="ceilings")
    axes.axvline(ridge, color="#adb5bd", linestyle=":", label=f"ridge {ridge:.1f} FLOP/byte")
    curves = results["engines"]["inferscope"]
    dots = {
        "prefill, by tokens": (curves["prefill"], lambda x: (x, 0, 1), "o", "#0b7285"),
        "decode, by batch": (
            curves["batch"], lambda x: (1, results["batch_context"], x), "s", "#d9480f"
        ),
    }  # fmt: skip
    for name, (curve, slices, marker, colour) in dots.items():
        points = []
        for x, took_s in curve:
            tokens, context, batch = slices(x)
            flops, num_bytes = step_work(rates, tokens=tokens, context=context, batch=batch)
            points.append((flops / num_bytes, flops / took_s / 1e9))
            offset = (-4, 6) if marker == "o" else (2, -11)
            axes.annotate(f"{x}", points[-1], xytext=offset, textcoords="offset points", size=7)
        axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, label=name, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    return figure


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _curve(axes: Axes, name: str, points: list[list[float]], factor: float) -> None:
    axes.plot(
        [x for x, _ in points], [factor * y for _, y in points],
        marker="o", markersize=4, color=COLOURS[name], label=name,
    )  # fmt: skip


def main() -> None:
    """Draw all figures."""
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PICTURES.mkdir(exist_ok=True)
    figures = {
        "prefill": prefill_figure(results),
        "decode": decode_figure(results),
        "batch": batch_figure(results),
        "roofline": roofline_figure(results, model_rates(results)),
    }
    for name, figure in figures.items():
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
        figure.savefig(PICTURES / f"{name}.png", dpi=130, metadata={"Software": None})
        print(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
