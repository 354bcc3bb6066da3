"""One step of a phase, marked for Nsight Compute, and what the model says of it; run by part (c).

python one_step.py MODEL decode|prefill FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from load import Decoding, Phase, blocks_for, open_engine, prefill
from part import Setting

from inferscope.engine.shapes import PREFIX, parse_shape

FEW_LAYERS = 4
"""Every kernel that Nsight Compute counts takes it tens of milliseconds, and layers are alike."""
DECODE_BATCH, DECODE_CONTEXT, PREFILL_TOKENS = 16, 512, 2048
_WARM_STEPS = 2


def few_layers(model: str) -> str:
    """Return a random model of the same widths with few layers; any other as it is."""
    if not model.startswith(PREFIX):
        return model
    if parse_shape(model.removeprefix(PREFIX)).num_layers <= FEW_LAYERS:
        return model
    return f"{model},layers={FEW_LAYERS}"


def marked(step: Callable[[], Phase]) -> Phase:
    """Run a step between the marks that `ncu --profile-from-start off` waits for."""
    torch.cuda.cudart().cudaProfilerStart()
    phase = step()
    torch.cuda.cudart().cudaProfilerStop()
    return phase


def main(model: str, name: str, out: Path) -> None:
    """Run the step and write its modelled bytes."""
    blocks = max(blocks_for(DECODE_BATCH, DECODE_CONTEXT + 16), blocks_for(1, PREFILL_TOKENS))
    setting = Setting("cuda:0", model, 0.0, is_dry=False)
    # Without graphs: the kernels are the same, and each is a launch of its own for Nsight Compute.
    engine = open_engine(setting, num_blocks=blocks, cuda_graphs=False)
    if name == "decode":
        decoding = Decoding(engine, batch=DECODE_BATCH, context=DECODE_CONTEXT)
        decoding.run(_WARM_STEPS)
        phase = marked(lambda: decoding.run(1))
    else:
        prefill(engine, num_tokens=PREFILL_TOKENS, num_prompts=1)
        phase = marked(lambda: prefill(engine, num_tokens=PREFILL_TOKENS, num_prompts=1))
    modelled = {
        "num_layers": engine.model.config.num_layers,
        "bytes": phase.bytes,
        "gather_bytes": phase.gather_bytes,
    }
    out.write_text(json.dumps(modelled))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
