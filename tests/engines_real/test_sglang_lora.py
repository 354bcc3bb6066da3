"""On a real SGLang server with LoRA adapters: whose each request was, in all that is exported."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import aiohttp
import pytest

from tests.engines_real import unpinned
from tests.engines_real.folded import fold
from tests.engines_real.sglang_server import (
    CHECKPOINT,
    TIMEOUT_S,
    Answer,
    Server,
    ask,
    require,
    serving,
)
from tests.engines_real.tiny_lora import check_adapters, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

ADAPTERS = ("sql", "legal", "")
_HOOK = """
from inferscope.adapters.inject import when_imported
when_imported({"sglang.srt.lora.layers": "unpinned:unpin"})
"""


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    require()


async def _asking(server: Server) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        tasks = [
            ask(
                *(session, server, f"{adapter or 'plain'}-{number}", list(range(100, 150))),
                8 + number,
                **({"lora_path": adapter} if adapter else {}),
            )
            for number in range(4)
            for adapter in ADAPTERS
        ]
        return await asyncio.gather(*tasks)


@pytest.mark.conformance("SGLang", "LoRA adapters")
def test_each_request_is_its_adapters(tmp_path: Path) -> None:
    adapters = [
        f"{name}={write_adapter(tmp_path / name, CHECKPOINT, seed=seed)}"
        for seed, name in enumerate(filter(None, ADAPTERS))
    ]
    lora = ("--lora-backend", "torch_native", "--max-lora-rank", "8", "--max-loras-per-batch", "3")
    options = ("--max-total-tokens", "20000", *lora, "--enable-lora", "--lora-paths", *adapters)
    shutil.copy(str(unpinned.__file__), tmp_path)
    (tmp_path / "sitecustomize.py").write_text(_HOOK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(tmp_path / "server", *options, PYTHONPATH=path) as server:
        answers = asyncio.run(_asking(server))
        time.sleep(1)
        folded = fold(server.home)
    asked = {f"ext-{answer.rid}": answer.rid.split("-")[0] for answer in answers}
    check_adapters(folded, {k: v.removeprefix("plain") for k, v in asked.items()})
