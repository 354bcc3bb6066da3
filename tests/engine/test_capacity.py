from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine import EngineOptions, Sampling, capacity, load_engine
from inferscope.engine.capacity import check_length, describe_pool, max_model_tokens, pool_blocks
from inferscope.engine.load import load_model
from inferscope.errors import BadInput

MODEL = load_model("random:tiny", EngineOptions(dtype="float32"))
LONGEST = MODEL.config.max_positions
TOKEN_BYTES = MODEL.config.kv_token_bytes(4)
"""KV bytes of a sequence: 2048 positions of 512 bytes."""


@pytest.fixture(autouse=True)
def _memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(tmp_path_factory.mktemp("memory"), monkeypatch, kb=8 << 20)


def give_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, kb: int, limit: str = "max"
) -> None:
    """Set the host's available memory and the container's limit."""
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {kb} kB\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(capacity, "_MEMORY", folder / "meminfo")
    monkeypatch.setattr(capacity, "_CONTAINER_LIMIT", folder / "memory.max")


@given(
    max_running=st.integers(1, 64),
    block_tokens=st.integers(1, 1024),
    max_model_tokens_=st.none() | st.integers(1, 3000),
)
def test_default_pool_holds_every_running_sequence_at_its_longest(
    max_running: int, block_tokens: int, max_model_tokens_: int | None
) -> None:
    options = EngineOptions(
        max_running=max_running, block_tokens=block_tokens, max_model_tokens=max_model_tokens_
    )
    num_blocks = pool_blocks(MODEL, options)
    longest = min(max_model_tokens_ or LONGEST, LONGEST)
    assert max_model_tokens(MODEL, options, num_blocks) == longest
    per_sequence, spare = divmod(num_blocks, max_running)
    assert spare == 0
    assert (per_sequence - 1) * block_tokens < longest <= per_sequence * block_tokens


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(tmp_path, monkeypatch, kb=20_000)
    alone = pool_blocks(MODEL, EngineOptions())
    assert pool_blocks(MODEL, EngineOptions(pipeline_parallel=2)) == alone // 2


@pytest.mark.parametrize(("kb", "limit"), [(20_000, "max"), (8 << 20, str(20_000 << 10))])
def test_default_pool_takes_a_quarter_of_the_memory_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kb: int, limit: str
) -> None:
    give_memory(tmp_path, monkeypatch, kb=kb, limit=limit)
    options = EngineOptions()
    num_blocks = pool_blocks(MODEL, options)
    assert num_blocks == 10_000 // 16
    assert describe_pool(MODEL, options, num_blocks) == (
        "KV pool: 625 blocks of 16 tokens, 5.1 MB when all are in use; prompt and output may have "
        "2048 tokens"
    )
    assert "may have 1600 of the model's 2048 tokens" in describe_pool(MODEL, options, 100)


def refused(**given: Any) -> str:
    options = EngineOptions(**given)
    with pytest.raises(BadInput) as caught:
        check_length(MODEL, options, pool_blocks(MODEL, options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_pool_too_small_for_one_sequence_is_refused_with_the_arithmetic() -> None:
    assert refused(num_blocks=1) == (
        "the KV pool has 1 blocks of 16 tokens, which hold 16. One sequence of 2048 tokens needs "
        "128 KV blocks of 8192 bytes, 1.0 MB; 8.59 GB are available. Give at least 128 "
        "--num-blocks, or a --max-model-len of at most 16."
    )
    assert "needs 13 KV blocks" in refused(num_blocks=12, max_model_tokens=200)
    check_length(MODEL, EngineOptions(num_blocks=13, max_model_tokens=200), 13)
    check_length(MODEL, EngineOptions(num_blocks=128), 128)


def test_length_beyond_the_models_is_refused_with_the_arithmetic() -> None:
    assert refused(max_model_tokens=999_999) == (
        "max_model_tokens is 999999, and the model has 2048 positions. One sequence of 999999 "
        "tokens needs 62500 KV blocks of 8192 bytes, 512.0 MB; 8.59 GB are available. Give a "
        "--max-model-len of at most 2048."
    )


def test_length_beyond_the_memory_is_rejected_only_if_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_memory(tmp_path, monkeypatch, kb=2_000)
    assert "has 62 blocks of 16 tokens, which hold 992" in refused(max_model_tokens=2000)
    check_length(MODEL, EngineOptions(), 62)
    assert max_model_tokens(MODEL, EngineOptions(), 62) == 992


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_blocks": 10**6},
            "1000000 KV blocks of 8192 bytes take 8.19 GB, and the KV pool may have 2.0 MB.",
        ),
        (
            {"block_tokens": 1024},
            "1 KV blocks of 524288 bytes take 0.5 MB, and the KV pool may have 0.5 MB.",
        ),
    ],
)
def test_pool_beyond_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], message: str
) -> None:
    give_memory(tmp_path, monkeypatch, kb=2_000)
    with pytest.raises(BadInput, match=re.escape(message)):
        load_engine("random:tiny", EngineOptions(dtype="float32", **given))  # type: ignore[arg-type]


def test_unused_blocks_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) << 12

    before_bytes = resident_bytes()
    engine = load_engine("random:tiny", EngineOptions(dtype="float32", num_blocks=1 << 17))
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    assert resident_bytes() - before_bytes < 200 << 20 < (1 << 17) * 16 * TOKEN_BYTES
