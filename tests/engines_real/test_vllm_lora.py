"""On a real vLLM server with LoRA adapters: whose each request was, in all that is exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.folded import fold
from tests.engines_real.tiny_lora import check_adapters, write_adapter
from tests.engines_real.vllm_laws import hold_to_the_laws
from tests.engines_real.vllm_server import CHECKPOINT, export, needs_vllm, serving, stop

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]

MODELS = {"sql": "sql", "legal": "legal", "tiny": ""}
"""Adapter by the requested model name."""


@pytest.mark.conformance("vLLM", "LoRA adapters")
def test_each_request_is_its_adapters(tmp_path: Path) -> None:
    adapters = [
        f"{name}={write_adapter(tmp_path / name, CHECKPOINT, seed=seed)}"
        for seed, name in enumerate(filter(None, MODELS.values()))
    ]
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules")
    asks = [
        Ask(
            f"{model}-{number}",
            {
                "model": model,
                "prompt": list(range(10, 60)),
                "max_tokens": 8 + number,
                "ignore_eos": True,
                "temperature": 0,
            },
        )
        for number in range(4)
        for model in MODELS
    ]
    with serving(tmp_path, *lora, *adapters) as server:
        ask_all(server.url, asks, at_once=6)
        assert stop(server) == 0
    hold_to_the_laws(export(server), asks)
    asked = {ask.name: MODELS[ask.body["model"]] for ask in asks}
    check_adapters(fold(server.home), asked)
