"""Throughput of the reference engine against vLLM's CPU build and transformers' `generate`.

One checkpoint of 79 M random bfloat16 weights, one thread, no prefix cache. The engine and vLLM are
servers with the same client: a burst of streams starts at once, and its throughput is their tokens
over the time until the last one. transformers computes the same prompts as one batch in this
process, without a server. Each peer alternates with the engine, A B B A; vLLM spins while it waits,
so it is stopped meanwhile. From each A and the B beside it: the engine's throughput over the
peer's. Reported are the median and the extremes.

All compute in the dtype of --dtype: float32, to which the weights convert exactly, or bfloat16 on a
CPU that multiplies it.

The rule (ENGINE.md): the median is >= 1 beside vLLM and >= 1.3 beside transformers.

    python benchmarks/engine_vs_peers.py PEERS --out benchmarks/results/engine_vs_peers.json

PEERS is a folder with an environment of vLLM (venvs/vllm) and a tokenizer (tiny-qwen2).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from probe_cost import machine
from vllm_overhead import SHAPE, Site, burst, draw_prompts, started, vllm_variables, vllm_words

NUM_PROMPT, NUM_OUTPUT = 245, 32
LEAST_RATIO = {"vllm": 1.0, "transformers": 1.3}
ROUNDS = {1: 4, 8: 2, 32: 1}
"""Rounds A B B A by concurrency: one of 32 streams takes as long as many of one stream."""
_OPTIONS = ("--served-model-name", "tiny", "--max-model-len", "512", "--host", "127.0.0.1")
_VLLM_OPTIONS = (
    *("--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "64"),
    *("--max-num-batched-tokens", "512", "--block-size", "32"),
)
"""What the engine has by default, but for the blocks: vLLM has multiples of 32 on a CPU."""

Run: TypeAlias = Callable[[int, int], int]
"""Function from the number of streams and a seed to the nanoseconds of a burst."""


def save_checkpoint(folder: Path, tokenizer: Path) -> None:
    """Write a Llama of random weights, with a tokenizer for the servers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, **SHAPE
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)


def through(site: Site) -> Run:
    """Return a function that sends bursts to a server."""

    def run(num_streams: int, seed: int) -> int:
        return burst(
            site, batch=num_streams, num_tokens=NUM_OUTPUT, seed=seed, num_prompt=NUM_PROMPT
        ).took_ns

    return run


def generating(checkpoint: Path, dtype: str) -> Run:
    """Return a function that computes a burst as one batch in this thread."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)

    def run(num_streams: int, seed: int) -> int:
        prompts = torch.tensor(draw_prompts(num_streams, NUM_PROMPT, seed))
        began_ns = time.perf_counter_ns()
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            min_new_tokens=NUM_OUTPUT, max_new_tokens=NUM_OUTPUT, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter_ns() - began_ns

    return run


def compare(engine: Run, peer: Run, num_streams: int, *, rounds: int) -> dict[str, Any]:
    """Run A B B A, and return the engine's throughput over the peer's."""
    pairs = []
    for number in range(rounds):
        first = engine(num_streams, number), peer(num_streams, number)
        last = peer(num_streams, ~number), engine(num_streams, ~number)
        pairs += [first, last[::-1]]
    tokens = num_streams * NUM_OUTPUT
    ratios = [peer_ns / engine_ns for engine_ns, peer_ns in pairs]
    return {
        "streams": num_streams,
        "engine_tok_s": tokens / statistics.median(pair[0] for pair in pairs) * 1e9,
        "peer_tok_s": tokens / statistics.median(pair[1] for pair in pairs) * 1e9,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "pairs": len(ratios),
    }


def main() -> int:
    """Measure, print and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", type=Path)
    parser.add_argument("--dtype", default="float32", help="of the engine and of all peers")
    parser.add_argument("--against", nargs="+", default=["vllm"], choices=[*LEAST_RATIO])
    parser.add_argument("--streams", type=int, nargs="+", default=[*ROUNDS], choices=[*ROUNDS])
    parser.add_argument("--rounds", type=int, help="of each number of streams")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    described = machine()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["INFERSCOPE_DIR"] = str(folder / "rings")
        checkpoint = folder / "checkpoint"
        save_checkpoint(checkpoint, options.peers / "tiny-qwen2")
        served = [str(checkpoint), "--dtype", options.dtype, *_OPTIONS]
        words = [sys.executable, "-m", "inferscope", "serve", *served, "--no-prefix-cache"]
        site = started(words, folder / "engine.log", os.environ)
        engine = through(stack.enter_context(site))
        peers: dict[str, Run] = {}
        if "vllm" in options.against:
            words = [*vllm_words(options.peers), *served, *_VLLM_OPTIONS]
            site = started(words, folder / "vllm.log", vllm_variables(options.peers))
            peers["vllm"] = through(stack.enter_context(site))
        if "transformers" in options.against:
            peers["transformers"] = generating(checkpoint, options.dtype)
        for run in (engine, *peers.values()):
            run(1, 0)  # the first burst warms everything up
        print(f"{'peer':<13}{'streams':>8}{'engine':>9}{'peer tok/s':>11}{'ratio':>7}  extremes")
        for name, num_streams in itertools.product(peers, options.streams):
            rounds = options.rounds or ROUNDS[num_streams]
            row = compare(engine, peers[name], num_streams, rounds=rounds)
            rows.append({"peer": name, **row, "passes": row["ratio"] >= LEAST_RATIO[name]})
            print(
                f"{name:<13}{num_streams:>8}{row['engine_tok_s']:>9.1f}{row['peer_tok_s']:>11.1f}"
                f"{row['ratio']:>7.2f}  {row['least']:.2f} to {row['most']:.2f}",
                flush=True,
            )
    passes = all(row["passes"] for row in rows)
    described["load_average_after"] = os.getloadavg()[0]
    if options.out is not None:
        result = {
            "machine": described, "dtype": options.dtype, "prompt_tokens": NUM_PROMPT,
            "output_tokens": NUM_OUTPUT, "rows": rows, "passes": passes,
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"rule: {'passed' if passes else 'FAILED'}")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
