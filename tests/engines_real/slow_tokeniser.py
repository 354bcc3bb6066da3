"""Makes SGLang's tokeniser slow while a file is there; imported once SGLang's own module is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

DELAY_S = 0.2


def slow_down(module: ModuleType) -> None:
    """Delay texts in front of the real tokeniser."""
    manager: Any = vars(module)["TokenizerManager"]
    original = manager._tokenize_texts
    switch = Path(os.environ["SLOW_TOKENISER"])

    async def _tokenize_texts(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.exists():
            time.sleep(DELAY_S)  # as a tokeniser does: it keeps the event loop
        return await original(self, *args, **kwargs)

    manager._tokenize_texts = _tokenize_texts
