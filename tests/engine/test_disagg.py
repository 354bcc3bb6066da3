"""Tests of the handover of KV between two engines: exact output, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inferscope.engine import (
    BadRequest,
    Engine,
    EngineOptions,
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

    received = receive(handle)
    receiver.submit(PROMPT, Sampling(max_tokens=8), received=received)
    (output,) = receiver.step()
    blocks = output.request.blocks
    there = receiver._runner.read_kv(blocks, handle.num_tokens)  # type: ignore[attr-defined]
    assert bytes(there) == bytes(received.content)
    assert any(received.content)


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
    received = receive(handle)
    kv = torch.frombuffer(received.content, dtype=torch.float32)
    layers = receiver.model.config.num_layers
    kv.view(layers, 2, handle.num_tokens, -1)[:, :, :32] = float("nan")
    request_id = receiver.submit(PROMPT, Sampling(max_tokens=8), received=received)
    tokens = []
    while receiver.has_work:
        for output in receiver.step():
            assert output.request.request_id == request_id
            tokens += output.tokens
    assert tokens == expected
    assert receiver.pool.num_used == 0


def test_received_kv_holds_no_block_before_admission(
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


# --- shared memory --------------------------------------------------------------------------------


def test_memory_is_freed_once_read_and_can_be_read_once() -> None:
    outbox = disagg.Outbox(lambda blocks, num_tokens: memoryview(b"kv" * num_tokens))
    handle = shared(outbox, 50)
    assert len(descriptors(os.getpid())) == 1
    assert receive(handle).content == b"kv" * 50
    with pytest.raises(TransferFailed, match="0 of 100 bytes"):
        receive(handle)
    outbox.sweep()
    assert descriptors(os.getpid()) == []
    with pytest.raises(TransferFailed, match="No such file"):
        receive(handle)


def test_memory_that_nothing_reads_is_freed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = disagg.Outbox(lambda blocks, num_tokens: memoryview(b"kv" * num_tokens))
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


def test_a_reused_descriptor_is_not_read() -> None:
    outbox = disagg.Outbox(lambda blocks, num_tokens: memoryview(b"kv" * num_tokens))
    first = shared(outbox, 4)
    discard(first)
    outbox.sweep()
    second = shared(outbox, 4)
    assert second.descriptor == first.descriptor
    with pytest.raises(TransferFailed, match="no longer shared"):
        receive(first)
    assert receive(second).content == b"kv" * 4
    outbox.close()


def test_memory_of_a_killed_engine_is_gone() -> None:
    script = (
        "import msgspec, time; from inferscope.engine.disagg import Outbox;"
        "outbox = Outbox(lambda blocks, num: memoryview(b'kv' * num));"
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


def shared(outbox: disagg.Outbox, num_tokens: int) -> KvHandle:
    """Share content of two bytes per token."""
    handle = outbox.share("request", [], num_tokens)
    assert handle is not None
    return handle
