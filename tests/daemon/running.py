"""A collector and an engine, each a process of its own, and the samples of a scrape."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.children import child

BY_HAND = Path(__file__).with_name("by_hand.py")
LATEST_S = 90.0


def eventually(is_so: Callable[[], bool], *, latest_s: float = LATEST_S) -> None:
    """Wait for something that will be so."""
    end_s = time.monotonic() + latest_s
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be so"
        time.sleep(0.1)


class Scrape:
    """One page of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        series = [line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"]
        assert len(series) == len(set(series)), "a series is exported twice"
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def of_engine(self, engine_id: str) -> Scrape:
        """Return the samples of one engine."""
        part: Scrape = Scrape.__new__(Scrape)
        part.text, part.families = self.text, self.families
        part._samples = [s for s in self._samples if s.labels["engine_id"] == engine_id]
        return part

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples of a name that have these labels."""
        return [
            (sample.labels, sample.value)
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        """Return the only sample of a name that has these labels."""
        ((_, value),) = self.all(name, **labels)
        return value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels."""
        return sum(value for _, value in self.all(name, **labels))


class Collector:
    """`inferscope collect`, running."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path, log: Path) -> None:
        self.process = process
        self.file = file
        self._log = log
        eventually(lambda: "collecting from" in self.log() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()
        self.url = self.log().split("serves ")[1].split()[0]

    def log(self) -> str:
        """Return its standard error."""
        return self._log.read_text(encoding="utf-8")

    def scrape(self) -> Scrape:
        """Ask for /metrics."""
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            return Scrape(answer.read().decode())

    def reload(self, text: str) -> str:
        """Reload with another configuration; return the lines that the collector logs."""
        before = self.log()
        self.file.write_text(text, encoding="utf-8")
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: "configuration " in self.log()[len(before) :])
        return self.log()[len(before) :]

    def stop(self) -> int:
        """End it as a service manager would, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def collecting(
    rings: Path,
    folder: Path,
    config: str = "",
    prometheus: str = "port: 0",
    *,
    within: Sequence[str] = (),
    **env: str,
) -> Iterator[Collector]:
    """Run a collector for as long as the context lasts."""
    file, log_path = folder / "collect.yaml", folder / "collect.log"
    exporters = f"exporters:\n  prometheus: {{{prometheus}}}\n"
    file.write_text(exporters + config, encoding="utf-8")
    words = [*within, sys.executable, "-m", "inferscope", "collect", "--config", str(file)]
    environment = {**os.environ, "INFERSCOPE_DIR": str(rings), **env}
    with log_path.open("wb") as log, child(words, stderr=log, env=environment) as process:
        yield Collector(process, file, log_path)


class Engine:
    """The engine of by_hand.py, or another script, running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._await_word("ready")

    def do(self, *lines: str) -> None:
        """Make it do something, and wait until it has."""
        assert self.process.stdin is not None
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            if line != "quit":
                self._await_word("done")

    def kill(self) -> None:
        """End it as the kernel would."""
        self.process.kill()
        self.process.wait()

    def _await_word(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word


@contextmanager
def engine_by_hand(
    rings: Path, name: str, *, within: Sequence[str] = (), script: Path = BY_HAND
) -> Iterator[Engine]:
    """Run an engine for as long as the context lasts; `within` is a command that runs commands."""
    environment = {"INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": name}
    with child(
        [*within, sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERSCOPE_RING_MB": "4", **environment},
    ) as process:
        yield Engine(process)
