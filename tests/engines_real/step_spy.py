"""A module for a `sitecustomize` to import: it writes down which tokens an engine computes.

SPY_FILE names the file. Each step is a line of JSON, `[[id, position, tokens], ...]`: of each
request the first position that is computed, and how many are. They are read from the tensors that
the model is given, below everything that our hooks are put around.

    vLLM          GPUModelRunner._prepare_inputs   the persistent batch
    SGLang        ModelRunner.forward              the ForwardBatch
    transformers  ModelRunner.compute_batch        positions and boundaries of the packed batch
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

Rows = Iterable[tuple[str, int, int]]


def vllm_rows(runner: Any, scheduler_output: Any, num_scheduled: Any) -> Rows:
    """Read vLLM's batch once its inputs are prepared."""
    starts = runner.input_batch.num_computed_tokens_cpu
    ids = runner.input_batch.req_ids[: len(num_scheduled)]
    return [(name, int(starts[place]), int(num_scheduled[place])) for place, name in enumerate(ids)]


def sglang_rows(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> Rows:
    """Read SGLang's batch before the model is called."""
    ids = forward_batch.rids or []
    if forward_batch.forward_mode.is_decode():
        return [
            (name, int(num) - 1, 1)
            for name, num in zip(ids, forward_batch.seq_lens.tolist(), strict=True)
        ]
    starts, nums = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    return [(name, int(at), int(num)) for name, at, num in zip(ids, starts, nums, strict=True)]


def transformers_rows(runner: Any, *args: Any, **kwargs: Any) -> Rows:
    """Read the packed batch of transformers' continuous batching before the model is called."""
    (batch,) = (each for each in (*args, *kwargs.values()) if isinstance(each, dict))
    ios = runner.inputs_and_outputs
    pairs = getattr(ios, "io_pairs", None)
    inner = ios if pairs is None else pairs[ios.current_pair].host_io
    bounds, positions = batch["cu_seq_lens_q"].tolist(), batch["position_ids"][0].tolist()
    return [
        (request.state.request_id, positions[start], end - start)
        for request, start, end in zip(inner.requests_in_batch, bounds, bounds[1:], strict=False)
    ]


PLACES: dict[str, tuple[str, str, bool, Callable[..., Rows]]] = {
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner", "_prepare_inputs", True, vllm_rows),
    "sglang.srt.model_executor.model_runner": ("ModelRunner", "forward", False, sglang_rows),
    "transformers.generation.continuous_batching.model_runner": (
        *("ModelRunner", "compute_batch", False),
        transformers_rows,
    ),
}
"""Class and method by module, whether it is read once the method has returned, and how."""


def spy(module: ModuleType) -> None:
    """Wrap the method of a module."""
    owner_name, name, is_after, rows_of = PLACES[module.__name__]
    owner = getattr(module, owner_name)
    original = getattr(owner, name)

    def note(*args: Any, **kwargs: Any) -> None:
        line = json.dumps([list(row) for row in rows_of(*args, **kwargs)]) + "\n"
        with open(os.environ["SPY_FILE"], "a") as file:
            file.write(line)

    @functools.wraps(original)
    def spied(*args: Any, **kwargs: Any) -> Any:
        if not is_after:
            note(*args, **kwargs)
        result = original(*args, **kwargs)
        if is_after:
            note(*args, **kwargs)
        return result

    setattr(owner, name, spied)


if "SPY_FILE" in os.environ and __name__ == "step_spy":
    from after_import import AfterImport  # copied beside this file

    sys.meta_path.insert(0, AfterImport(dict.fromkeys(PLACES, spy)))
