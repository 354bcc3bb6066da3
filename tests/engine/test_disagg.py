"""Tests of the handover of KV between two engines: exact output, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
import torch

from inferscope.engine import (
    BadRequest,
    Engine,
    EngineOptions,
    Output,
    Request,
    Sampling,
    disagg,
    load_engine,
)
from inferscope.engine.disagg import KvHandle, TransferFailed, discard, receive
from tests.children import child
from tests.engine.checkpoints import Checkpoint
from tests.engine.test_correctness import (
    NUM_OUTPUT,
    PROMPTS,
    WAYS,
    assert_greedy,
    expected_outputs,
)

PROMPT = list(range(40))


def prefilled(engine: Engine, prompts: list[list[int]]) -> list[KvHandle]:
    """Prefill prompts together; return the handles of their KV."""
    assert engine.outbox is not None
    engine.outbox.capacity_bytes = 1 << 30  # none is read before the last is shared
    ids = [engine.submit(prompt, Sampling(max_tokens=1)) for prompt in prompts]
    found: dict[str, KvHandle] = {}
    while engine.has_work:
        for output in engine.step():
            assert (output.kv is None) == (output.finish is None)
            if output.kv is not None:
                found[output.request.request_id] = output.kv
    return [found[request_id] for request_id in ids]


def descriptors(pid: int) -> list[str]:
    """Return the shared memory files that a process holds open."""
    listed = Path(f"/proc/{pid}/fd")
    names = subprocess.run(["ls", "-l", listed], capture_output=True, text=True, check=False).stdout
    return re.findall("memfd:inferscope-kv-[0-9a-f]+", names)


@pytest.fixture
def load() -> Iterator[Callable[..., Engine]]:
    """Load engines of a role; close them after the test, which leaves no shared memory."""
    with ExitStack() as stack:

        def build(role: str, *, model: str = "random:tiny", **options: Any) -> Engine:
            given: dict[str, Any] = {"dtype": "float32", "role": role, **options}
            engine = load_engine(model, EngineOptions(**given))
            stack.callback(engine.close)
            return engine

        yield build
    assert descriptors(os.getpid()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("speculative", [None, pytest.param("ngram", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", WAYS)
def test_two_engines_equal_transformers(
    checkpoint: Checkpoint, way: str, speculative: str | None, load: Callable[..., Engine]
) -> None:
    # Without the prompts' chunks in its steps, the decode engine needs fewer blocks at a time.
    fewer = {"num_blocks": 40} if way == "all together" else {}
    prefill = load("prefill", model=str(checkpoint.folder), **WAYS[way])
    options = {**WAYS[way], **fewer, "speculative": speculative}
    decode = load("decode", model=str(checkpoint.folder), **options)
    ids = [
        decode.submit(prompt, Sampling(max_tokens=num_output), received=receive(handle))
        for prompt, num_output, handle in zip(
            PROMPTS, NUM_OUTPUT, prefilled(prefill, PROMPTS), strict=True
        )
    ]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    requests: dict[str, Request] = {}
    while decode.has_work:
        for output in decode.step():
            tokens[output.request.request_id] += output.tokens
            requests[output.request.request_id] = output.request

    expected = expected_outputs(checkpoint.reference)
    for request_id, prompt, wanted in zip(ids, PROMPTS, expected, strict=True):
        assert len(tokens[request_id]) == len(wanted)
        if tokens[request_id] != wanted:
            assert_greedy(checkpoint.reference, prompt, tokens[request_id])
        request = requests[request_id]
        assert request.received is None
        if not request.recomputed_tokens:
            assert request.cached_tokens == request.num_prompt - 1
    was_preempted = any(request.recomputed_tokens for request in requests.values())
    if speculative is None:  # else fewer steps hold fewer requests at a time
        assert was_preempted == ("preemption" in way or "all" in way)
    for engine in (prefill, decode):
        assert engine.pool.num_used == 0
        assert not any(engine.pool.references(block) for block in range(engine.pool.num_blocks))
    assert prefill.outbox is not None
    assert len(descriptors(os.getpid())) == len(PROMPTS)
    prefill.outbox.sweep()
    assert descriptors(os.getpid()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_that_arrives_is_the_kv_that_was_computed(
    dtype: str, load: Callable[..., Engine]
) -> None:
    sender, receiver = load("prefill", dtype=dtype), load("decode", dtype=dtype)
    (handle,) = prefilled(sender, [PROMPT])
    assert handle.num_tokens == len(PROMPT) - 1
    element_bytes = sender.model.dtype.itemsize
    token_bytes = sender.model.config.kv_token_bytes(element_bytes)
    assert handle.num_bytes == handle.num_tokens * token_bytes

    content = Path(f"/proc/{handle.pid}/fd/{handle.descriptor}").read_bytes()
    receiver.submit(PROMPT, Sampling(max_tokens=8), received=receive(handle))
    (output,) = receiver.step()
    blocks = output.request.blocks
    there = receiver._runner.read_kv(blocks, handle.num_tokens)  # type: ignore[attr-defined]
    assert bytes(there) == content
    assert any(content)


def test_prompt_without_kv_to_hand_over_is_refused(load: Callable[..., Engine]) -> None:
    engine = load("prefill")
    with pytest.raises(BadRequest, match="has 1 token"):
        engine.submit([5], Sampling(max_tokens=1))
    assert len(prefilled(engine, [[5, 6]])) == 1  # the engine continues
    assert engine.outbox is not None
    engine.outbox.close()


def test_blocks_that_the_decode_engine_has_cached_are_not_written(
    load: Callable[..., Engine],
) -> None:
    sender, receiver = load("prefill"), load("decode")
    (expected,) = receiver.generate([PROMPT], Sampling(max_tokens=8))  # 2 of 3 blocks are cached
    (handle,) = prefilled(sender, [PROMPT])
    with open(f"/proc/{handle.pid}/fd/{handle.descriptor}", "r+b") as file:
        kv = torch.frombuffer(bytearray(file.read()), dtype=torch.float32)
        layers = receiver.model.config.num_layers
        kv.view(layers, 2, handle.num_tokens, -1)[:, :, :32] = float("nan")
        file.seek(0)
        file.write(kv.numpy().tobytes())
    request_id = receiver.submit(PROMPT, Sampling(max_tokens=8), received=receive(handle))
    tokens = []
    while receiver.has_work:
        for output in receiver.step():
            assert output.request.request_id == request_id
            tokens += output.tokens
    assert tokens == expected
    assert receiver.pool.num_used == 0


def test_received_kv_holds_neither_block_nor_memory_before_admission(
    load: Callable[..., Engine],
) -> None:
    sender, receiver = load("prefill"), load("decode", num_blocks=4)
    expected = sender.generate([PROMPT], Sampling(max_tokens=8))
    handles = prefilled(sender, [PROMPT, PROMPT])
    first, second = (
        receiver.submit(PROMPT, Sampling(max_tokens=8), received=receive(handle))
        for handle in handles
    )
    receiver.step()
    assert [request.request_id for request in receiver.scheduler.waiting] == [second]
    assert not next(iter(receiver.scheduler.waiting)).blocks
    assert [Path(f"/proc/self/fd/{each.descriptor}").stat().st_size for each in handles] == [
        0,
        handles[1].num_bytes,  # still where the prefill engine counts it
    ]
    tokens: dict[str, list[int]] = {first: [], second: []}
    while receiver.has_work:
        for output in receiver.step():
            tokens[output.request.request_id] += output.tokens
    assert tokens[second] == expected[0]
    assert receiver.pool.num_used == 0


def test_a_cancelled_request_leaves_no_blocks(
    load: Callable[..., Engine],
) -> None:
    sender, receiver = load("prefill"), load("decode")
    handles = prefilled(sender, [PROMPT, PROMPT])
    queued, running = (receiver.submit(PROMPT, received=receive(handle)) for handle in handles)
    receiver.cancel(queued)
    receiver.step()
    receiver.cancel(running)
    while receiver.has_work:
        receiver.step()
    assert receiver.pool.num_used == 0
    assert sender.outbox is not None
    sender.outbox.sweep()
    assert descriptors(os.getpid()) == []


@pytest.mark.parametrize("capacity_prompts", [0, 1, 3])
def test_prompts_wait_while_shared_memory_is_full(
    load: Callable[..., Engine], capacity_prompts: int
) -> None:
    sender = load("prefill", prefix_cache=False)
    outbox, token_bytes = sender.outbox, sender.model.kv_token_bytes
    assert outbox is not None
    assert outbox.capacity_bytes == sender.pool.num_blocks * 16 * token_bytes
    outbox.capacity_bytes = capacity_prompts * len(PROMPT) * token_bytes
    ids = [sender.submit(PROMPT[idx:], Sampling(max_tokens=1)) for idx in range(8)]
    unread: list[KvHandle] = []
    finished, most = [], 0
    while sender.has_work:
        outputs = sender.step()
        finished += [output.request.request_id for output in outputs]
        unread += [output.kv for output in outputs if output.kv is not None]
        most = max(most, len(unread))
        assert outbox.num_bytes <= max(outbox.capacity_bytes, len(PROMPT) * token_bytes)
        if not outputs:  # the decode engine is slower
            receive(unread.pop(0)).read()
    assert finished == ids
    assert most == max(1, capacity_prompts)
    outbox.close()


def test_a_waiting_loop_continues_once_shared_memory_is_read(load: Callable[..., Engine]) -> None:
    sender = load("prefill")
    assert sender.outbox is not None
    sender.outbox.capacity_bytes = 0
    found: SimpleQueue[Output] = SimpleQueue()
    sender.start(lambda outputs: [found.put(output) for output in outputs] and None)
    first, second, third = (sender.submit(PROMPT, Sampling(max_tokens=1)) for _ in range(3))
    output = found.get(timeout=60)
    assert output.request.request_id == first
    before_s = time.process_time()
    with pytest.raises(Empty):
        found.get(timeout=0.5)
    assert time.process_time() - before_s < 0.25  # it sleeps
    sender.cancel(second)
    assert found.get(timeout=60).finish == "client_cancel"
    assert output.kv is not None
    receive(output.kv).discard()
    output = found.get(timeout=60)
    assert (output.request.request_id, output.finish) == (third, "length")
    assert output.kv is not None
    discard(output.kv)
    deadline_s = time.monotonic() + 60
    while descriptors(os.getpid()):  # without a step
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# --- shared memory --------------------------------------------------------------------------------


def test_memory_is_freed_once_read_and_can_be_read_once() -> None:
    outbox = new_outbox()
    handle = shared(outbox, 50)
    assert len(descriptors(os.getpid())) == 1
    assert receive(handle).read() == b"kv" * 50
    with pytest.raises(TransferFailed, match="0 of 100 bytes"):
        receive(handle)
    outbox.sweep()
    assert descriptors(os.getpid()) == []
    with pytest.raises(TransferFailed, match="No such file"):
        receive(handle)


def test_memory_that_nothing_reads_is_freed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = new_outbox()
    handle = shared(outbox, 8)
    outbox.sweep()
    assert len(descriptors(os.getpid())) == 1
    monkeypatch.setattr(disagg, "UNREAD_S", 0.0)
    overdue = shared(outbox, 8)
    outbox.sweep()
    assert len(descriptors(os.getpid())) == 1
    with pytest.raises(TransferFailed, match="Send the request again"):
        receive(overdue)
    discard(handle)
    discard(overdue)
    outbox.sweep()
    assert descriptors(os.getpid()) == []


def test_memory_is_kept_past_its_time_for_a_reader_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disagg, "UNREAD_S", 0.0)
    outbox = new_outbox()
    handle = shared(outbox, 8)
    received = receive(handle)
    with pytest.raises(TransferFailed, match="Send the request again"):
        receive(handle)  # it has one reader
    outbox.sweep()
    assert outbox.num_bytes == 16
    assert received.read() == b"kv" * 8
    outbox.sweep()
    assert outbox.num_bytes == 0


def test_memory_is_freed_after_its_time_if_its_reader_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "import msgspec, sys, time; from inferscope.engine.disagg import KvHandle, receive;"
        "held = receive(msgspec.json.decode(sys.argv[1], type=KvHandle));"
        "print('has it', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(disagg, "UNREAD_S", 0.0)
    outbox = new_outbox()
    words = [sys.executable, "-c", script, msgspec.json.encode(shared(outbox, 8)).decode()]
    with child(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"has it\n"
        outbox.sweep()
        assert outbox.num_bytes == 16
        process.send_signal(signal.SIGKILL)
        process.wait()
    outbox.sweep()
    assert outbox.num_bytes == 0
    assert descriptors(os.getpid()) == []


def test_a_reader_has_its_memory_after_the_sender_has_closed() -> None:
    outbox = new_outbox()
    received = receive(shared(outbox, 8))
    outbox.close()
    assert received.read() == b"kv" * 8


def test_number_of_files_is_limited() -> None:
    outbox = new_outbox()
    while outbox.has_room([2]):
        shared(outbox, 1)
    assert len(descriptors(os.getpid())) == 256
    outbox.close()


def test_a_reused_descriptor_is_not_read() -> None:
    outbox = new_outbox()
    first = shared(outbox, 4)
    discard(first)
    outbox.sweep()
    second = shared(outbox, 4)
    assert second.descriptor == first.descriptor
    with pytest.raises(TransferFailed, match="no longer shared"):
        receive(first)
    assert receive(second).read() == b"kv" * 4
    outbox.close()


def test_memory_of_a_killed_engine_is_gone() -> None:
    script = (
        "import msgspec, time; from inferscope.engine.disagg import Outbox;"
        "outbox = Outbox(lambda blocks, num: memoryview(b'kv' * num), token_bytes=2, "
        "capacity_bytes=1000);"
        "print(msgspec.json.encode(outbox.share('r', [], 4)).decode(), flush=True); time.sleep(60)"
    )
    with child([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        handle = msgspec.json.decode(process.stdout.readline(), type=KvHandle)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(TransferFailed, match=f"process {process.pid}: No such file"):
        receive(handle)


def test_a_prompt_that_cannot_be_shared_fails_alone(
    load: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = load("prefill")
    create, names = os.memfd_create, iter(["no memory"])

    def fail_once(name: str) -> int:
        if next(names, None):
            raise OSError(12, "Cannot allocate memory")
        return create(name)

    monkeypatch.setattr(os, "memfd_create", fail_once)
    failed = engine.submit(PROMPT, Sampling(max_tokens=1))
    served = engine.submit(PROMPT[:20], Sampling(max_tokens=1))
    outputs = {}
    while engine.has_work:
        outputs.update({output.request.request_id: output for output in engine.step()})
    assert (outputs[failed].finish, outputs[failed].kv) == ("error", None)
    assert outputs[served].finish == "length"
    (line,) = caplog.messages
    assert failed in line
    assert "Cannot allocate memory" in line
    assert engine.pool.num_used == 0


def new_outbox() -> disagg.Outbox:
    """Return an outbox of content of two bytes per token."""
    return disagg.Outbox(
        lambda blocks, num_tokens: memoryview(b"kv" * num_tokens),
        token_bytes=2,
        capacity_bytes=10_000,
    )


def shared(outbox: disagg.Outbox, num_tokens: int) -> KvHandle:
    """Share the content of a number of tokens."""
    handle = outbox.share("request", [], num_tokens)
    assert handle is not None
    return handle
