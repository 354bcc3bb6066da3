"""Third-party load clients, unmodified, against `inferscope serve`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import inferscope
from inferscope.engine import load_tokenizer
from tests.cli.running import inferscope as inferscope_cli
from tests.engine.server.running import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
GUIDELLM = PEERS / "venvs" / "load" / "bin" / "guidellm"
AIPERF = PEERS / "venvs" / "aiperf" / "bin" / "aiperf"
BUILTIN = Path(inferscope.__file__).parent / "engine" / "builtin"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_what_our_ledgers_sum_to(tmp_path: Path, endpoint: str) -> None:
    if not GUIDELLM.exists():
        pytest.skip(f"no guidellm in {PEERS} (INFERSCOPE_PEERS)")
    with serving(tmp_path, "builtin", "--api-servers", "2") as server:
        measure(server.wait(), tmp_path / "out.json", endpoint)


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("chat", ()),
        ("completions", ()),
        ("chat", ("--request-cancellation-rate", "50", "--request-cancellation-delay", "0.04")),
    ],
)
def test_a_join_with_aiperf_agrees_with_its_own_summary_and_with_the_server(
    tmp_path: Path, endpoint: str, options: tuple[str, ...]
) -> None:
    if not AIPERF.exists():
        pytest.skip(f"no aiperf in {PEERS} (INFERSCOPE_PEERS)")
    recording, out = tmp_path / "run.isr", tmp_path / "out"
    with serving(tmp_path, "builtin", recording=recording) as server:
        run_aiperf(server.wait(), out, endpoint, *options)
        assert server.stop() == 0
    done = inferscope_cli(
        *("join", str(recording), str(out / "profile_export.jsonl"), "--json"), rings=tmp_path
    )
    assert done.returncode == 0, done.stderr
    joined = json.loads(done.stdout)["joined"]
    assert (joined["client"], joined["num_client"], joined["num_matched"]) == ("AIPerf", 26, 24)
    assert joined["no_parts"] == ""
    (warm_up,) = joined["unmatched"]
    assert (warm_up["side"], warm_up["num"]) == ("client", 2)
    whole = [row for row in joined["requests"] if not row["error"]]
    assert bool(options) == (len(whole) < 24)
    for row in whole:
        assert row["finish"] == "length"
        assert row["client_ttft_ns"] == sum(
            row[part] for part in ("server_ttft_ns", "before_ns", "after_ns")
        )
    for row in joined["requests"]:
        if row["error"]:
            assert (row["error"], row["finish"]) == ("RequestCancellationError", "client_cancel")
    summary = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
    for name, theirs in names.items():
        assert joined[name]["num"] == len(whole)
        mean_ms = joined[name]["client_mean_ns"] / 1e6
        assert mean_ms == pytest.approx(summary[theirs]["avg"], rel=1e-3)


@pytest.mark.parametrize("options", [(), ("--speculative", "ngram"), ("--worker",)])
def test_openai_reads_the_log_probabilities_of_transformers(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    import openai  # the other tests do not need these
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer("builtin")
    token_by_bytes = {tokenizer.token_bytes(one): one for one in range(tokenizer.num_tokens)}
    prompt = "for name in names:\n    print(name)\n" * 3
    prompt_ids = tokenizer.encode(prompt)
    body: Any = {"model": "builtin", "max_tokens": 48}
    chats: list[Any] = []
    with serving(tmp_path, "builtin", "--dtype", "float32", *options) as server:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.wait().port}/v1", api_key="none", max_retries=0
        ) as client:
            for sampling in ({"temperature": 0}, {"temperature": 0.6, "seed": 9}):
                found = client.completions.create(**body, **sampling, prompt=prompt, logprobs=5)
                chats += client.chat.completions.create(
                    **{**body, **sampling, "logprobs": True, "top_logprobs": 5, "stream": True},
                    messages=[{"role": "user", "content": prompt}],
                )
                logprobs = found.choices[0].logprobs
                assert logprobs is not None
                assert logprobs.tokens is not None
                output = [token_by_bytes[bytes_of(text)] for text in logprobs.tokens]
                reference = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)
                with torch.inference_mode():
                    logits = reference(torch.tensor([prompt_ids + output])).logits[0]
                rows = logits[len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
                expected = rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
                assert logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
                assert logprobs.top_logprobs is not None
                for row, top in zip(rows, logprobs.top_logprobs, strict=True):
                    likeliest = sorted(top.values(), reverse=True)[:5]
                    assert likeliest == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
        assert server.stop() == 0
    rows_of_chats = [
        row
        for chunk in chats
        if chunk.choices[0].logprobs is not None
        for row in chunk.choices[0].logprobs.content
    ]
    assert {len(row.top_logprobs) for row in rows_of_chats} == {5}
    assert all(bytes(row.bytes) in token_by_bytes for row in rows_of_chats)


def bytes_of(text: str) -> bytes:
    """Return the bytes of a token as a completion writes it."""
    name, _, escaped = text.partition("bytes:")
    return text.encode() if name or not escaped else bytes.fromhex(escaped.replace("\\x", ""))


def run_aiperf(server: Server, out: Path, endpoint: str, *options: str) -> None:
    """Run AIPerf with two warm-up requests and 24 measured ones.

    It reads a tokenizer's folder without a network, but refuses one under HF_HUB_OFFLINE.
    """
    online = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    done = subprocess.run(
        [
            *(str(AIPERF), "profile", "--model", "builtin", "--streaming", "--ui", "none"),
            *("--url", f"http://127.0.0.1:{server.port}", "--endpoint-type", endpoint),
            *("--tokenizer", str(BUILTIN), "--use-server-token-count"),
            *("--concurrency", "4", "--request-count", "24", "--warmup-request-count", "2"),
            *("--synthetic-input-tokens-mean", "96", "--output-tokens-mean", "24"),
            *("--extra-inputs", "ignore_eos:true", "--random-seed", "1"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", str(out)),
            *options,
        ],
        env=online,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


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
