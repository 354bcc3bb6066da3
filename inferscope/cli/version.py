"""Print the version of InferScope, as `inferscope --version` does."""

from __future__ import annotations

import argparse
import sys

from inferscope import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: it has none."""
    parser.epilog = """examples:
  inferscope version
"""


def run(options: argparse.Namespace) -> int:
    """Print the version."""
    sys.stdout.write(f"inferscope {__version__}\n")
    return 0
