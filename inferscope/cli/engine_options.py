"""Options of the reference engine that `serve` and `demo` share."""

from __future__ import annotations

import argparse

from inferscope.engine.config import EngineOptions


def add_cache_options(group: argparse._ArgumentGroup) -> None:
    """Add the switches of the KV cache."""
    group.add_argument(
        "--block-tokens", type=int, default=EngineOptions().block_tokens, metavar="N",
        help="tokens in one KV block, 1 to 1024 (%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--no-prefix-cache", action="store_true",
        help="compute every prompt in full, even if an earlier one began alike",
    )  # fmt: skip
