"""See where a live LLM request's time went: prefill or decode, queue or interference."""

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
from inferscope.cli.terminal import print_what_is_encodable
from inferscope.errors import BadInput, InferScopeError
from inferscope.foreign import one_line

COMMANDS = {
    "demo": "a real engine under load, on this machine, and the live screen over it",
    "serve": "a model behind an OpenAI-compatible API, on the reference engine",
    "run": "any command (vLLM, SGLang, a script) with the probe switched on",
    "attach": "the live screen over a running engine, with history",
    "record": "write what an engine does into a file",
    "replay": "show a recording or rings at the pace at which they were made",
    "why": "one request: where its time went, in sentences",
    "shares": "divide the device's time by request, tenant, phase or model",
    "findings": "one run: which of the classic mistakes it shows, and what to try",
    "collect": "headless: export what all engines of this host do, and keep incidents",
    "slo": "objectives: what a file of them means, and Prometheus' rules for them",
    "sampler": "sample what GPUs and the host count, for all engines here",
    "export": "turn a recording into JSON Lines, Parquet or a Perfetto trace",
    "load": "send a server requests on a schedule, and time its answers",
    "profile": "the kernels of a running engine, by phase, for a few seconds",
    "calibrate": "measure what this device can do, for the cost model to begin with",
    "doctor": "say what this machine allows, and how to get what is missing",
    "on": "switch an engine's probe on",
    "off": "switch an engine's probe off",
    "completion": "a script that completes commands and options in a shell",
    "help": "explain a command",
    "version": "print the version",
}
_MODULES = {"on": "switch", "off": "switch"}
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
}
_INTERRUPTED = 130

_EPILOG = """examples:
  inferscope demo                      start here: nothing else is needed
  inferscope run -- vllm serve MODEL   observe a server from its start
  inferscope attach                    the only engine running here, or a list of them
  inferscope attach demo.isr --once    one look at a recording, as text
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the process's exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    print_what_is_encodable()
    words = list(sys.argv[1:] if argv is None else argv) or ["help"]
    asked = next((word for word in words if not word.startswith("-")), None)
    try:
        if asked is not None:
            check_command(asked)
        options = build_parser([] if asked is None else [asked]).parse_args(words)
        print_what_is_encodable(is_json=getattr(options, "json", False) is True)
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
        sys.stderr.write(
            f"inferscope: this command needs {error.name}. "
            f'Install it with: pip install "inferscope-llm[{extra}]"\n'
        )
        return 1
    return code


def _module(command: str) -> str:
    return f"inferscope.cli.{_MODULES.get(command, command)}"


class _Parser(argparse.ArgumentParser):
    """A parser that suggests an option, a verb or a choice where one is not known.

    Options cannot be abbreviated: a later option with the same beginning would break scripts.
    """

    def __init__(self, **settings: Any) -> None:
        """Take what argparse takes; it makes the parsers of commands and verbs itself."""
        super().__init__(**{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; refuse what this parser does not know.

        A command's parser is asked for known arguments alone: the error would name no command.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            wrong = unknown[0].partition("=")[0]
            begun = [name for name in known if wrong.startswith("--") and name.startswith(wrong)]
            found = " or ".join(begun or get_close_matches(wrong, known, n=1))
            hint = f"Did you mean {found}?" if found else f"`{self.prog} --help` lists them."
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value outside of the choices of the action; suggest the nearest choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            found = get_close_matches(str(value), map(str, action.choices or ()), n=1)
            if found:
                error.message += f". Did you mean {found[0]}?"
            raise


def check_command(name: str) -> None:
    """Refuse a command that does not exist.

    Raises:
        BadInput: it does not, with the nearest that does.
    """
    if name not in COMMANDS:
        found = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {found[0]}?" if found else "`inferscope help` lists them."
        raise BadInput(f"there is no command {name}. {hint}")


def build_parser(configured: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser, with the options of some commands.

    Args:
        configured: these commands; each is imported for its options.
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
