"""Third-party load clients, unmodified, against `inferscope serve`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import inferscope
from tests.engine.server.running import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
GUIDELLM = PEERS / "venvs" / "load" / "bin" / "guidellm"
BUILTIN = Path(inferscope.__file__).parent / "engine" / "builtin"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_what_our_ledgers_sum_to(tmp_path: Path, endpoint: str) -> None:
    if not GUIDELLM.exists():
        pytest.skip(f"no guidellm in {PEERS} (INFERSCOPE_PEERS)")
    with serving(tmp_path, "builtin", "--api-servers", "2") as server:
        measure(server.wait(), tmp_path / "out.json", endpoint)


def measure(server: Server, out: Path, endpoint: str) -> None:
    done = subprocess.run(
        [
            *(str(GUIDELLM), "run", "--disable-progress"),
            "--backend",
            f"kind=openai_http,target=http://127.0.0.1:{server.port},model=builtin,"
            f"request_format={endpoint}",
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", "kind=max_requests,count=24"),
            *("--tokenizer", f"kind=huggingface_auto,model={BUILTIN}"),
            *("--data", "kind=synthetic_text,prompt_tokens=96,output_tokens=24"),
            *("--output", f"kind=json,path={out}"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]["successful"]
    assert len(requests) == 24
    assert not benchmark["requests"]["errored"]
    finals = server.finals(until=24)
    asked = sorted(request["prompt_tokens"] for request in requests)
    answered = sorted(request["output_tokens"] for request in requests)
    assert sorted(final.prompt_tokens or 0 for final in finals.values()) == asked
    assert sorted(final.output_tokens for final in finals.values()) == answered
    for final in finals.values():
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert server.stop() == 0
