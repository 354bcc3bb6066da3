"""How often `diff` is right: false alarms on equal pairs, and injected changes that it finds.

    python benchmarks/diff_truth.py emulated --pairs 40
    python benchmarks/diff_truth.py engine --pairs 40

`emulated` runs the reference engine's loop, scheduler, cache and probe on emulated time, with steps
that last as a formula with noise says (`emulated.py`). For each seed it compares a baseline A with

    same        equal options, the same requests, other noise of the machine
    others      equal options, other requests of the same kinds, without names
    slow        all steps take 10 % longer
    budget      half of the token budget
    no_cache    no prefix cache

`engine` runs the built-in model on this machine's time. Both sides are equal, and their segments
alternate, B A A B B A …: other processes disturb both sides alike. It has no injected changes.

A pair of equal sides is a false alarm if any headline differs. A change is found if any headline
differs, and named if one of its rows is among the causes of any of them. Rows and seeds were fixed
before the first run with these seeds. The emulation and the intervals were chosen with seeds below
1,000, and the extrapolation to long blocks after a run with seeds 1,000 to 1,031. The rows of the
longest gaps came after a run with seeds 2,000 to 2,039, and loads of 60 s after one of 30 s with
seeds 3,000 to 3,039, in which a change was found in 38 of 40. The results that are checked in are
those of later seeds, which had no part in any of these.
"""

from __future__ import annotations

import argparse
import sys

IS_EMULATED = __name__ == "__main__" and "emulated" in sys.argv[1:2]
if IS_EMULATED:
    import emulated

import json  # noqa: E402 - the emulated clocks come first
import os  # noqa: E402
import platform  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from concurrent.futures import ProcessPoolExecutor  # noqa: E402
from dataclasses import replace  # noqa: E402
from functools import partial  # noqa: E402
from itertools import takewhile  # noqa: E402
from multiprocessing import get_context  # noqa: E402
from pathlib import Path  # noqa: E402

from inferscope.engine import (  # noqa: E402
    Engine,
    EngineOptions,
    Sampling,
    Tokenizer,
    load_engine,
    load_tokenizer,
)
from inferscope.fold import FinalRequest, FinalStep  # noqa: E402
from inferscope.insight.compare import (  # noqa: E402
    NO_DIFFERENCE,
    Columns,
    ColumnsBuilder,
    RecordingComparison,
    check_enough,
    compare_recordings,
)
from inferscope.load import MIX, PlannedRequest, of_kind, plan, poisson, stream  # noqa: E402
from inferscope.probe import ENGINE_ID_VARIABLE, Probe  # noqa: E402
from inferscope.readers import catch_up, open_source  # noqa: E402

RESULTS = Path(__file__).parent / "results"
FIRST_SEED = 5000
LEVEL = 0.95
SECONDS = {"emulated": 60.0, "engine": 12.0}
"""Length of each load."""
OPTIONS = EngineOptions(num_blocks=600, token_budget=128, max_running=16)
NAMES = {
    "slow": {"decode_own", "decode_interference", "prefill_own", "slowdown"},
    "budget": {"prefill_own", "queue", "decode_interference"},
    "no_cache": {"prefill_own"},
}
"""Ledger rows of each change: of steps, of prompts in more steps, of computed prompts."""
Wait = Callable[[int], None]


class Sink:
    """Sink that keeps requests as columns."""

    def __init__(self) -> None:
        self.builder = ColumnsBuilder()

    def on_step(self, step: FinalStep) -> None:
        """Keep a step."""
        self.builder.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.builder.add(request)


def load_of(seed: int, *, rate_s: float, seconds: float) -> list[PlannedRequest]:
    """Return the demo's mix of requests with random arrivals."""
    arrivals = takewhile(lambda at_s: at_s < seconds, poisson(stream(seed, "arrivals"), rate_s))
    return list(plan(seed, arrivals, of_kind(seed, MIX)))


def open_engine(options: EngineOptions, folder: Path, name: str) -> Engine:
    """Return an observed engine on the built-in model, with its rings in a folder."""
    os.environ["INFERSCOPE_DIR"] = str(folder)
    os.environ["INFERSCOPE_RING_MB"] = "16"
    os.environ[ENGINE_ID_VARIABLE] = name
    return load_engine("builtin", options, open_probe=Probe.open)


def serve(
    engine: Engine, tokenizer: Tokenizer, asks: Sequence[PlannedRequest], wait_until: Wait
) -> None:
    """Serve requests at their times after the first one's."""
    start_ns = time.monotonic_ns() - round(asks[0].at_s * 1e9)
    waiting = list(asks)
    while waiting or engine.has_work:
        if not engine.has_work:
            wait_until(start_ns + round(waiting[0].at_s * 1e9))
        while waiting and start_ns + round(waiting[0].at_s * 1e9) <= time.monotonic_ns():
            ask = waiting.pop(0)
            prompt = tokenizer.encode(ask.prompt)[: engine.max_model_tokens - ask.max_tokens]
            sampling = Sampling(max_tokens=ask.max_tokens, ignore_eos=True)
            engine.submit(prompt, sampling, external_id=ask.name)
        engine.step()


def folded(folder: Path) -> Columns:
    """Return the requests of a folder of rings."""
    sink = Sink()
    source = open_source(folder, sinks=(sink,))
    catch_up(source)
    source.close()
    source.collector.end()
    columns = sink.builder.columns()
    check_enough(columns, str(folder))
    return columns


# --- emulated time --------------------------------------------------------------------------------


def emulated_run(
    tokenizer: Tokenizer,
    asks: Sequence[PlannedRequest],
    options: EngineOptions,
    *,
    seed: int,
    factor: float = 1.0,
) -> Columns:
    """Serve a load on emulated time."""
    with tempfile.TemporaryDirectory() as name:
        served = open_engine(options, Path(name), "emulated")
        machine = emulated.slowed(emulated.Machine(), factor)
        runner = emulated.EmulatedRunner(machine, seed)
        engine = Engine(served.model, options, probe=served.probe, runner=runner)
        serve(engine, tokenizer, asks, emulated.CLOCK.sleep_until)
        engine.close()
        engine.probe.close()
        return folded(Path(name))


def emulated_pairs(seed: int, *, seconds: float) -> dict[str, RecordingComparison]:
    """Compare a baseline with each other side."""
    tokenizer = load_tokenizer("builtin")
    asks, others = (load_of(each, rate_s=4, seconds=seconds) for each in (seed, seed + 100_000))
    seeds = iter(range(10 * seed, 10 * seed + 10))

    def run(load: Sequence[PlannedRequest], factor: float = 1.0, **changes: object) -> Columns:
        options = replace(OPTIONS, **changes)  # type: ignore[arg-type]
        return emulated_run(tokenizer, load, options, seed=next(seeds), factor=factor)

    a = run(asks)
    sides = {
        "same": run(asks),
        "others": nameless(run(others)),
        "slow": run(asks, 1.1),
        "budget": run(asks, token_budget=OPTIONS.token_budget // 2),
        "no_cache": run(asks, prefix_cache=False),
    }
    return {kind: compared(a, b) for kind, b in sides.items()}


def nameless(of: Columns) -> Columns:
    """Return requests without their names, which are those of the other load's."""
    return replace(of, names=("",) * len(of.names))


# --- the machine's time ---------------------------------------------------------------------------


def engine_pair(seed: int, *, seconds: float) -> dict[str, RecordingComparison]:
    """Compare two equal engines that serve the same load in alternating segments."""
    tokenizer = load_tokenizer("builtin")
    asks = load_of(seed, rate_s=5, seconds=seconds)
    segments = [asks[at : at + 5] for at in range(0, len(asks), 5)]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / side for side in "ab"]
        engines = []
        for folder in folders:
            folder.mkdir(mode=0o700)
            engines.append(open_engine(OPTIONS, folder, folder.name))
        for number, segment in enumerate(segments):
            for side in (0, 1) if number % 2 else (1, 0):
                serve(engines[side], tokenizer, segment, sleep_until)
        for engine in engines:
            engine.close()
            engine.probe.close()
        return {"same": compared(*map(folded, folders))}


def sleep_until(at_ns: int) -> None:
    """Sleep until a monotonic time."""
    time.sleep(max(0, at_ns - time.monotonic_ns()) / 1e9)


# --- scores ---------------------------------------------------------------------------------------


def compared(a: Columns, b: Columns) -> RecordingComparison:
    """Compare two sides at the level of the benchmark."""
    return compare_recordings(a, b, level=LEVEL, seed=0)


def differing(comparison: RecordingComparison) -> list[str]:
    """Return the names of the headlines that differ."""
    return [row.name for row in comparison.headlines if row.verdict != NO_DIFFERENCE]


def score(comparisons: Sequence[dict[str, RecordingComparison]]) -> dict[str, object]:
    """Return the counts of each kind of pair."""
    scores: dict[str, object] = {}
    for kind in comparisons[0]:
        found, named = 0, 0
        by_headline: Counter[str] = Counter()
        by_cause: Counter[str] = Counter()
        for each in comparisons:
            heads = differing(each[kind])
            causes = {
                cause.rpartition(".")[2]
                for explanation in each[kind].explanations
                for cause in explanation.causes
            }
            found += bool(heads)
            named += bool(causes & NAMES.get(kind, set()))
            by_headline.update(heads)
            by_cause.update(causes)
        scores[kind] = {
            "num_pairs": len(comparisons),
            "num_different": found,
            **({"num_named": named, "rows": sorted(NAMES[kind])} if kind in NAMES else {}),
            "headlines": dict(by_headline.most_common()),
            "causes": dict(by_cause.most_common()),
        }
    return scores


def main() -> int:
    """Compare all pairs and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("emulated", "engine"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="processes, for emulated time only")
    parser.add_argument(
        "--seconds", type=float, help="length of each load (default: 60 emulated, 12 engine)"
    )
    options = parser.parse_args()
    options.seconds = options.seconds or SECONDS[options.mode]
    began_s = time.perf_counter()
    comparisons = []
    one = partial(emulated_pairs if IS_EMULATED else engine_pair, seconds=options.seconds)
    seeds = range(FIRST_SEED, FIRST_SEED + options.pairs)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        for seed, pairs in zip(seeds, pool.map(one, seeds), strict=True):
            comparisons.append(pairs)
            print(seed, {kind: differing(each) for kind, each in pairs.items()}, flush=True)
            write(options, comparisons, round(time.perf_counter() - began_s))
    return 0


def machine() -> dict[str, object]:
    """Return the facts of the machine that a result is of."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def write(
    options: argparse.Namespace, comparisons: Sequence[dict[str, RecordingComparison]], took_s: int
) -> None:
    """Write the counts so far."""
    result = {
        "mode": options.mode,
        "machine": machine(),
        "seeds": [FIRST_SEED, FIRST_SEED + len(comparisons) - 1],
        "level": LEVEL,
        "seconds": options.seconds,
        "took_s": took_s,
        "pairs": score(comparisons),
    }
    path = RESULTS / f"diff_truth_{options.mode}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
