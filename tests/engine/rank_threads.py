"""Ranks as threads of this process: the engine's own code without a start of processes."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from inferscope.engine import load_model, pool_blocks, remote
from inferscope.engine.parallel import Place, RankGroup
from inferscope.engine.runner import Runner
from inferscope.engine.worker import serve
from inferscope.probe import Probe


class Threads:
    """Meeting point of ranks that are threads of this process."""

    def __init__(self, place: Place) -> None:
        self.partials: dict[int, list[Tensor]] = {}
        self.barriers = [threading.Barrier(place.tensor_ranks) for _ in range(place.num_stages)]
        self.everyone = threading.Barrier(place.num_ranks)
        self.streams: list[SimpleQueue[Tensor]] = [
            SimpleQueue() for _ in range(2 * place.num_ranks)
        ]
        self.logits: Tensor | None = None


class ThreadGroup(RankGroup):
    """Ranks as threads, with the arithmetic of the real group."""

    def __init__(self, place: Place, threads: Threads) -> None:
        self.place, self._threads = place, threads
        self.waited_ns = 0

    def begin(self, embedded: Tensor) -> Tensor:
        return self._threads.streams[self.place.rank].get() if self.place.stage else embedded

    def summed(self, partial: Tensor) -> Tensor:
        barrier = self._threads.barriers[self.place.stage]
        at = self.place.stage
        barrier.wait()
        self._threads.partials.setdefault(at, []).append(partial)
        barrier.wait()
        total = torch.stack(self._threads.partials[at]).sum(dim=0)
        barrier.wait()
        self._threads.partials[at] = []
        barrier.wait()
        return total

    def end(self, stream: Tensor) -> bool:
        if self.place.stage == self.place.num_stages - 1:
            return True
        self._threads.streams[self.place.rank + self.place.tensor_ranks].put(stream)
        return False

    def share(self, logits: Tensor) -> Tensor:
        if self.place.rank == self.place.num_ranks - self.place.tensor_ranks:
            self._threads.logits = logits
        self._threads.everyone.wait()
        assert self._threads.logits is not None
        return self._threads.logits


class _ThreadProcess:
    """Thread with the calls of a process that the runner uses."""

    pid = returncode = 0

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("thread", timeout or 0.0)

    def kill(self) -> None:
        """Leave the thread to the end of its pipe."""


@contextmanager
def workers_as_threads() -> Iterator[None]:
    """Start the workers of remote runners as threads."""
    meetings: dict[str, Threads] = {}

    def start(settings: remote.WorkerSettings) -> Any:
        own_end, worker_end = socket.socketpair()
        place = Place.of(settings.rank, settings.options)
        threads = meetings.setdefault(settings.meeting, Threads(place))

        def run() -> None:
            with Connection(worker_end.detach()) as pipe:
                options = settings.options
                model = load_model(settings.model, options, place)
                num_blocks = pool_blocks(model, options)
                if place.num_ranks > 1:
                    model = replace(model, group=ThreadGroup(place, threads))
                runner = Runner.of(model, options, num_blocks=num_blocks)
                serve(pipe, model, runner, Probe.disabled(), num_blocks=num_blocks)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return remote._Worker(_ThreadProcess(thread), Connection(own_end.detach()))  # type: ignore[arg-type]

    with mock.patch.object(remote, "_start_worker", start):
        yield
