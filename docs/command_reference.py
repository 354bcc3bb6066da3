"""Write `commands.md`, the reference of all commands, from their parsers.

python -m docs.command_reference
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from inferscope.cli.main import COMMANDS, build_parser

PAGE = Path(__file__).with_name("commands.md")
_INTRODUCTION = """\
# Commands

`python -m docs.command_reference` writes this page from the parsers of the commands.
`inferscope help COMMAND` prints the same on a terminal.
"""


def page() -> str:
    """Return the page, whatever the width of the terminal."""
    os.environ["COLUMNS"] = "100"
    parts = [_INTRODUCTION]
    for name, parser in _parsers(build_parser(COMMANDS)):
        parser.color = False  # type: ignore[attr-defined]
        parts.append(f"\n{'##' if ' ' not in name else '###'} {name}\n")
        parts.append(f"```text\n{parser.format_help().strip()}\n```\n")
    return "".join(parts)


def _parsers(
    parser: argparse.ArgumentParser, above: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command and each verb of a command, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield f"{above}{name}", each
                yield from _parsers(each, f"{above}{name} ")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
