"""Options of the reference engine shared by `serve` and `demo`."""

from __future__ import annotations

import argparse

from inferscope.engine import EngineOptions


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
