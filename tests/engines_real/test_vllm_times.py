"""On a real vLLM server: our times, held against a known delay, vLLM's own, and the clients'."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.vllm_laws import agreement, hold_to_the_laws, metric, of_kind, report
from tests.engines_real.vllm_server import Server, export, needs_vllm, serving, stop

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]

SLOW_TOKENISER = """
import time
from inferscope.adapters.inject import when_imported

def slow_down(module):
    tokenise = module.BaseRenderer._tokenize_prompt

    def slow(self, prompt, params):
        if "slowly" in prompt["prompt"]:
            time.sleep(0.2)
        return tokenise(self, prompt, params)

    module.BaseRenderer._tokenize_prompt = slow

when_imported({"vllm.renderers.base": "sitecustomize:slow_down"})
"""
THEIRS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
}


@dataclass
class Day:
    """Requests of a server, with its own times and those of its rings."""

    texts: list[Ask]
    crowd: list[Ask]
    few: list[Ask]
    single: list[Ask]
    theirs_ms: dict[str, float]
    """The crowd's means in vLLM's histograms."""
    lines: list[dict[str, Any]]

    def of(self, ask: Ask) -> dict[str, Any]:
        """Return our export of a request."""
        (line,) = (r for r in of_kind(self.lines, "request") if r["external_id"] == ask.name)
        return line

    def mean_ms(self, asks: list[Ask], ns: Callable[[dict[str, Any]], int]) -> float:
        """Return a mean over requests."""
        return statistics.fmean(ns(self.of(ask)) / 1e6 for ask in asks)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Day:
    """Ask a server: texts, a crowd that queues, four at a time, and one."""
    folder = tmp_path_factory.mktemp("day")
    (folder / "sitecustomize.py").write_text(SLOW_TOKENISER)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    rng = random.Random(7)

    def stream(name: str, prompt: str | list[int], num_tokens: int) -> Ask:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
        return Ask(name, {**body, "stream": True, "stream_options": {"include_usage": True}})

    def tokens(num: int) -> list[int]:
        return [rng.randrange(10, 4000) for _ in range(num)]

    texts = [
        stream(f"{pace}-{number}", f"answer {pace}, number {number}", 8)
        for number in range(8)
        for pace in ("slowly", "quickly")
    ]
    warm = [stream(f"warm-{number}", tokens(100), 8) for number in range(4)]
    crowd = [
        stream(f"crowd-{number}", tokens(rng.randint(20, 600)), rng.randint(10, 60))
        for number in range(32)
    ]
    few = [stream(f"few-{number}", tokens(rng.randint(20, 200)), 24) for number in range(40)]
    single = [stream(f"single-{number}", tokens(60), 6) for number in range(200)]
    with _serving_apart(folder / "server", PYTHONPATH=path) as server:
        ask_all(server.url, warm, at_once=1)
        before = _histograms(server)
        ask_all(server.url, crowd, at_once=12)
        after = _histograms(server)
        ask_all(server.url, texts, at_once=1)
        ask_all(server.url, few, at_once=4)
        ask_all(server.url, single, at_once=1)
        assert stop(server) == 0
    lines = export(server)
    hold_to_the_laws(lines, warm + crowd + texts + few + single)
    theirs_ms = {}
    for name in THEIRS:
        (sum_before, num_before), (sum_after, num_after) = before[name], after[name]
        assert num_after - num_before == len(crowd)
        theirs_ms[name] = 1e3 * (sum_after - sum_before) / len(crowd)
    return Day(texts, crowd, few, single, theirs_ms, lines)


@contextlib.contextmanager
def _serving_apart(folder: Path, **variables: str) -> Iterator[Server]:
    """Serve with the core on cores of its own; the last one is for front end and client.

    vLLM's core spins while it waits. Beside it a client gets its turn up to 80 ms late and finds
    many tokens at once, and a request waits in a socket until the front end gets one: neither is
    anything that a server on a machine of its own would do.
    """
    cores = sorted(os.sched_getaffinity(0))
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or it looks for cores of its own
    try:
        with serving(folder, "--max-num-seqs", "6", **variables) as server:
            for ring in server.engine.rings:
                identity = ring.identity
                _keep_to(
                    cores[-1:] if identity.role == "frontend" else cores[:-1] or cores, identity.pid
                )
            _keep_to(cores[-1:], os.getpid())
            yield server
    finally:
        os.sched_setaffinity(0, cores)


def _keep_to(cores: list[int], pid: int) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
        with contextlib.suppress(PermissionError):  # ahead of what else this machine does
            os.setpriority(os.PRIO_PROCESS, int(thread.name), -10)


def _histograms(server: Server) -> dict[str, tuple[float, float]]:
    time.sleep(0.5)  # they are filled after the answer has left
    return {
        name: (metric(server, f"{theirs}_sum"), metric(server, f"{theirs}_count"))
        for name, theirs in THEIRS.items()
    }


@pytest.mark.conformance("vLLM", "a slow tokeniser shows as `frontend`")
def test_a_slow_tokeniser_is_the_front_ends_time_in_both_ledgers(day: Day) -> None:
    quick_ms = []
    for ask in day.texts:
        of_all, until_first = day.of(ask)["ledger_ns"], day.of(ask)["ttft_ledger_ns"]
        assert of_all["frontend"] == until_first["frontend"]
        if ask.name.startswith("slowly"):
            assert of_all["frontend"] >= 195e6
        else:
            quick_ms.append(of_all["frontend"] / 1e6)
    print(f"\nfront end without the delay: {sorted(quick_ms)} ms")  # noqa: T201
    assert statistics.median(quick_ms) < 50


@pytest.mark.conformance("vLLM", "engine's own `/metrics` agree")
def test_vllms_own_histograms_differ_by_what_they_leave_out(day: Day) -> None:
    ours_ms = {
        "ttft": day.mean_ms(day.crowd, lambda r: r["first_token_ns"] - r["arrived_ns"]),
        "e2e": day.mean_ms(day.crowd, lambda r: r["delivered_ns"] - r["arrived_ns"]),
        "queue": day.mean_ms(
            day.crowd,
            lambda r: r["ledger_ns"].get("queue", 0) + r["ledger_ns"].get("queue_idle", 0),
        ),
    }
    spans = [(step["start_ns"], step["end_ns"]) for step in of_kind(day.lines, "step")]

    def unread_ns(request: dict[str, Any]) -> int:
        """Return for how long a step ran after the front end had handed a request over."""
        sent_ns = request["arrived_ns"] + request["ledger_ns"]["frontend"]
        return sum(end_ns - sent_ns for start_ns, end_ns in spans if start_ns <= sent_ns < end_ns)

    # The core reads what was handed over between two steps, once it has handled the outputs of the
    # one before: there their wait begins.
    unread_ms = day.mean_ms(day.crowd, unread_ns)
    more_ms = {name: ours_ms[name] - theirs for name, theirs in day.theirs_ms.items()}
    print(f"\nmeans: ours {ours_ms}, vLLM's {day.theirs_ms} ms")  # noqa: T201
    print(f"ours more {more_ms}, unread {unread_ms} ms")  # noqa: T201
    assert ours_ms["queue"] > 20, "no request had to wait: nothing is compared"
    # Theirs begin after the body was parsed and end when the front end has a step's outputs.
    assert 0 < more_ms["ttft"] < 50
    assert 0 < more_ms["e2e"] < 50
    # Both end with the admission, theirs when the scheduler begins to plan, ours when it has.
    assert -0.5 < more_ms["queue"] - unread_ms < 15


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the client needs a core of its own")
@pytest.mark.conformance("vLLM", "client's clock and ours within [0, 5 ms]")
def test_a_clients_clock_is_later_than_ours_by_little(day: Day) -> None:
    """No read precedes its write, and with a free core both are short."""
    asked = {"one": day.single, "four": day.few, "twelve": day.crowd}
    apart = {name: agreement(day.lines, asks) for name, asks in asked.items()}
    for name, values in apart.items():
        report(f"{name} at a time", {}, values)
    assert min(min(edge) for values in apart.values() for edge in values.values()) >= 0
    for values in apart.values():
        for edge in values.values():
            assert edge[int(0.99 * (len(edge) - 1))] <= 5
