"""Print the version of InferScope; `inferscope --version` prints the same."""

from __future__ import annotations

import argparse
import sys

from inferscope import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the epilog; the command has no arguments."""
    parser.epilog = """examples:
  inferscope version
"""


def run(options: argparse.Namespace) -> int:
    """Print the version."""
    sys.stdout.write(f"inferscope {__version__}\n")
    return 0
