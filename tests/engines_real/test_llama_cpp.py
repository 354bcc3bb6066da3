"""The adapter on the real llama-cpp-python: its own `usage` against ours, answers unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscope.records import StepSlices
from tests.adapters.exported import Exported
from tests.probe.fakes import of

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
PYTHON = PEERS / "venvs" / "lcpp" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = "Once upon a time " * 12
CHAT = [{"role": "user", "content": "hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("create_completion", {"prompt": LONG, "max_tokens": 12}),
    ("create_completion", {"prompt": LONG + "there", "max_tokens": 9}),  # most of it is cached
    ("create_completion", {"prompt": "tales", "max_tokens": 20, "stream": True}),
    ("create_completion", {"prompt": "tales", "max_tokens": 20}),
    ("create_completion", {"prompt": "one", "max_tokens": 1}),
    (
        "create_completion",
        {"prompt": "one", "max_tokens": 1},
    ),  # all of it is cached: no work at all
    ("create_completion", {"prompt": "two", "max_tokens": 9, "logit_bias": {"2": 100.0}}),
    ("create_chat_completion", {"messages": CHAT, "max_tokens": 7, "stream": True}),
    ("create_chat_completion", {"messages": CHAT, "max_tokens": 7}),
]
"""A stream, which has no `usage`, comes before the same call without."""
END_OF_SEQUENCE = 6
"""The call that llama.cpp ends by a token which it leaves out of `usage`."""
ALL_CACHED = 5

PROGRAM = """
import json
import sys

import inferscope
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

def answers():
    drafting = {}
    if sys.argv[4] == "drafts":
        # Without `logits_all` the package keeps too few rows of logits for a draft beyond n_batch.
        drafting = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=4), "logits_all": True}
    llm = llama_cpp.Llama(
        sys.argv[1], n_ctx=512, n_batch=64, n_threads=1, verbose=False, seed=1, **drafting
    )
    return llm, lambda: [ask(llm, *call) for call in json.loads(sys.argv[2])]

def ask(llm, method, arguments):
    answer = getattr(llm, method)(temperature=0.0, **arguments)
    if not arguments.get("stream"):
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return text, choice["finish_reason"], answer["usage"]
    text, finish = "", None
    for event in answer:
        choice = event["choices"][0]
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
    return text, finish, None

if sys.argv[3] == "observe":
    _, plain = answers()
    expected = plain()
    llm, observed = answers()
    before = dict(vars(llama_cpp.Llama))  # the first Llama has left its own mark there
    with inferscope.observe(llm):
        observed_answers = observed()
    assert dict(vars(llama_cpp.Llama)) == before, "something of ours is left"
    assert observed() == expected
else:
    _, observed = answers()
    expected = observed_answers = observed()
print(json.dumps({"expected": expected, "observed": observed_answers}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip(f"no llama-cpp-python under {PEERS}: set INFERSCOPE_PEERS")
    imports = [PYTHON, "-c", "import gguf, inferscope, llama_cpp"]
    done = subprocess.run(imports, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PYTHON} lacks a package: {done.stderr.splitlines()[-1]}")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([PYTHON, Path(__file__).with_name("tiny_gguf.py"), path], check=True)
    return path


def _program(
    folder: Path, *arguments: str, by: tuple[str, ...] = ()
) -> tuple[Path, dict[str, Any]]:
    """Run the program, by a command of ours or by itself; return its rings and what it printed."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    rings = folder / "rings"
    done = subprocess.run(
        [*by, str(PYTHON), str(program), *arguments],
        env={**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_RING_MB": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "probe failed" not in done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["observed"] == answers["expected"]
    return next(rings.iterdir()), answers


RUN = (sys.executable, "-m", "inferscope", "run", "--")


@pytest.mark.conformance("llama-cpp-python", "tokens of slices = the API's `usage`")
@pytest.mark.conformance("llama-cpp-python", "every step joined and conserved, every ledger closed")
@pytest.mark.conformance("llama-cpp-python", "prefix cache")
@pytest.mark.conformance("llama-cpp-python", "offline, without a server")
@pytest.mark.conformance("llama-cpp-python", "the same answers with and without the probe")
@pytest.mark.parametrize(("how", "by"), [("observe", ()), ("run", RUN)], ids=["observe", "run"])
def test_every_token_of_a_real_llama_is_recorded_and_answers_stay(
    how: str, by: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    rings, answers = _program(tmp_path, str(model), json.dumps(CALLS), how, "plain", by=by)
    exported = Exported(rings)
    exported.check_sums()
    rows = sorted(exported.requests.values(), key=lambda row: int(row["arrived_ns"]))
    assert len(rows) == len(CALLS)
    usages = [usage for _, _, usage in answers["observed"]]
    for number, (row, (_, finish, usage)) in enumerate(zip(rows, answers["observed"], strict=True)):
        usage = usage or usages[number + 1]
        assert exported.surplus(row["request"]) == 0, number
        assert row["finish"] == finish
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        is_beyond = number == END_OF_SEQUENCE
        assert row["output_tokens"] == usage["completion_tokens"] + is_beyond
    assert rows[1]["cached_tokens"] > len(LONG)
    assert rows[ALL_CACHED]["cached_tokens"] == rows[ALL_CACHED]["prompt_tokens"]
    assert exported.tokens[rows[ALL_CACHED]["request"]] == {}


@pytest.mark.conformance("llama-cpp-python", "speculative decoding (n-gram)")
def test_drafts_are_verified_and_those_accepted_need_no_step(model: Path, tmp_path: Path) -> None:
    prompts = ["abc" * 20, "to be or not to be " * 6]
    calls = [("create_completion", {"prompt": prompt, "max_tokens": 60}) for prompt in prompts]
    rings, answers = _program(tmp_path, str(model), json.dumps(calls), "observe", "drafts")
    exported = Exported(rings)
    exported.check_sums()
    (ring,) = rings.glob("*.ring")
    judged = [each for each in of(StepSlices, ring) if each.proposed]
    accepted = sum(sum(each.accepted[::2]) for each in judged)
    rows = sorted(exported.requests.values(), key=lambda row: int(row["arrived_ns"]))
    for row, (_, finish, usage) in zip(rows, answers["observed"], strict=True):
        assert (row["finish"], row["output_tokens"]) == (finish, usage["completion_tokens"])
    assert sum(exported.surplus(name) for name in exported.requests) == -accepted
    assert sum(tokens["verify"] for tokens in exported.tokens.values()) > accepted > 0
