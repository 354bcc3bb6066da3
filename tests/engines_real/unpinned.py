"""Lets SGLang's LoRA run where no accelerator is: it pins its host's memory without asking.

Copied to where a server finds it, and called in the process that imports the adapters' layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def unpin(module: ModuleType) -> None:
    """Make torch allocate unpinned tensors."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*args, **options)

        return made

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
