"""Time to first token attributed to an eviction, against the same prompt found in the cache.

Each round serves one prompt three times on the idle reference engine: to cache it, as a hit, and
after other prompts have evicted it. The second time subtracted from the third is the truth. The
ledger of the third attributes part of its TTFT to the class `evicted`. Prints the median ratio, and
that without the row `slowdown` of both, for a machine whose CPUs others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
from pathlib import Path

from inferscope.engine import EngineOptions, Sampling, load_engine
from inferscope.fold import FinalRequest, FinalStep
from inferscope.probe import Probe
from inferscope.readers import catch_up, open_source

VOCAB = 250
NUM_BLOCKS = 64
PROMPT_TOKENS = 700
WARM_UP = 6
"""Rounds before those that count: the cost model learns."""


class Finals:
    """Sink that keeps requests by ID."""

    def __init__(self) -> None:
        self.by_id: dict[str, FinalRequest] = {}

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.by_id[request.request_id] = request


def serve(folder: Path, rounds: int, seed: int) -> dict[str, FinalRequest]:
    """Serve all rounds, and return the final requests by round and turn."""
    draw = random.Random(seed)
    os.environ["INFERSCOPE_DIR"] = str(folder)
    engine = load_engine("builtin", EngineOptions(num_blocks=NUM_BLOCKS), open_probe=Probe.open)

    def ask(name: str, prompt: list[int]) -> None:
        engine.submit(prompt, Sampling(max_tokens=2, ignore_eos=True), request_id=name)
        while engine.has_work:
            engine.step()

    def prompt() -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]

    for number in range(rounds):
        mine = prompt()
        ask(f"{number} first", mine)
        ask(f"{number} hit", mine)
        ask(f"{number} other", prompt())
        ask(f"{number} evicted", mine)
    engine.close()
    engine.probe.close()
    finals = Finals()
    source = open_source(folder, sinks=(finals,))
    catch_up(source)
    source.close()
    return finals.by_id


def ttft_ns(final: FinalRequest) -> int:
    """Return the time to first token."""
    assert final.first_token_ns is not None
    return final.first_token_ns - final.arrived_ns


def slowdown_ns(final: FinalRequest) -> int:
    """Return the part of the time to first token in which steps were slower than modelled."""
    return final.ttft_ledger_ns.get("slowdown", 0)


def quartiles(values: list[float]) -> list[float]:
    """Return the three quartiles, rounded."""
    return [round(each, 3) for each in statistics.quantiles(values, n=4)]


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=21)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        finals = serve(Path(folder), WARM_UP + options.rounds, options.seed)
    truth_ms, attributed_ms, ratios, unslowed = [], [], [], []
    for number in range(WARM_UP, WARM_UP + options.rounds):
        hit, evicted = finals[f"{number} hit"], finals[f"{number} evicted"]
        assert evicted.cache is not None
        assert hit.cache is not None
        assert not hit.cache.tokens.get("evicted")
        found_ns = (evicted.cache.ttft_ns or {})["evicted"]
        truth_ns = ttft_ns(evicted) - ttft_ns(hit)
        truth_ms.append(truth_ns / 1e6)
        attributed_ms.append(found_ns / 1e6)
        ratios.append(found_ns / truth_ns)
        slower_ns = slowdown_ns(evicted) - slowdown_ns(hit)
        unslowed.append(found_ns / (truth_ns - slower_ns))
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "truth_median_ms": round(statistics.median(truth_ms), 2),
        "attributed_median_ms": round(statistics.median(attributed_ms), 2),
        "attributed_over_truth_quartiles": quartiles(ratios),
        "without_slowdown_quartiles": quartiles(unslowed),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
