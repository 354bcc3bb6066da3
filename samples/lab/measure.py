"""Measure one model on several engines: prefill, decode and batches, one step at a time.

python samples/lab/measure.py [--gguf FILE]

Writes results.json beside this file. All engines compute in float32 in this thread. A time is the
thread's processor time, the least of several: on an idle machine that is wall-clock time, and on a
busy one it leaves out what other processes took.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from inferscope.engine import (
    Engine,
    EngineOptions,
    ModelConfig,
    Sampling,
    load_model,
)

RESULTS = Path(__file__).with_name("results.json")
SHAPE = "random:small-100m,layers=4"
PROMPTS = (8, 16, 32, 64, 128, 256, 512, 1024)
POSITIONS = (16, 64, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32)
BATCH_CONTEXT = 32
DECODE_STEPS = 6
_REPEATS = 2


class Subject(Protocol):
    """Engine of the lab."""

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of one pass over a prompt."""

    def decode_s(self, context: int, batch: int) -> float:
        """Return the least seconds of a step that decodes `batch` sequences at a position."""


class Reference:
    """InferScope's reference engine, one step after the other in this thread."""

    def __init__(self) -> None:
        options = EngineOptions(
            token_budget=4096, max_running=max(BATCHES), num_blocks=512, prefix_cache=False,
            dtype="float32",
        )  # fmt: skip
        self._options = options
        self._model = load_model(SHAPE, options)
        self.config: ModelConfig = self._model.config

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of the step that computes a whole prompt."""
        engine = Engine(self._model, self._options)
        engine.submit(_prompt(tokens, self.config.vocab), Sampling(max_tokens=1))
        took_s = _timed(engine.step)
        assert not engine.has_work
        return took_s

    def decode_s(self, context: int, batch: int) -> float:
        """Return the least seconds of the decode steps after one step of prompts."""
        engine = Engine(self._model, self._options)
        for _ in range(batch):
            engine.submit(
                _prompt(context, self.config.vocab),
                Sampling(max_tokens=DECODE_STEPS + 1, ignore_eos=True),
            )
        engine.step()
        times_s = [_timed(engine.step) for _ in range(DECODE_STEPS)]
        assert not engine.has_work
        return min(times_s)


class Transformers:
    """Hugging Face transformers with a model of the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.is_tied,
        )
        self._model: Any = LlamaForCausalLM(shape).eval()
        self._vocab = config.vocab

    @torch.inference_mode()
    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a forward pass with logits of the last token."""
        ids = torch.tensor([_prompt(tokens, self._vocab)])
        return _timed(lambda: self._model(ids, use_cache=True, logits_to_keep=1))

    @torch.inference_mode()
    def decode_s(self, context: int, batch: int) -> float:
        """Return the least seconds of forward passes with one token of each sequence."""
        ids = torch.tensor([_prompt(context, self._vocab)] * batch)
        cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        one = ids[:, :1]
        return min(
            _timed(lambda: self._model(one, past_key_values=cache, use_cache=True))
            for _ in range(DECODE_STEPS)
        )


class LlamaCpp:
    """llama-cpp-python with a GGUF file of the user's: one sequence, so no batches."""

    def __init__(self, path: Path) -> None:
        from llama_cpp import Llama

        self._llama: Any = Llama(
            str(path), n_ctx=max(POSITIONS) + DECODE_STEPS + 1, n_batch=max(PROMPTS),
            n_ubatch=max(PROMPTS), n_threads=1, n_threads_batch=1, verbose=False,
        )  # fmt: skip

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of evaluating a prompt."""
        self._llama.reset()
        return _timed(lambda: self._llama.eval(_prompt(tokens, self._llama.n_vocab())))

    def decode_s(self, context: int, batch: int) -> float:
        """Return the least seconds of evaluating one token."""
        assert batch == 1
        self.prefill_s(context)
        return min(_timed(lambda: self._llama.eval([1])) for _ in range(DECODE_STEPS))


def ceilings() -> dict[str, float]:
    """Return the highest rates of this thread: bytes read by a matrix-vector product, and FLOPs."""
    matrix, vector = torch.ones(1 << 16, 1 << 10), torch.ones(1 << 10)
    left, right, out = (torch.randn(1024, 1024) for _ in range(3))
    read_s = min(_timed(lambda: torch.mv(matrix, vector)) for _ in range(60))
    product_s = min(_timed(lambda: torch.mm(left, right, out=out)) for _ in range(60))
    return {"read_bytes_s": matrix.nbytes / read_s, "flops_s": 2 * 1024**3 / product_s}


def measure(subject: Subject, *, batches: tuple[int, ...]) -> dict[str, list[list[float]]]:
    """Return the curves of an engine as pairs of x and seconds.

    Each pass over a curve has every x once, so that a slow minute is not one x's alone.
    """
    subject.prefill_s(PROMPTS[0])  # leaves what an engine does once out of the curves
    subject.decode_s(POSITIONS[0], 1)
    return {
        "prefill": _curve(PROMPTS, subject.prefill_s),
        "decode": _curve(POSITIONS, lambda at: subject.decode_s(at, 1)),
        "batch": _curve(batches, lambda num: subject.decode_s(BATCH_CONTEXT, num)),
    }


def _curve(xs: tuple[int, ...], seconds: Callable[[int], float]) -> list[list[float]]:
    least: dict[int, float] = {}
    for _ in range(_REPEATS):
        for x in xs:
            least[x] = min(seconds(x), least.get(x, float("inf")))
    return [[x, took_s] for x, took_s in least.items()]


def _timed(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e9


def _prompt(tokens: int, vocab: int) -> list[int]:
    return [(7919 * i + 1) % vocab for i in range(tokens)]


def machine() -> dict[str, Any]:
    """Return what a reader needs to know of this machine."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(": ")[2] for line in cpus.splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": list(os.getloadavg()),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="model for llama-cpp-python, if it is installed"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    reference = Reference()
    engines = {"inferscope": measure(reference, batches=BATCHES)}
    versions = {"inferscope": metadata.version("inferscope-llm")}
    if importlib.util.find_spec("transformers"):
        engines["transformers"] = measure(Transformers(reference.config), batches=BATCHES)
        versions["transformers"] = metadata.version("transformers")
    else:
        print("transformers is skipped: it is not installed", file=sys.stderr)
    if not importlib.util.find_spec("llama_cpp"):
        print("llama-cpp-python is skipped: it is not installed", file=sys.stderr)
    elif options.gguf is None:
        print("llama-cpp-python is skipped: name a model with --gguf FILE", file=sys.stderr)
    else:
        engines["llama-cpp-python"] = measure(LlamaCpp(options.gguf), batches=(1,))
        versions["llama-cpp-python"] = metadata.version("llama-cpp-python")
    document = {
        "machine": {**before, "load_average_after": list(os.getloadavg())},
        "versions": versions,
        "model": SHAPE,
        "dtype": "float32",
        "batch_context": BATCH_CONTEXT,
        "ceilings": ceilings(),
        "engines": engines,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(RESULTS)


if __name__ == "__main__":
    main()
