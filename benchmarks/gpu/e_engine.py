"""(e) The engine as it stands, against measured ceilings and against transformers.

MBU is modelled bytes per second over the measured read rate, MFU modelled FLOP/s over the measured
rate of dense products in the model's dtype. Whatever launches cost counts against both. The engine
is gone before transformers comes: two sets of weights and a pool do not fit into every device.

Decode steps are measured as CUDA graphs and without, and the attention kernels alone against the
same attention in plain torch: how far their results differ, and how fast they read keys and values.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from load import Decoding, Phase, blocks_for, open_engine, prefill
from part import Bank, Setting, Unmet, main, release, shown

from inferscope.calibration import driver_version
from inferscope.cost.peaks import peaks_of
from inferscope.engine import Engine, EngineOptions, runner
from inferscope.engine.attention import KvTensors, PagedAttention, RaggedBatch
from inferscope.engine.ceilings import Ceilings, measure_ceilings
from inferscope.engine.config import ModelConfig
from inferscope.engine.devices import device_name, find_device
from inferscope.engine.model import Model, Outline
from inferscope.engine.weights import dtype_name

_CEILINGS_SHARE = 0.2
"""Share of the part's time."""
_BLOCK_TOKENS = 16
_RUNS = 20
"""Calls of a kernel that are timed together."""


def measure(setting: Setting, bank: Bank) -> None:
    """Measure ceilings, then the engine, then transformers."""
    device = find_device(setting.device)
    ceilings = measure_ceilings(device, seconds=_CEILINGS_SHARE * setting.seconds)
    peaks = peaks_of(device_name(device))
    about = {
        "device": device_name(device),
        "driver": driver_version(),
        "ceilings": ceilings._asdict(),
        "maker": peaks._asdict() if peaks.is_known else None,
    }
    products = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in ceilings.flops_s.items())
    bank.keep(
        "ceilings",
        about,
        f"{about['device']}: reads {ceilings.read_bytes_s / 1e9:.0f} GB/s, copies "
        f"{ceilings.copy_bytes_s / 1e9:.0f} GB/s; TFLOP/s: {products}",
    )
    release()
    config, dtype = engine_steps(setting, bank, ceilings)
    release()
    attention_steps(setting, bank, config, dtype, read_bytes_s=ceilings.read_bytes_s)
    release()
    with bank.row("transformers"):
        transformers_steps(setting, bank, config, dtype)


def sizes(setting: Setting) -> tuple[tuple[int, ...], int, int]:
    """Return the batches, their context, and how many steps are timed."""
    return ((1, 4), 32, 8) if setting.is_dry else ((1, 8, 64), 512, 40)


def engine_steps(
    setting: Setting, bank: Bank, ceilings: Ceilings
) -> tuple[ModelConfig, torch.dtype]:
    """Run the engine's phases; nothing of it is left behind but what it ran."""
    batches, context, num_steps = sizes(setting)
    engine = open_engine(setting, num_blocks=blocks_for(max(batches), context + 2 * num_steps))
    dtype = engine.model.dtype
    flops_s = ceilings.flops_s.get(dtype_name(dtype))
    for batch in batches:
        name = f"decode {batch}"
        with bank.row(name):
            phase = decode(engine, batch=batch, context=context, num_steps=num_steps)
            row = used(phase, ceilings.read_bytes_s, flops_s)
            row["tokens_s"] = batch * 1e3 / row["step_ms"]
            bank.keep(name, row, line_of(name, row))
    num_tokens = 64 if setting.is_dry else 2048
    name = f"prefill {num_tokens}"
    with bank.row(name):
        prefill(engine, num_tokens=num_tokens, num_prompts=2)
        phase = prefill(engine, num_tokens=num_tokens, num_prompts=8)
        row = used(phase, ceilings.read_bytes_s, flops_s)
        row["tokens_s"] = num_tokens * 1e3 / row["step_ms"]
        bank.keep(name, row, line_of(name, row))
    model, options = engine.model, engine.options
    engine.close()
    del engine
    with bank.row("capture"):
        eager_steps(setting, bank, model, options)
    return model.config, dtype


def decode(engine: Engine, *, batch: int, context: int, num_steps: int) -> Phase:
    """Run decode steps, after four warm ones; the engine is not referenced afterwards."""
    with closing(Decoding(engine, batch=batch, context=context)) as decoding:
        decoding.run(4)
        return decoding.run(num_steps)


def eager_steps(
    setting: Setting, bank: Bank, model: Model | Outline, options: EngineOptions
) -> None:
    """Run the decodes again without graphs, and measure how long their capture takes."""
    build_s = []
    engine = None
    for graphs in (True, False):
        engine = None  # its pool makes room for the next
        release()
        wait_for(model.device)
        began_s = time.perf_counter()
        engine = Engine(model, replace(options, cuda_graphs=graphs))
        wait_for(model.device)
        build_s.append(time.perf_counter() - began_s)
    assert engine is not None, "neither engine was built"
    capture_s = build_s[0] - build_s[1]
    bank.keep(
        "capture",
        {"capture_s": capture_s},
        f"capture of the graphs of up to {options.max_running} requests: {capture_s:.2f} s",
    )
    batches, context, num_steps = sizes(setting)
    for batch in batches:
        name = f"eager {batch}"
        with bank.row(name):
            phase = decode(engine, batch=batch, context=context, num_steps=num_steps)
            step_ms = phase.step_ns / 1e6
            graph_ms = bank.rows.get(f"decode {batch}", {}).get("step_ms")
            over = None if graph_ms is None else step_ms / graph_ms
            bank.keep(
                name,
                {"step_ms": step_ms, "over_graph": over},
                f"decode {batch} without graphs: {step_ms:.2f} ms/step, "
                f"{shown(over, '.2f')} times the graph's",
            )


def attention_steps(
    setting: Setting, bank: Bank, config: ModelConfig, dtype: torch.dtype, *, read_bytes_s: float
) -> None:
    """Run one layer's attention by the kernels and in plain torch, over shuffled blocks."""
    device = find_device(setting.device)
    batches, context, _ = sizes(setting)
    chunk = 64 if setting.is_dry else 2048
    steps = [(f"attention {batch}", [1] * batch) for batch in batches]
    for name, counts in (*steps, (f"attention chunk {chunk}", [chunk])):
        with bank.row(name):
            if not runner.has_kernels(config, device):
                raise Unmet("needs a GPU with Triton")
            row = attention_row(config, dtype, device, counts=counts, context=context)
            row["read_share"] = row["kv_bytes"] / (row["kernel_us"] / 1e6) / read_bytes_s
            bank.keep(
                name,
                row,
                f"{name}: kernel {row['kernel_us']:.1f} us, {row['read_share']:.1%} of the read "
                f"rate; torch {row['torch_us']:.1f} us; largest difference {row['most_apart']:.1e}",
            )


def attention_row(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    counts: list[int],
    context: int,
) -> dict[str, Any]:
    """Return the microseconds of a call by both, their largest difference, and the KV bytes."""
    from inferscope.engine.kernels import TritonAttention

    draw = np.random.default_rng(len(counts))
    num_each = -(-(context + max(counts)) // _BLOCK_TOKENS)
    num_blocks = num_each * len(counts)
    blocks = draw.permutation(num_blocks).reshape(len(counts), num_each)
    at = [(row, context + idx) for row, count in enumerate(counts) for idx in range(count)]
    slots = [
        blocks[row, place // _BLOCK_TOKENS] * _BLOCK_TOKENS + place % _BLOCK_TOKENS
        for row, place in at
    ]
    batch = RaggedBatch(
        slots=torch.tensor(slots, device=device),
        counts=np.array(counts),
        contexts=np.full(len(counts), context),
        blocks=blocks,
        num_singles=counts.count(1),
    )
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    qkv = torch.randn(len(slots), sum(heads), config.head_dim, dtype=dtype, device=device)
    given = qkv.split(heads, dim=1)
    one_layer = replace(config, num_layers=1)
    results, micros = [], []
    # Neither of them writes anything but the same keys and values.
    kv = KvTensors(
        one_layer, num_blocks=num_blocks, block_tokens=_BLOCK_TOKENS, dtype=dtype, device=device
    )
    for tensor in (kv.keys[0], kv.values[0]):
        tensor.normal_()
    for attention in (TritonAttention(kv), PagedAttention(kv)):
        attention.plan(batch)
        results.append(attention.run(0, *given).float())
        micros.append(call_us(lambda ran=attention: ran.run(0, *given), device))
    kv_tokens = sum(counts) + context * len(counts)
    return {
        "kernel_us": micros[0],
        "torch_us": micros[1],
        "most_apart": float((results[0] - results[1]).abs().max()),
        "kv_bytes": kv_tokens * one_layer.kv_token_bytes(dtype.itemsize),
    }


def call_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of a call, launches included, after as many warm ones."""
    for _ in range(2):
        wait_for(device)
        began_s = time.perf_counter()
        for _ in range(_RUNS):
            call()
        wait_for(device)
        took_s = time.perf_counter() - began_s
    return took_s / _RUNS * 1e6


def used(phase: Phase, bytes_s: float, flops_s: float | None) -> dict[str, Any]:
    """Return what a phase made of the device; None where its ceiling is not known."""
    seconds = (phase.end_ns - phase.start_ns) / 1e9
    return {
        "step_ms": phase.step_ns / 1e6,
        "mbu": phase.bytes / seconds / bytes_s,
        "mfu": None if flops_s is None else phase.flops / seconds / flops_s,
    }


def line_of(name: str, row: dict[str, Any]) -> str:
    """Return a phase as a line."""
    return (
        f"{name:<13} {row['step_ms']:8.2f} ms/step, {row['tokens_s']:.0f} tokens/s, "
        f"MBU {row['mbu']:.1%}, MFU {shown(row['mfu'], '.1%')}"
    )


@torch.inference_mode()
def transformers_steps(
    setting: Setting, bank: Bank, config: ModelConfig, dtype: torch.dtype
) -> None:
    """Run transformers' decode steps on the same shape, beside the engine's of the same batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = find_device(setting.device)
    batches, context, num_steps = sizes(setting)
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
    with torch.device(device), default_dtype(dtype):
        model = LlamaForCausalLM(shape).eval()
    for batch in batches:
        name = f"transformers {batch}"
        with bank.row(name):
            ids = torch.randint(config.vocab, (batch, context), device=device)
            step_ms = decode_ms(model, ids, num_steps=num_steps // 2)
            ours_ms = bank.rows.get(f"decode {batch}", {}).get("step_ms")
            over = None if ours_ms is None else step_ms / ours_ms
            bank.keep(
                name,
                {"step_ms": step_ms, "over_engine": over},
                f"transformers, batch {batch}: {step_ms:.2f} ms/step, "
                f"{shown(over, '.2f')} times the engine's",
            )


def decode_ms(model: Any, ids: torch.Tensor, *, num_steps: int) -> float:
    """Prefill, then decode greedily; return the milliseconds per step, two warm ones left out."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    took_s = 0.0
    for num in (2, num_steps):
        wait_for(ids.device)
        began_s = time.perf_counter()
        for _ in range(num):
            next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(next_ids, past_key_values=out.past_key_values, use_cache=True)
        wait_for(ids.device)
        took_s = time.perf_counter() - began_s
    return took_s / num_steps * 1e3


def wait_for(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a factory of tensors of a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
