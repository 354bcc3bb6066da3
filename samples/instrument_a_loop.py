"""A custom generate loop with instrumentation: the calls that InferScope needs, and when.

python samples/instrument_a_loop.py     in one terminal
inferscope attach                       in another
"""

from __future__ import annotations

import time

from inferscope.probe import EngineInfo, Probe
from inferscope.records import DECODE, PREFILL


def forward(num_tokens: int) -> None:
    """Return tokens in place of a model."""
    time.sleep(0.0002 * num_tokens**0.5)


def generate(prompts: list[int], *, max_tokens: int, probe: Probe) -> None:
    """Serve prompts of these lengths, all at once; the marked lines are the instrumentation."""
    indices = [probe.queued(f"r{i}", prompt_tokens=n) for i, n in enumerate(prompts)]  # <-
    for index in indices:
        probe.admitted(index)  # <-
    contexts, ones = [0] * len(prompts), [1] * len(prompts)
    for step in range(max_tokens):
        tokens = ones if step else prompts
        now_ns = time.monotonic_ns()
        probe.plan(step, start_ns=now_ns, end_ns=now_ns, waiting=0, running=len(prompts))  # <-
        probe.start(step)  # <-
        forward(sum(tokens))
        probe.stop(step)  # <-
        phases = [DECODE if step else PREFILL] * len(prompts)
        probe.slices(step, requests=indices, phases=phases, tokens=tokens, contexts=contexts)  # <-
        probe.emitted(indices, ones, step=step)  # <-
        contexts = [context + num for context, num in zip(contexts, tokens, strict=True)]
    for index in indices:
        probe.finished(index, "length")  # <-


if __name__ == "__main__":
    probe = Probe.open(EngineInfo(0, "my-engine", model="my-model"))
    print("Running; in another terminal: inferscope attach. Ctrl-C ends it.", flush=True)
    while probe.on:
        generate([12, 300, 45], max_tokens=200, probe=probe)
