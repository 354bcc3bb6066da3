"""Options of the reference engine: the same for `serve`, `demo` and the sides of a comparison."""

from __future__ import annotations

import argparse
from typing import get_args

from inferscope.engine import EngineOptions, Speculation


def add_engine_options(
    group: argparse._ArgumentGroup, defaults: EngineOptions, *, pool: str = "from model and memory"
) -> None:
    """Add the engine's options. The seed is not one of them: `serve` and `demo` differ in it.

    Args:
        group: receiver of the options.
        defaults: the command's own defaults.
        pool: origin of the number of KV blocks if it is not given.
    """
    for name, default, text in (
        ("max-running", defaults.max_running, "maximum requests that hold KV blocks at once"),
        ("token-budget", defaults.token_budget, "maximum tokens per step"),
        ("max-waiting", defaults.max_waiting, "maximum queued requests; further ones get 429"),
        ("threads", defaults.num_threads, "CPU threads per operator"),
    ):
        text += " (default: %(default)s)"
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    group.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help=f"number of KV blocks (default: {pool})",
    )
    group.add_argument(
        "--block-tokens",
        type=int,
        default=defaults.block_tokens,
        metavar="N",
        help="tokens per KV block, 1 to 1024 (default: %(default)s)",
    )
    _add_switch(
        group,
        "--prefix-cache",
        defaults.prefix_cache,
        "keep the blocks of finished requests for prompts with the same prefix",
    )
    group.add_argument(
        "--speculative",
        choices=get_args(Speculation),
        help="propose tokens and verify them in one step: ngram copies what followed the same "
        "tokens earlier in the request, draft runs a small model (default: generate one by one)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=defaults.num_speculative_tokens,
        metavar="N",
        help="maximum proposed tokens per request and step (default: %(default)s)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="model of --speculative draft, with the tokenizer of the served one (default: that of "
        "the built-in model)",
    )
    _add_switch(
        group,
        "--overlap",
        defaults.overlap,
        "launch each step before the outputs of the one before it are known",
    )
    _add_switch(
        group,
        "--cuda-graphs",
        defaults.cuda_graphs,
        "launch decode steps as CUDA graphs, on a GPU with Triton",
    )
    for name, default, text in (
        ("tensor-parallel", defaults.tensor_parallel, "processes that divide each layer"),
        ("pipeline-parallel", defaults.pipeline_parallel, "stages that divide the layers"),
    ):
        text += " (default: %(default)s)"
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="maximum tokens of prompt and output (default: the model's)",
    )
    group.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)"
    )
    group.add_argument(
        "--quantization",
        metavar="NAME",
        help="quantisation of the layers' weights: int8, int4 or fp8 (default: none)",
    )
    group.add_argument(
        "--end-of-thinking",
        type=int,
        metavar="TOKEN_ID",
        help="token that ends the reasoning in an output (default: the tokenizer's </think>)",
    )
    group.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU if there is one), cpu or cuda:N (default: %(default)s)",
    )


def engine_options(options: argparse.Namespace, *, seed: int = EngineOptions.seed) -> EngineOptions:
    """Return the engine's options that were given.

    Args:
        options: parsed options of the command.
        seed: seed of random weights, and of requests without a seed.

    Raises:
        BadInput: an option is out of range.
    """
    return EngineOptions(
        token_budget=options.token_budget,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        num_blocks=options.num_blocks,
        block_tokens=options.block_tokens,
        prefix_cache=options.prefix_cache,
        speculative=options.speculative,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_model=options.draft_model,
        overlap=options.overlap,
        cuda_graphs=options.cuda_graphs,
        dtype=options.dtype,
        device=options.device,
        seed=seed,
        max_model_tokens=options.max_model_len,
        num_threads=options.threads,
        quantization=options.quantization,
        end_of_thinking=options.end_of_thinking,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
    )


def _add_switch(group: argparse._ArgumentGroup, name: str, default: bool, text: str) -> None:
    group.add_argument(
        name,
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"{text} (default: {'on' if default else 'off'})",
    )
