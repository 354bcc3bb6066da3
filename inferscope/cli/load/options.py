"""Options of `inferscope load`, and the load that they describe."""

from __future__ import annotations

import argparse
import heapq
import re
import secrets
from collections.abc import Iterator
from itertools import islice

from inferscope.cli.arg_types import above_zero, count, share
from inferscope.errors import BadInput
from inferscope.load import (
    FORMS,
    KINDS,
    MIX,
    Composer,
    Lengths,
    PlannedRequest,
    TokenizerRatio,
    WordPrompts,
    bursts,
    of_kind,
    of_lengths,
    parse_lengths,
    plan,
    poisson,
    stream,
)

DEFAULT_SECONDS = 60.0
DEFAULT_RATE_S = 1.0
_MAX_TEMPERATURE = 2.0
_SEEDS = 1_000_000_000
_DEFAULT_PROMPT, _DEFAULT_OUTPUT = "512", "128"


def add_arrivals(when: argparse._ArgumentGroup) -> None:
    """Add the options of arrival times."""
    when.add_argument(
        "--rate",
        type=above_zero,
        metavar="PER_SECOND",
        help="mean requests per second, with random arrivals "
        f"(default: {DEFAULT_RATE_S:g}, none with --burst)",
    )
    when.add_argument(
        "--burst", type=count, metavar="N", help="send N more requests at once in each period"
    )
    when.add_argument(
        "--burst-every",
        type=above_zero,
        metavar="SECONDS",
        help="length of that period; the burst is in its middle (no default)",
    )
    when.add_argument(
        "--duration",
        type=above_zero,
        metavar="SECONDS",
        help=f"time to send for (default: {DEFAULT_SECONDS:.0f}, no limit with --requests)",
    )
    when.add_argument(
        "--requests", type=count, metavar="N", help="stop after N requests (default: no limit)"
    )
    when.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(_SEEDS),
        help="seed of the whole load; the same seed repeats it (default: random, printed)",
    )


def add_requests(what: argparse._ArgumentGroup) -> None:
    """Add the options of request content."""
    what.add_argument("--kind", choices=(*KINDS, MIX), help=f"type of traffic (default: {MIX})")
    what.add_argument(
        "--prompt-tokens",
        type=_lengths_of,
        metavar="DIST",
        help="prompt length in tokens, instead of --kind: "
        f"{FORMS} (default: {_DEFAULT_PROMPT} with --output-tokens)",
    )
    what.add_argument(
        "--output-tokens",
        type=_lengths_of,
        metavar="DIST",
        help="output length in tokens, in the same forms "
        f"(default: {_DEFAULT_OUTPUT} with --prompt-tokens)",
    )
    what.add_argument(
        "--shared-prefix",
        type=count,
        metavar="TOKENS",
        help="length of a prefix that prompts share, in addition to --prompt-tokens (default: 0)",
    )
    what.add_argument(
        "--prefix-share",
        type=share,
        metavar="SHARE",
        help="share of requests that begin with the shared prefix, 0 to 1 (default: 0.5)",
    )
    what.add_argument(
        "--parts",
        action="store_true",
        help="send X-InferScope-Parts: the shared prefix as system part, the rest as user part",
    )
    what.add_argument(
        "--tokens-per-word",
        type=above_zero,
        metavar="N",
        help="fixed tokens per word, for the same text on every server (default: from /tokenize)",
    )
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate up to the full output length (default: on with --prompt-tokens or "
        "--output-tokens)",
    )


def add_server(how: argparse._ArgumentGroup) -> None:
    """Add the options of the requests to the server."""
    how.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="API endpoint (default: %(default)s)",
    )
    how.add_argument("--model", help="served name of the model (default: first of /v1/models)")
    how.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the server's API key (default: no key)",
    )
    how.add_argument(
        "--run-name",
        type=_header_value,
        default=f"load-{secrets.token_hex(3)}",
        metavar="NAME",
        help="prefix of every request's ID (default: load- and six random digits)",
    )
    how.add_argument(
        "--temperature", type=float, help="sampling temperature, 0 to 2 (default: the server's)"
    )
    how.add_argument(
        "--sampling-seeds",
        action="store_true",
        help="send a sampling seed with each request; slows down every step on some servers",
    )
    how.add_argument(
        "--traceparent", action="store_true", help="send a W3C trace context with each request"
    )
    how.add_argument(
        "--timeout",
        type=above_zero,
        default=120.0,
        metavar="SECONDS",
        help="maximum time per request (default: %(default)g)",
    )
    how.add_argument(
        "--most-open",
        type=count,
        default=4096,
        metavar="N",
        help="maximum number of open requests; further ones are refused (default: %(default)s)",
    )


def asks_of(
    options: argparse.Namespace, counted: TokenizerRatio | None
) -> Iterator[PlannedRequest]:
    """Return the whole load, determined by the options and the server's tokenizer alone."""
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
    """Check the options for invalid values, and for combinations that would ignore an option.

    Raises:
        BadInput: an option is invalid, or would be ignored.
    """
    if options.temperature is not None and not 0 <= options.temperature <= _MAX_TEMPERATURE:
        raise BadInput(f"--temperature is {options.temperature}. Give 0 to {_MAX_TEMPERATURE:g}.")
    if (options.burst is None) != (options.burst_every is None):
        raise BadInput("--burst and --burst-every belong together. Give both or neither.")
    if options.kind and has_lengths(options):
        raise BadInput(
            f"--kind {options.kind} sets the lengths itself. "
            "Give either --kind, or --prompt-tokens and --output-tokens."
        )
    if options.prefix_share is not None and options.shared_prefix is None:
        raise BadInput(
            f"--prefix-share is {options.prefix_share:g}, but there is no shared prefix. "
            "Give --shared-prefix TOKENS."
        )
    if options.parts and options.shared_prefix is None:
        raise BadInput("--parts needs a shared prefix. Give --shared-prefix TOKENS.")
    if not has_lengths(options):
        for name in ("shared_prefix", "tokens_per_word"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise BadInput(
                    f"{option} needs --prompt-tokens or --output-tokens. Give one of them."
                )


def has_lengths(options: argparse.Namespace) -> bool:
    """Return whether the options give lengths instead of a type of traffic."""
    return options.prompt_tokens is not None or options.output_tokens is not None


def seconds_of(options: argparse.Namespace) -> float | None:
    """Return the time to send for, in seconds; None if only the number of requests limits it."""
    if options.duration is None and options.requests is None:
        return DEFAULT_SECONDS
    duration_s: float | None = options.duration
    return duration_s


def _header_value(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give up to 64 letters, digits, '.', '_', '-'")
    return text


def _lengths_of(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None
