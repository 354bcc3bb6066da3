"""Observe live LLM inference: see where each request's time goes."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from inferscope import __version__
from inferscope.cli.arg_types import option_set
from inferscope.cli.terminal import replace_unencodable
from inferscope.errors import BadInput, InferScopeError
from inferscope.foreign import one_line

COMMANDS = {
    "demo": "run a real engine under load on this machine, with the live screen",
    "serve": "serve a model on an OpenAI-compatible API with the reference engine",
    "run": "run a command (vLLM, SGLang, a script) with the probe switched on",
    "attach": "show the live screen of a running engine, with its history",
    "record": "record a running engine into a file",
    "replay": "replay a recording or rings on the screen",
    "why": "explain where one request's time went",
    "shares": "divide the device's time by request, tenant, phase or model",
    "report": "write a report on a run as one HTML file",
    "cache": "explain prefix cache misses, their cost, and other cache sizes",
    "findings": "detect common performance problems and suggest fixes",
    "diff": "compare two recordings, and fail if one is worse beyond given limits",
    "join": "compare a load generator's latencies with the server's, request by request",
    "mcp": "answer an assistant's questions, over the Model Context Protocol",
    "collect": "export metrics and records of all engines of this host, and pin incidents",
    "slo": "explain SLO objectives, evaluate a recording, write Prometheus rules",
    "sampler": "sample hardware counters of GPUs and host for all engines here",
    "export": "export a recording as JSON Lines, Parquet or a Perfetto trace",
    "load": "send requests to a server on a fixed schedule and measure latencies",
    "profile": "profile a running engine's kernels by phase for a few seconds",
    "calibrate": "measure device rates to initialize the cost model",
    "doctor": "check this machine's capabilities and how to enable missing ones",
    "on": "switch an engine's probe on",
    "off": "switch an engine's probe off",
    "completion": "print a script for command completion in a shell",
    "help": "print the help text of a command",
    "version": "print the version",
}
_FOLDERS = ("attach", "calibrate", "demo", "doctor", "load", "mcp", "run", "slo")
"""Commands of several modules, of which `command` has the options."""
_MODULES = {"on": "switch", "off": "switch", **{name: f"{name}.command" for name in _FOLDERS}}
_EXTRAS = {
    "numpy": "reader",
    "yaml": "reader",
    "textual": "tui",
    "torch": "engine",
    "tokenizers": "engine",
    "safetensors": "engine",
    "aiohttp": "load",
    "starlette": "engine",
    "uvicorn": "engine",
    "httptools": "engine",
    "zmq": "engine",
    "shtab": "completion",
    "prometheus_client": "prometheus",
    "mcp": "mcp",
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
}
_WHOLE = {"attach": "tui", "replay": "tui", "serve": "engine", "mcp": "mcp"}
"""Extras with all that a command needs, so that one installation is enough."""
_INTERRUPTED = 130

_EPILOG = """examples:
  inferscope demo                      start here: needs no model, GPU or server
  inferscope run -- vllm serve MODEL   observe a server from its start
  inferscope attach                    show the only running engine, or list the engines
  inferscope attach demo.isr --once    print a snapshot of a recording as text

`inferscope help COMMAND` describes a command and its options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the process's exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has exited; flushing at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    replace_unencodable()
    args = list(sys.argv[1:] if argv is None else argv) or ["help"]
    command_name = next((arg for arg in args if not arg.startswith("-")), None)
    try:
        if command_name is not None:
            check_command(command_name)
        options = build_parser([] if command_name is None else [command_name]).parse_args(args)
        replace_unencodable(is_json=getattr(options, "json", False) is True)
        command = importlib.import_module(_module(options.command))
        code: int = command.run(options)
        sys.stdout.flush()
    except InferScopeError as error:
        sys.stderr.write(f"inferscope: {one_line(str(error))}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        extra = _WHOLE.get(command_name or "", extra)
        sys.stderr.write(
            f"inferscope: this command needs {error.name}. "
            f'Install it with: pip install "inferscope-llm[{extra}]"\n'
        )
        return 1
    return code


def _module(command: str) -> str:
    return f"inferscope.cli.{_MODULES.get(command, command)}"


def _gathered(words: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Return the words with unknown ones moved in front of the first option.

    To the argparse of older Pythons an optional positional is absent once an option follows: `why
    ID --pick 1 FILE` has an unknown FILE.
    """
    known = list(words)
    for word in reversed(unknown):
        del known[len(known) - 1 - known[::-1].index(word)]
    first = next((at for at, word in enumerate(known) if word.startswith("-")), len(known))
    return [*known[:first], *unknown, *known[first:]]


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the nearest option, verb or choice for an unknown one.

    Options cannot be abbreviated: a new option with the same beginning would break scripts.
    """

    def __init__(self, **settings: Any) -> None:
        """Take argparse's settings, and disable abbreviations for parsers of commands too."""
        super().__init__(**{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and reject unknown arguments.

        argparse reports a command's unknown arguments in the main parser, whose error would not
        name the command.
        """
        words = self._shielded(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(words, namespace)
        if unknown and not any(word.startswith("-") for word in unknown):
            gathered, left = super().parse_known_args(_gathered(words, unknown), namespace)
            if not left:
                return gathered, left
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            wrong = unknown[0].partition("=")[0]
            begun = [name for name in known if wrong.startswith("--") and name.startswith(wrong)]
            found = " or ".join(begun or get_close_matches(wrong, known, n=1))
            hint = f"Did you mean {found}?" if found else f"`{self.prog} --help` lists them."
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}")
        return options, unknown

    def _shielded(self, words: Sequence[str]) -> list[str]:
        """Return the words with a space before each option set, which may begin with a dash.

        argparse takes a word that begins with a dash for an option of this command.
        """
        shielded = list(words)
        for at, word in enumerate(words):
            action = self._option_string_actions.get(word)
            if action is not None and action.type is option_set:
                values = slice(at + 1, at + 1 + int(action.nargs or 1))
                shielded[values] = [f" {value}" for value in shielded[values]]
        return shielded

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not a choice of the action, and suggest the nearest choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            found = get_close_matches(str(value), map(str, action.choices or ()), n=1)
            if found:
                error.message += f". Did you mean {found[0]}?"
            raise


def check_command(name: str) -> None:
    """Reject an unknown command.

    Raises:
        BadInput: the command does not exist; the error suggests the nearest one.
    """
    if name not in COMMANDS:
        found = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {found[0]}?" if found else "`inferscope help` lists them."
        raise BadInput(f"there is no command {name}. {hint}")


def build_parser(configured: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of those in `configured`.

    Args:
        configured: commands to import for their options.
    """
    parser = _Parser(
        prog="inferscope",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"inferscope {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        verb = verbs.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in configured:
            module = importlib.import_module(_module(name))
            verb.description = module.__doc__
            module.configure(verb)
    return parser


if __name__ == "__main__":
    sys.exit(main())
