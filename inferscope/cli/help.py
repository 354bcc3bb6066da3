"""Print the help text of InferScope or of one command.

`inferscope help COMMAND` and `inferscope COMMAND --help` print the same text.
"""

from __future__ import annotations

import argparse

from inferscope.cli.main import build_parser, check_command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "about", nargs="*", metavar="COMMAND", help="command to explain (default: list all)"
    )
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
