"""Tests of the core process under valid and invalid messages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import zmq

from inferscope.engine import Engine, Sampling, load_engine
from inferscope.engine.load import describe
from inferscope.engine.server.core import Core
from inferscope.engine.server.parent import STOP
from inferscope.engine.server.wire import (
    Hello,
    Refused,
    Step,
    Submit,
    Welcome,
    core_address,
    decode_from_core,
    encode,
    server_address,
)


class Peer:
    """The sockets of an API server, as seen by the core."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.address = server_address(folder, name)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.out = self.context.socket(zmq.DEALER)
        self.inbox = self.context.socket(zmq.PULL)
        self.out.connect(core_address(folder))
        self.inbox.bind(self.address)
        self.out.rcvtimeo = self.inbox.rcvtimeo = 30_000

    def greet(self) -> None:
        self.out.send(encode(Hello(self.name, self.address)))
        assert isinstance(decode_from_core(self.inbox.recv()), Welcome)

    def submit(self, request_id: str) -> None:
        sampling = Sampling(max_tokens=1)
        self.out.send(encode(Submit(request_id, [1], sampling, None, "")))

    def close(self) -> None:
        self.context.destroy(linger=0)


class Served:
    """A core serving in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        engine: Engine = load_engine("random:tiny")
        self.core = Core(engine, describe(engine, name="random:tiny"), folder)
        self.commands: SimpleQueue[str] = SimpleQueue()
        self.thread = threading.Thread(target=self.core.serve, args=(self.commands,))
        self.thread.start()

    def peer(self, name: str) -> Peer:
        return Peer(self.folder, name)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.commands.put(STOP)
    made.thread.join(30)
    assert not made.thread.is_alive()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_malformed_messages_end_nothing(served: Served) -> None:
    peer = served.peer("api-0")
    peer.submit("unknown-1")
    refused = decode_from_core(peer.out.recv())
    assert isinstance(refused, Refused)
    assert refused.kind == "stopped"
    for frames in ([b"\xc1"], [b""], [b"\x91\x07"], [b"a", b"b"]):
        peer.out.send_multipart(frames)
    peer.greet()
    peer.submit("known-1")
    step = decode_from_core(peer.inbox.recv())
    assert isinstance(step, Step)
    assert step.ends == {"known-1": "length"}
    peer.close()


def test_each_refused_request_is_answered_however_late_its_api_server_reads(
    served: Served,
) -> None:
    peer = served.peer("api-0")
    peer.out.sndhwm = 0
    names = [f"{number:03000}" for number in range(5000)]  # more than the sockets buffer
    for name in names:
        peer.submit(name)
    peer.greet()  # the core has read all earlier messages
    answers = []
    while len(answers) < len(names) and peer.out.poll(5000):
        answers.append(decode_from_core(peer.out.recv()))
    assert [answer.request_id for answer in answers if isinstance(answer, Refused)] == names
    peer.close()


def test_api_server_that_does_not_listen_delays_no_other(served: Served) -> None:
    dead, peer = served.peer("api-0"), served.peer("api-1")
    dead.out.send(encode(Hello("api-0", server_address(served.folder, "absent"))))
    time.sleep(0.1)
    peer.greet()
    dead.close()
    peer.close()


def test_state_of_exited_api_servers_is_freed(served: Served) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    def come_and_go(name: str) -> None:
        peer = served.peer(name)
        peer.greet()
        served.commands.put(name)
        wait_until(lambda: not served.core._links)
        peer.close()

    come_and_go("api-0")
    before = num_open()
    for number in range(1, 6):
        come_and_go(f"api-{number}")
    wait_until(lambda: num_open() <= before + 1)
