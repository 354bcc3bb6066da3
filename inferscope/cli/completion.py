"""Print a script that completes commands, options and file names in a shell.

The script matches one release of InferScope: print it again after an upgrade.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.cli.main import COMMANDS, build_parser
from inferscope.errors import BadInput

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_FILES = ("FILE", "DIR", "PATH", "OUT", "TARGET")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "shell", metavar="SHELL", choices=_SHELLS, help=f"one of: {', '.join(_SHELLS)}"
    )
    parser.epilog = """examples:
  inferscope completion bash > ~/.local/share/bash-completion/completions/inferscope
  inferscope completion zsh > ~/.zfunc/_inferscope      with fpath+=~/.zfunc before compinit
  inferscope completion fish > ~/.config/fish/completions/inferscope.fish
"""


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    if options.shell not in shtab.SUPPORTED_SHELLS:
        raise BadInput(f"the installed shtab does not support {options.shell}. Upgrade shtab.")
    parser = build_parser(list(COMMANDS))
    for each in _parsers(parser):
        for action in each._actions:
            named = str(action.metavar or action.dest.upper())
            if action.type is Path or any(name in named for name in _FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, options.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return a parser and the parsers of its commands, at any depth."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found += _parsers(each)
    return found
