from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferscope.engine import Engine, EngineOptions, load_engine
from tests.engine.checkpoints import MODELS, Checkpoint, save


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=sorted(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def tiny_engine() -> Callable[..., Engine]:
    def build(**options: Any) -> Engine:
        return load_engine("random:tiny", EngineOptions(**{"dtype": "float32", **options}))

    return build
