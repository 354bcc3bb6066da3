"""On two real vLLM servers: one computes prompts, NIXL brings their KV blocks to the other.

NIXL comes in addition to vLLM's environment: `pip install nixl` there.
"""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.engines_real.folded import fold
from tests.engines_real.vllm_laws import metric, of_kind
from tests.engines_real.vllm_server import VLLM, Server, export, needs_vllm, serving, stop

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]

NUM_ASKS = 6
OUTPUT_TOKENS = 6
SOCKETS = "tcp,self,sysv,posix,cma"
"""What UCX may use on a machine without other networks."""


@pytest.fixture(autouse=True, scope="module")
def _nixl() -> None:
    done = subprocess.run([VLLM.parent / "python", "-c", "import nixl"], capture_output=True)
    if done.returncode:
        pytest.skip(f"no NIXL in {VLLM.parents[1]}: {VLLM.parent}/python -m pip install nixl")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _worker(role: str) -> tuple[str, str]:
    """Return the options of a server that only computes prompts, or only answers."""
    settings = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return "--kv-transfer-config", json.dumps(settings)


def _ask(server: Server, name: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def _route(prefill: Server, decode: Server, name: str, prompt: list[int]) -> dict[str, Any]:
    """Prefill on one server and decode on the other, as a router does."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    first = _ask(prefill, name, prompt=prompt, max_tokens=1, kv_transfer_params=wanted)
    where = first["kv_transfer_params"]
    return _ask(decode, name, prompt=prompt, max_tokens=OUTPUT_TOKENS, kv_transfer_params=where)


@pytest.mark.conformance("vLLM", "KV transfers between workers")
def test_wait_for_transferred_blocks_is_recorded(tmp_path: Path) -> None:
    port = _free_port()
    nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": SOCKETS}
    prefill_port = {**nixl, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    decode_port = {**nixl, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}
    prompts = {f"moved-{i}": list(range(20 + i, 220 + 60 * i)) for i in range(NUM_ASKS)}
    with (
        serving(tmp_path / "prefill", *_worker("kv_producer"), **prefill_port) as prefill,
        serving(tmp_path / "decode", *_worker("kv_consumer"), **decode_port) as decode,
    ):
        usages = {
            name: _route(prefill, decode, name, prompt)["usage"] for name, prompt in prompts.items()
        }
        _ask(decode, "stayed", prompt=list(range(3000, 3100)), max_tokens=4)
        moved_bytes = metric(decode, "vllm:nixl_bytes_transferred_sum")
        assert stop(decode) == 0
        assert stop(prefill) == 0
    folded = fold(decode.home)
    requests = {each.external_id: each for each in folded.requests}
    assert requests.pop("stayed").transfers == ()
    assert requests.keys() == prompts.keys()
    for name, request in requests.items():
        assert len(request.transfers) == 1, f"{name}: {request}\n{decode.log()[-3000:]}"
        (transfer,) = request.transfers
        assert transfer.peer == f"127.0.0.1:{port}"
        assert request.queued_ns is not None
        assert request.admitted_ns is not None
        assert request.queued_ns <= transfer.start_ns < transfer.end_ns <= request.admitted_ns
        waited_ns = transfer.end_ns - transfer.start_ns
        assert request.ledger_ns["kv_transfer"] == waited_ns
        assert sum(request.ledger_ns.values()) == request.delivered_ns - request.arrived_ns
        assert request.output_tokens == usages[name]["completion_tokens"] == OUTPUT_TOKENS
    sizes = {name: request.transfers[0].num_bytes for name, request in requests.items()}
    assert sum(sizes.values()) == moved_bytes > 0
    print(f"\nmoved {sizes}, {moved_bytes:.0f} bytes by vLLM's own account")  # noqa: T201
    lines = {line["external_id"]: line for line in of_kind(export(decode), "request")}
    for name, size_bytes in sizes.items():
        (line,) = lines[name]["transfers"]
        assert line["bytes"] == size_bytes
    assert not any(each.transfers for each in fold(prefill.home).requests)
