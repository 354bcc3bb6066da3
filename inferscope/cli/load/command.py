"""Send requests to an OpenAI-compatible server on a fixed schedule and measure latencies.

The load is open-loop: arrival times come from the seed, and no request waits for another one.
There is no --max-concurrency on purpose. It would send a slow server fewer requests, and the
figures would omit the waits that the server caused (coordinated omission). --most-open only
protects this machine: requests beyond it are refused and counted, never delayed.

Ctrl-C stops sending, waits up to 5 s for open requests (a second Ctrl-C does not wait), prints the
summary and exits with 130. Otherwise the exit code is 0, or 1 if no request finished.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
from pathlib import Path

from inferscope.cli.load.options import (
    add_arrivals,
    add_requests,
    add_server,
    asks_of,
    check,
    has_lengths,
    seconds_of,
)
from inferscope.cli.load.run import Outcome, Run, drive
from inferscope.errors import BadInput, InferScopeError
from inferscope.foreign import one_line
from inferscope.json_document import json_line
from inferscope.load import LoadDocument, server_url, summary_text

_OTHER_FILES = 64
_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "url", metavar="URL", help="address of the server, such as http://127.0.0.1:8000"
    )
    add_arrivals(parser.add_argument_group("when"))
    add_requests(parser.add_argument_group("what"))
    add_server(parser.add_argument_group("how"))
    out = parser.add_argument_group("output")
    out.add_argument(
        "--out", type=Path, metavar="FILE", help="write each request's times as a JSON line"
    )
    out.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.epilog = """examples:
  inferscope load http://127.0.0.1:8000 --rate 4 --duration 60 --out client.jsonl
  inferscope load http://127.0.0.1:8000 --rate 2 --burst 8 --burst-every 30 --kind agent
  inferscope load http://127.0.0.1:8000 --requests 200 --prompt-tokens lognormal:512,0.5 \\
      --output-tokens 16..256 --shared-prefix 1024 --prefix-share 0.5 --json
"""


def run(options: argparse.Namespace) -> int:
    """Run the load and print its summary."""
    check(options)
    settings = Run(
        url=server_url(options.url),
        endpoint=options.endpoint,
        model=options.model,
        api_key=_api_key(options.api_key_env),
        timeout_s=options.timeout,
        ignores_eos=has_lengths(options) if options.ignore_eos is None else options.ignore_eos,
        temperature=options.temperature,
        sends_seed=options.sampling_seeds,
        most_open=_connection_limit(options.most_open),
        duration_s=seconds_of(options),
        counts_words=has_lengths(options) and options.tokens_per_word is None,
        tokens_per_word=options.tokens_per_word,
        has_parts=options.parts,
        out=options.out,
        asks=lambda counted: asks_of(options, counted),
    )
    try:
        outcome = asyncio.run(drive(settings))
    except OSError as error:
        if options.out is None:
            raise
        raise BadInput(
            f"cannot write {options.out}: {error.strerror}. Choose another path."
        ) from error
    return _print_outcome(options, outcome)


def _print_outcome(options: argparse.Namespace, outcome: Outcome) -> int:
    """Print the summary and return the exit code.

    Raises:
        InferScopeError: no request finished, or none was due.
    """
    summary = outcome.summary
    if options.json:
        document = LoadDocument(
            url=outcome.url,
            model=outcome.model,
            endpoint=options.endpoint,
            seed=options.seed,
            run=options.run_name,
            words=outcome.words,
            interrupted=outcome.was_interrupted,
            summary=summary,
        )
        sys.stdout.write(json_line(document))
    else:
        sys.stdout.write(f"server     {outcome.url}   model {one_line(outcome.model)}\n")
        sys.stdout.write(f"seed       {options.seed}   repeat this load: --seed {options.seed}\n")
        sys.stdout.write(summary_text(summary))
        if outcome.words is not None and not outcome.words.is_measured:
            sys.stdout.write(
                "Prompt lengths are approximate: the server has no /tokenize, so each word counts "
                f"as {outcome.words.tokens_per_word:g} tokens.\n"
            )
    sys.stdout.flush()
    if outcome.was_interrupted:
        return _INTERRUPTED
    if not summary.scheduled:
        raise InferScopeError(
            f"no request was due within {seconds_of(options):g} s. "
            "Give a higher --rate or a longer --duration."
        )
    if not summary.finished:
        kind, num = next(iter(summary.failed.items()), ("refused", summary.refused))
        example = summary.examples.get(kind, "")
        raise InferScopeError(
            f"none of {summary.scheduled} requests finished: {num} x {kind}"
            + (f" ({example})" if example else "")
            + ". See the server's log."
        )
    return 0


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BadInput(f"--api-key-env names {variable}, which is not set. Set it to the key.")
    return key


def _connection_limit(most_open: int) -> int:
    """Raise the process's file limit for `most_open` connections; return the allowed number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most_open + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(most_open, soft - _OTHER_FILES)
    return most_open
