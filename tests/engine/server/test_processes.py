"""Tests of processes that exit, are killed, or are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from inferscope.engine.server import launch
from tests.engine.server.running import (
    Server,
    Stream,
    all_gone,
    in_background,
    is_alive,
    serving,
)

Serve = Callable[..., Server]
SETTINGS = launch.ServeSettings(
    model="builtin",
    served_name="builtin",
    host="127.0.0.1",
    port=0,
    num_api_servers=1,
    drain_s=1.0,
    client_timeout_s=1.0,
)
LONG = {"prompt": "x", "max_tokens": 3900, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two API servers; the tests below stop it in their order."""
    with serving(tmp_path_factory.mktemp("pair"), "builtin", "--api-servers", "2") as running:
        yield running.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers, and kill them at the end of the test."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(serving(tmp_path, *options))


@pytest.mark.thorough
def test_two_api_servers_serve_one_socket_and_their_records_join_the_cores(pair: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 6, "ignore_eos": True}
    num = 0
    while True:
        started = [in_background(pair.events, "/v1/completions", body) for _ in range(8)]
        for thread, results in started:
            thread.join()
            assert results[0][-1] == "[DONE]"
        num += len(started)
        finals = pair.finals(until=num)
        names = {request_id.rpartition("-")[0] for request_id in finals}
        if names == {"api-0", "api-1"}:
            break
        assert num < 400, f"only {names} served"
    assert len(finals) == num
    for final in finals.values():
        assert final.finish == "length"
        assert (final.arrived_at, final.delivered_at) == ("http", "http")
        assert final.output_tokens == 6
        assert not final.joined_late
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert min(final.ledger_ns.values()) >= 0


@pytest.mark.thorough
def test_killed_api_server_ends_only_its_own_requests(pair: Server) -> None:
    core, *servers = pair.children()
    idle = [_num_open(pid) for pid in servers]
    streams: dict[str, Stream] = {}
    while any(_num_open(pid) <= num for pid, num in zip(servers, idle, strict=True)):
        name = f"stream-{len(streams)}"
        assert len(streams) < 40, "one of the API servers takes no connections"
        stream = Stream(pair.port, "/v1/completions", LONG, headers={"X-Request-Id": name})
        streams[name] = stream
        next(stream.events())
    os.kill(servers[0], signal.SIGKILL)
    lost = {
        name for name, stream in streams.items() if stream.is_cut_off(300)
    }  # more than a socket buffers
    assert 0 < len(lost) < len(streams)
    deadline_s = time.monotonic() + 90
    while "was killed by signal 9" not in pair.said() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    while len(pair.children()) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert "was killed by signal 9; its requests are cancelled" in pair.said()
    # On a busy machine an unread stream may be ended too, which logs another line.
    lines = [line for line in pair.said().splitlines() if "reading; killing it" not in line]
    assert len(lines) == 3, lines
    assert pair.children()[0] == core
    for stream in streams.values():
        stream.close()
    for name in streams:
        final = pair.final(name)
        # The core may have finished a request before the kill; then there is nothing to abort.
        is_whole = final.decode_work.tokens == LONG["max_tokens"] - 1
        of_lost = "engine_lost" if is_whole else "server_abort"
        assert final.finish == (of_lost if name in lost else "client_cancel")
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert pair.events("/v1/completions", {**LONG, "max_tokens": 2})[-1] == "[DONE]"


def _num_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.thorough
def test_api_server_that_cannot_receive_is_replaced(pair: Server) -> None:
    _, *servers = pair.children()
    arguments = Path(f"/proc/{servers[0]}/cmdline").read_bytes().split(b"\0")
    settings = json.loads(next(each for each in arguments if each.startswith(b"{")))
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.connect(f"ipc://{settings['folder']}/{settings['name']}")
        intruder.send(b"\xc1")
        deadline_s = time.monotonic() + 90
        while set(servers) & set(pair.children()) == set(servers):
            assert time.monotonic() < deadline_s, "it goes on, deaf"
            time.sleep(0.02)
    while len(pair.children()) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert "receiving from the engine failed" in pair.said()
    assert "ended with exit code 1; its requests are cancelled" in pair.said()
    assert pair.events("/v1/completions", {**LONG, "max_tokens": 2})[-1] == "[DONE]"


def test_killed_engine_is_reported_to_clients_and_ends_the_server(pair: Server) -> None:
    core, *servers = pair.children()
    num_logged = len(pair.said())
    whole, answers = in_background(pair.post, "/v1/completions", LONG)
    with Stream(pair.port, "/v1/completions", LONG) as stream:
        events = stream.events()
        next(events)
        os.kill(core, signal.SIGKILL)
        *_, last = events
    assert last["error"]["code"] == "engine_stopped"
    for path in ("/health", "/metrics"):
        deadline_s = time.monotonic() + 60
        while pair.ask("GET", path)[0] != 503:  # the other server may be notified a moment later
            assert time.monotonic() < deadline_s, f"{path} responds as if the engine ran"
            time.sleep(0.02)
    assert pair.post("/v1/completions", LONG)[0] == 503
    whole.join()
    assert answers[0][0] == 503
    assert pair.process.wait(60) == 1
    assert "the engine's process was killed by signal 9" in pair.said().splitlines()[-1]
    assert "Traceback" not in pair.said()[num_logged:]
    assert all_gone(servers)


@pytest.mark.thorough
def test_stop_lets_requests_finish_and_leaves_no_process(serve: Serve) -> None:
    server = serve("builtin", "--drain", "3").wait()
    children = server.children()
    path = "/v1/completions"
    with (
        Stream(server.port, path, LONG) as long,
        Stream(server.port, path, {**LONG, "max_tokens": 40}) as short,
    ):
        events, finishing = long.events(), short.events()
        next(events)
        next(finishing)
        server.process.send_signal(signal.SIGTERM)
        assert [*finishing][-1] == "[DONE]"
        assert [*events][-1]["error"]["code"] == "server_abort"
    assert server.process.wait(60) == 0
    assert not any(map(is_alive, children))
    pool, serving = server.said().splitlines()
    assert pool.startswith("inferscope: KV pool: ")
    assert serving.startswith("inferscope: serving builtin on")
    finishes = sorted(str(final.finish) for final in server.finals(until=2).values())
    assert finishes == ["length", "server_abort"]


@pytest.mark.thorough
def test_killing_the_supervisor_ends_its_processes(serve: Serve) -> None:
    server = serve("builtin", "--api-servers", "2")
    deadline_s = time.monotonic() + 60
    while len(server.children()) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    children = server.children()
    assert len(children) == 3
    server.process.kill()
    server.process.wait()
    assert all_gone(children)


def test_ctrl_c_before_ready_stops_the_server(serve: Serve) -> None:
    server = serve("builtin")
    deadline_s = time.monotonic() + 60
    while len(server.children()) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    children = server.children()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 130
    assert all_gone(children)
    assert "Traceback" not in server.said()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["no-such-model"], 2, "'no-such-model' is no model"),
        (["builtin", "--port", "70000"], 2, "--port is 70000"),
        (["builtin", "--api-servers", "0"], 2, "--api-servers is 0"),
        (["builtin", "--max-running", "0"], 2, "max_running is 0"),
        (["builtin", "--dtype", "int3"], 2, "dtype 'int3' is unknown"),
        (["builtin", "--block-tokens", "0"], 2, "block_tokens is 0"),
        (["builtin", "--block-tokens", "9999"], 2, "block_tokens is 9999. Give 1 to 1024"),
        (["builtin", "--seed", str(2**80)], 2, "Give a whole number of 64 bits"),
        (
            ["builtin", "--port", "0", "--num-blocks", "1"],
            2,
            "4096 tokens needs 256 KV blocks of 49152 bytes",
        ),
    ],
)
def test_invalid_options_give_a_one_line_error(
    tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    done = _serve(tmp_path, *options)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_model_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    done = _serve(tmp_path, "no-\udcff")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        r"inferscope serve: error: argument MODEL: 'no-\udcff' is not UTF-8: rename the folder"
    )


def test_port_in_use_gives_a_one_line_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _serve(tmp_path, "builtin", "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr
    assert done.stderr.count("\n") == 1


def _serve(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferscope", "serve", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "INFERSCOPE_DIR": str(folder)},
        check=False,
    )


NOISY_MODULE = """
import sys
from inferscope.engine.server.parent import Ready, send_to_parent
sys.stdout.write("x" * 200_000 + "\\n" + "y" * 100_000 + "\\n")
send_to_parent(Ready())
sys.stdout.write("z" * 300_000)
"""


def test_other_output_of_a_child_hides_no_message(tmp_path: Path) -> None:
    async def events() -> list[object]:
        with socket.socket() as listening:
            supervisor = launch.Supervisor(SETTINGS, listening, print)
            child = await supervisor._start("talkative", "talkative", settings={})
            try:
                received = [await asyncio.wait_for(supervisor._events.get(), 10) for _ in range(2)]
            finally:
                launch._kill(child)
                await asyncio.wait_for(asyncio.gather(*supervisor._watchers), 5)
            return [type(event).__name__ for event in received]

    (tmp_path / "talkative.py").write_text(NOISY_MODULE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert asyncio.run(events()) == ["_ChildMessage", "_Ended"]
