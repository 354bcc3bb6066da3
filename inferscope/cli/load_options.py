"""The options of `inferscope load`, and the load that they describe."""

from __future__ import annotations

import argparse
import heapq
import re
import secrets
from collections.abc import Iterator
from itertools import islice

from inferscope.cli.numbers import above_zero, count, share
from inferscope.errors import BadInput
from inferscope.load.arrivals import bursts, poisson
from inferscope.load.lengths import FORMS, Lengths, parse_lengths
from inferscope.load.plan import MIX, Composer, of_kind, of_lengths, plan, stream
from inferscope.load.prompts import WordPrompts
from inferscope.load.server import TokenizerRatio
from inferscope.load.workload import KINDS, PlannedRequest

DEFAULT_SECONDS = 60.0
DEFAULT_RATE_S = 1.0
_MOST_TEMPERATURE = 2.0
_SEEDS = 1_000_000_000
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = "512", "128"


def add_arrivals(when: argparse._ArgumentGroup) -> None:
    """Add what says when requests leave."""
    when.add_argument(
        "--rate",
        type=above_zero,
        help=f"mean requests per second, at random (default: {DEFAULT_RATE_S:g} without --burst)",
    )
    when.add_argument("--burst", type=count, metavar="N", help="on top, N at once ...")
    when.add_argument(
        "--burst-every", type=above_zero, metavar="SECONDS", help="... so often, mid-period"
    )
    when.add_argument(
        "--duration",
        type=above_zero,
        help=f"seconds of sending (default: {DEFAULT_SECONDS:.0f} without --requests)",
    )
    when.add_argument("--requests", type=count, metavar="N", help="send so many and stop")
    when.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(_SEEDS),
        help="of all of it; the same again repeats a load (default: new each time, printed)",
    )


def add_requests(what: argparse._ArgumentGroup) -> None:
    """Add what says what they ask."""
    what.add_argument("--kind", choices=(*KINDS, MIX), help=f"shape of traffic (default: {MIX})")
    what.add_argument(
        "--prompt-tokens",
        type=_lengths_of,
        metavar="DIST",
        help=f"instead of --kind: {FORMS} (default: {_DEFAULT_PROMPT} with --output-tokens)",
    )
    what.add_argument(
        "--output-tokens",
        type=_lengths_of,
        metavar="DIST",
        help=f"likewise (default: {_DEFAULT_OUTPUT} with --prompt-tokens)",
    )
    what.add_argument(
        "--shared-prefix",
        type=count,
        metavar="TOKENS",
        help="prefix that many prompts have in common, on top of --prompt-tokens",
    )
    what.add_argument(
        "--prefix-share",
        type=share,
        metavar="SHARE",
        help="of requests that begin with it (default: 0.5)",
    )
    what.add_argument(
        "--parts",
        action="store_true",
        help="say in X-InferScope-Parts that the prefix is the system's and the rest the user's",
    )
    what.add_argument(
        "--tokens-per-word",
        type=above_zero,
        metavar="N",
        help="do not ask the server's /tokenize: the same text for every server",
    )
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="ask for answers of full length (default: with --output-tokens)",
    )


def add_server(how: argparse._ArgumentGroup) -> None:
    """Add what says how the server is asked."""
    how.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    how.add_argument("--model", help="its name there (default: the first of /v1/models)")
    how.add_argument("--api-key-env", metavar="NAME", help="variable that holds the server's key")
    how.add_argument(
        "--run-name",
        type=_header_words,
        default=f"load-{secrets.token_hex(3)}",
        metavar="NAME",
        help="begins every request's id (default: load- and six digits, new each time)",
    )
    how.add_argument("--temperature", type=float, help="of the sampling (default: the server's)")
    how.add_argument(
        "--sampling-seeds",
        action="store_true",
        help="send seeds for the sampling too; costs some servers time in every step",
    )
    how.add_argument("--traceparent", action="store_true", help="send W3C trace contexts")
    how.add_argument(
        "--timeout", type=above_zero, default=120.0, help="seconds for a request (%(default)g)"
    )
    how.add_argument(
        "--most-open",
        type=count,
        default=4096,
        help="requests under way at which the next is refused (%(default)s)",
    )


def asks_of(
    options: argparse.Namespace, counted: TokenizerRatio | None
) -> Iterator[PlannedRequest]:
    """Return the whole load, which depends on the options and the tokenizer and on nothing else."""
    asks = plan(
        options.seed,
        _arrivals(options),
        _composer(options, counted),
        run=options.run_name,
        is_traced=options.traceparent,
    )
    return islice(asks, options.requests)


def _arrivals(options: argparse.Namespace) -> Iterator[float]:
    streams = []
    if options.rate is not None or options.burst is None:
        rate_s = options.rate or DEFAULT_RATE_S
        streams.append(poisson(stream(options.seed, "arrivals"), rate_s))
    if options.burst is not None:
        streams.append(bursts(options.burst, options.burst_every))
    return heapq.merge(*streams)


def _composer(options: argparse.Namespace, counted: TokenizerRatio | None) -> Composer:
    if not has_lengths(options):
        return of_kind(options.seed, options.kind or MIX)
    words = WordPrompts(
        stream(options.seed, "prompts"),
        tokens_per_word=counted.tokens_per_word if counted else options.tokens_per_word,
        template_tokens=counted.template_tokens if counted else 0,
        shared_tokens=options.shared_prefix or 0,
        share=0.5 if options.prefix_share is None else options.prefix_share,
    )
    return of_lengths(
        options.seed,
        words,
        prompt=options.prompt_tokens or parse_lengths(_DEFAULT_PROMPT),
        output=options.output_tokens or parse_lengths(_DEFAULT_OUTPUT),
    )


def check(options: argparse.Namespace) -> None:
    """Refuse what no server takes, and combinations of which one half would be ignored.

    Raises:
        BadInput: names it.
    """
    if options.temperature is not None and not 0 <= options.temperature <= _MOST_TEMPERATURE:
        raise BadInput(f"--temperature is {options.temperature}. Give 0 to {_MOST_TEMPERATURE:g}.")
    if (options.burst is None) != (options.burst_every is None):
        raise BadInput("--burst and --burst-every belong together. Give both or neither.")
    if options.kind and has_lengths(options):
        raise BadInput(
            f"--kind {options.kind} has lengths of its own. "
            "Leave it out, or --prompt-tokens and --output-tokens."
        )
    if options.prefix_share is not None and options.shared_prefix is None:
        raise BadInput(
            f"--prefix-share is {options.prefix_share:g} of nothing. Give --shared-prefix TOKENS."
        )
    if options.parts and options.shared_prefix is None:
        raise BadInput("--parts has one part to tell of. Give --shared-prefix TOKENS.")
    if not has_lengths(options):
        for name in ("shared_prefix", "tokens_per_word"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise BadInput(f"{option} needs --prompt-tokens or --output-tokens beside it.")


def has_lengths(options: argparse.Namespace) -> bool:
    """Return whether lengths are given, and no kind of traffic."""
    return options.prompt_tokens is not None or options.output_tokens is not None


def seconds_of(options: argparse.Namespace) -> float | None:
    """Return how long to send; None if the number of requests decides alone."""
    if options.duration is None and options.requests is None:
        return DEFAULT_SECONDS
    duration_s: float | None = options.duration
    return duration_s


def _header_words(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give up to 64 letters, digits, '.', '_', '-'")
    return text


def _lengths_of(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
