"""Options of the reference engine shared by `serve` and `demo`."""

from __future__ import annotations

import argparse
from typing import get_args

from inferscope.engine import EngineOptions, Speculation


def add_cache_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the KV cache."""
    group.add_argument(
        "--block-tokens", type=int, default=EngineOptions().block_tokens, metavar="N",
        help="tokens per KV block, 1 to 1024 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--no-prefix-cache", action="store_true",
        help="compute every prompt in full, without reuse of shared prefixes",
    )  # fmt: skip


def add_speculation_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of speculative decoding."""
    defaults = EngineOptions()
    group.add_argument(
        "--speculative", choices=get_args(Speculation),
        help="propose tokens and verify them in one step: ngram copies what followed the same "
        "tokens earlier in the request (default: generate one by one)",
    )  # fmt: skip
    group.add_argument(
        "--num-speculative-tokens", type=int, default=defaults.num_speculative_tokens, metavar="N",
        help="maximum proposed tokens per request and step (default: %(default)s)",
    )  # fmt: skip
