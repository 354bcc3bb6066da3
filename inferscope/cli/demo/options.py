"""Engine options of the demo, and option sets: the same options as one text, for a comparison."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import NoReturn

from inferscope.cli.engine_options import add_engine_options, engine_options
from inferscope.engine import EngineOptions
from inferscope.errors import BadInput

_KV_TOKENS = 2560
"""Size of the KV cache in tokens: small enough that a burst causes queueing and preemption."""
_ENGINE = EngineOptions(token_budget=64, max_running=16)
"""Defaults of the engine: with this token budget a prefill chunk makes a step several times longer
than decodes alone."""


def add_demo_engine(group: argparse._ArgumentGroup) -> None:
    """Add the options of the demo's engine."""
    add_engine_options(group, _ENGINE, pool=f"room for {_KV_TOKENS} tokens")


def demo_engine(options: argparse.Namespace) -> EngineOptions:
    """Return the options of the demo's engine.

    Raises:
        BadInput: an option of the engine is out of range.
    """
    engine = engine_options(options)
    if engine.num_blocks is not None:
        return engine
    return replace(engine, num_blocks=_KV_TOKENS // engine.block_tokens)


def option_set_engine(text: str, given: argparse.Namespace) -> EngineOptions:
    """Return the options of an engine with an option set on top of the command's own options.

    Args:
        text: options as on a command line.
        given: parsed options of the command.

    Raises:
        BadInput: the text is not a set of engine options, or an option is out of range.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f'--compare "{text}" cannot be split into words: {error}.') from None
    parser = _SetParser(text)
    add_demo_engine(parser.add_argument_group("engine"))
    return demo_engine(parser.parse_args(words, argparse.Namespace(**vars(given))))


class _SetParser(argparse.ArgumentParser):
    def __init__(self, text: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._text = text

    def error(self, message: str) -> NoReturn:
        raise BadInput(
            f'--compare "{self._text}": {message}. Give engine options; '
            "`inferscope demo --help` lists them."
        )
