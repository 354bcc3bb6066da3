"""The device of the tests of Triton kernels, which are skipped on import where there is none.

Kernels are compiled where there is a GPU; else they run in Triton's interpreter, in an environment
with triton, by `TRITON_INTERPRET=1 python -m pytest FILE`.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

MARKS = [] if IS_INTERPRETED else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda:0")
