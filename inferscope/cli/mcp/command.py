"""Serve facts of engines and recordings to an assistant, over the Model Context Protocol.

The server speaks on standard input and output, and starts with an assistant's configuration. Its
tools only read: they list the engines, and answer with the documents that the commands `attach`,
`findings`, `why`, `shares` and `diff` print with --json. No answer holds a prompt or a response.
"""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--hash-ids",
        action="store_true",
        help="replace IDs of requests and names of tenants by sixteen digits; `why` takes them",
    )
    parser.epilog = """examples:
  claude mcp add inferscope -- inferscope mcp
  inferscope mcp --hash-ids                 for traffic whose names are confidential
"""


def run(options: argparse.Namespace) -> int:
    """Serve until standard input ends."""
    from inferscope.cli.mcp.server import make_server

    make_server(hash_ids=options.hash_ids).run("stdio")
    return 0
