"""Explain InferScope, or one of its commands.

`inferscope help COMMAND` is `inferscope COMMAND --help`.
"""

from __future__ import annotations

import argparse

from inferscope.cli.main import build_parser, check_command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("about", nargs="*", metavar="COMMAND", help="(default: all of them)")
    parser.epilog = """examples:
  inferscope help
  inferscope help attach
  inferscope help slo check
"""


def run(options: argparse.Namespace) -> int:
    """Print the help text."""
    if not options.about:
        build_parser([]).print_help()
        return 0
    check_command(options.about[0])
    build_parser(options.about[:1]).parse_args([*options.about, "--help"])
    return 0
