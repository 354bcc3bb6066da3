"""Run of a load: finds the server's model, sends the requests and sums up the results."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inferscope.cli.status_line import write_status
from inferscope.cli.terminal import can_draw
from inferscope.load import (
    ClientTimes,
    Endpoint,
    HttpClient,
    HttpOptions,
    LoadStats,
    LoadSummary,
    OpenLoop,
    PlannedRequest,
    TokenizerRatio,
    find_model,
    live_line,
    measure_tokens_per_word,
    open_session,
)
from inferscope.private import private_file

_GRACE_S = 5.0
_REFRESH_S = 0.5
_LOG_S = 5.0
"""Interval in seconds between lines on a standard error that is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a load.

    Attributes:
        counts_words: whether the server's tokenizer determines the number of words in a prompt.
        tokens_per_word: ratio that determines it otherwise; None if prompts have no set length.
        has_parts: whether requests declare the parts of their prompts.
        out: file for each request's times.
        asks: function that returns the load, given the measured tokens per word, if any.
    """

    url: str
    endpoint: Endpoint
    model: str | None
    api_key: str | None
    timeout_s: float
    ignores_eos: bool
    temperature: float | None
    sends_seed: bool
    most_open: int
    duration_s: float | None
    counts_words: bool
    tokens_per_word: float | None
    has_parts: bool
    out: Path | None
    asks: Callable[[TokenizerRatio | None], Iterator[PlannedRequest]]


@dataclass(frozen=True)
class Outcome:
    """Result of a load."""

    url: str
    model: str
    words: TokenizerRatio | None
    summary: LoadSummary
    was_interrupted: bool


async def drive(run: Run) -> Outcome:
    """Run a load, and write each request's times when it ends.

    Raises:
        NotFound: the server does not respond.
        BadInput: the server names no model.
        OSError: writing the file failed.
    """
    async with open_session(api_key=run.api_key) as session:
        model, is_counting = await find_model(session, run.url, run.model)
        words = None
        if run.counts_words:
            words = await measure_tokens_per_word(
                session, run.url, model=model, endpoint=run.endpoint
            )
        tokens_per_word = words.tokens_per_word if words else run.tokens_per_word
        client = HttpClient(
            session,
            HttpOptions(
                url=run.url,
                model=model,
                endpoint=run.endpoint,
                timeout_s=run.timeout_s,
                ignores_eos=run.ignores_eos,
                is_counting=is_counting,
                temperature=run.temperature,
                sends_seed=run.sends_seed,
                tokens_per_word=tokens_per_word if run.has_parts else None,
            ),
        )
        tally = LoadStats()
        # Opened, which truncates an existing file, only after the server has responded.
        with private_file(run.out) if run.out else contextlib.nullcontext() as out:
            sink = _Sink(tally, out)
            loop = OpenLoop(client, run.asks(words), sink.take, most_open=run.most_open)
            sink.when_broken = loop.abandon
            with _interruptible(loop) as interruption:
                async with _shown(loop, tally):
                    await loop.run(run.duration_s)
            sink.close()
        return Outcome(run.url, model, words, tally.summary(), interruption.is_set())


class _Sink:
    """Receiver of ended requests; a write error stops the load, so that no line is lost."""

    def __init__(self, tally: LoadStats, out: IO[bytes] | None) -> None:
        self._tally = tally
        self._out = out
        self._error: OSError | None = None
        self.when_broken: Callable[[], None] = lambda: None

    def take(self, times: ClientTimes) -> None:
        self._tally.add(times)
        if self._out is None or self._error is not None:
            return
        try:
            self._out.write(times.to_json())
        except OSError as error:
            self._error = error
            self.when_broken()

    def close(self) -> None:
        if self._error is not None:
            raise self._error
        if self._out is not None:
            self._out.flush()


@contextlib.contextmanager
def _interruptible(load: OpenLoop) -> Iterator[asyncio.Event]:
    """Make the first Ctrl-C or SIGTERM stop the sending, and the second one stop the load."""
    loop = asyncio.get_running_loop()
    interruption = asyncio.Event()

    def interrupt() -> None:
        if interruption.is_set():
            load.abandon()
            return
        interruption.set()
        load.stop()
        loop.call_later(_GRACE_S, load.abandon)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield interruption
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _shown(load: OpenLoop, tally: LoadStats) -> AsyncIterator[None]:
    """Update a line of progress on a terminal; elsewhere write a line every few seconds."""
    began_s = time.monotonic()

    def line() -> str:
        return live_line(
            tally,
            elapsed_s=time.monotonic() - began_s,
            num_scheduled=load.num_scheduled,
            num_open=load.num_open,
        )

    is_drawn = can_draw(sys.stderr)
    task = asyncio.create_task(_redraw(line) if is_drawn else _log(line))
    try:
        yield
    finally:
        task.cancel()
        if is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


async def _redraw(line: Callable[[], str]) -> None:
    while True:
        sys.stderr.write(f"\r\x1b[K{line()}")
        sys.stderr.flush()
        await asyncio.sleep(_REFRESH_S)


async def _log(line: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(_LOG_S)
        write_status(f"load: {line()}")
