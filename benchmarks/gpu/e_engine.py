"""(e) The engine as it stands, against measured ceilings and against transformers.

MBU is modelled bytes per second over the measured read rate, MFU modelled FLOP/s over the measured
rate of dense products in the model's dtype. Whatever launches cost counts against both.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
from load import Decoding, Phase, open_engine, prefill
from part import Setting, main

from inferscope.calibration import driver_version
from inferscope.cost.peaks import peaks_of
from inferscope.engine.ceilings import measure_ceilings
from inferscope.engine.config import ModelConfig
from inferscope.engine.devices import device_name, find_device
from inferscope.engine.weights import dtype_name


def measure(setting: Setting) -> dict[str, Any]:
    """Measure ceilings, then the engine, then transformers."""
    device = find_device(setting.device)
    ceilings = measure_ceilings(device, seconds=0.2 * setting.seconds)
    peaks = peaks_of(device_name(device))
    engine = open_engine(setting)
    config, dtype = engine.model.config, engine.model.dtype
    flops_s = ceilings.flops_s[dtype_name(dtype)]
    context, num_steps = (32, 8) if setting.is_dry else (512, 40)
    rows = []
    for batch in (1, 4) if setting.is_dry else (1, 8, 64):
        decoding = Decoding(engine, batch=batch, context=context)
        decoding.run(4)
        rows.append(
            used(f"decode {batch}", decoding.run(num_steps), ceilings.read_bytes_s, flops_s)
        )
        rows[-1]["tokens_s"] = batch * 1e3 / rows[-1]["step_ms"]
        decoding.close()
    num_tokens = 64 if setting.is_dry else 2048
    prefill(engine, num_tokens=num_tokens, num_prompts=2)
    phase = prefill(engine, num_tokens=num_tokens, num_prompts=8)
    rows.append(used(f"prefill {num_tokens}", phase, ceilings.read_bytes_s, flops_s))
    del engine
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()
    peers = transformers_steps(config, dtype, device, context=context, num_steps=num_steps // 2)
    for row in rows:
        row["over_transformers"] = peers.get(row["phase"], 0.0) / row["step_ms"] or None
    lines = [
        f"{row['phase']:<13} {row['step_ms']:8.2f} ms/step, "
        f"MBU {row['mbu']:.1%}, MFU {row['mfu']:.1%}"
        + (f", {row['over_transformers']:.2f}x transformers" if row["over_transformers"] else "")
        for row in rows
    ]
    return {
        "device": device_name(device),
        "driver": driver_version(),
        "ceilings": ceilings._asdict(),
        "maker": peaks._asdict() if peaks.is_known else None,
        "rows": rows,
        "lines": lines,
    }


def used(name: str, phase: Phase, bytes_s: float, flops_s: float) -> dict[str, Any]:
    """Return what a phase made of the device."""
    seconds = (phase.end_ns - phase.start_ns) / 1e9
    return {
        "phase": name,
        "step_ms": phase.step_ns / 1e6,
        "mbu": phase.bytes / seconds / bytes_s,
        "mfu": phase.flops / seconds / flops_s,
    }


@torch.inference_mode()
def transformers_steps(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, context: int, num_steps: int
) -> dict[str, float]:
    """Return transformers' milliseconds per decode step on the same shape, by the phase's name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.is_tied,
    )
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(shape).eval()
        torch.set_default_dtype(torch.float32)
    found = {}
    for batch in (1, 4) if device.type == "cpu" else (1, 8, 64):
        ids = torch.randint(config.vocab, (batch, context), device=device)
        out = model(ids, use_cache=True, logits_to_keep=1)
        for is_timed in (False, True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(num_steps if is_timed else 2):
                next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
                out = model(next_ids, past_key_values=out.past_key_values, use_cache=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took = time.perf_counter() - began
        found[f"decode {batch}"] = took / num_steps * 1e3
    return found


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
