"""An engine without a model that does what its standard input commands, a line at a time.

queue ID        a request comes in and is left waiting
begin ID        a request comes in and its prompt is computed
go ID N         it decodes N tokens, 2 ms each
stall ID S      it decodes a token after S seconds
preempt ID      it loses its blocks and is computed again, in a padded step
end ID FINISH   it is over
quit            the engine writes its shutdown record
"""

from __future__ import annotations

import sys
import time

from inferscope.probe import EngineInfo, Probe
from inferscope.records import DECODE, PREFILL, RECOMPUTED

PROMPT = 32
PADDED = 64


class ByHand:
    """The engine."""

    def __init__(self) -> None:
        self.probe = Probe.open(EngineInfo(0, "by-hand", "1.0", model="none", device="thin-air"))
        self.indices: dict[str, int] = {}
        self.contexts: dict[str, int] = {}
        self.num_steps = 0

    def step(self, name: str, tokens: int, *, phase: int, flags: int = 0, padded: int = 0) -> None:
        number, probe, index = self.num_steps, self.probe, self.indices[name]
        self.num_steps += 1
        now_ns = time.monotonic_ns()
        probe.plan(
            number, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1,
            blocks_used=len(self.indices), blocks_total=100,
        )  # fmt: skip
        probe.start(number)
        time.sleep(0.002)
        probe.stop(number, padded_tokens=padded)
        probe.slices(
            number, requests=[index], phases=[phase], tokens=[tokens],
            contexts=[self.contexts[name]], flags=[flags], sampled=[1],
        )  # fmt: skip
        probe.emitted([index], [1], step=number)
        self.contexts[name] += tokens

    def do(self, verb: str, *words: str) -> None:
        name = words[0]
        if verb == "queue":
            self.indices[name] = self.probe.queued(name, prompt_tokens=PROMPT)
        elif verb == "begin":
            self.indices[name] = self.probe.queued(name, prompt_tokens=PROMPT)
            self.contexts[name] = 0
            self.probe.admitted(self.indices[name])
            self.step(name, PROMPT, phase=PREFILL)
        elif verb == "go":
            for _ in range(int(words[1])):
                self.step(name, 1, phase=DECODE)
        elif verb == "stall":
            time.sleep(float(words[1]))
            self.step(name, 1, phase=DECODE)
        elif verb == "preempt":
            self.probe.preempted(self.indices[name])
            self.contexts[name] = 0
            self.probe.resumed(self.indices[name])
            self.step(name, PROMPT, phase=PREFILL, flags=RECOMPUTED, padded=PADDED)
        elif verb == "end":
            self.probe.finished(self.indices.pop(name), words[1])


def announce(word: str) -> None:
    """Print a line for the test."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve standard input."""
    engine = ByHand()
    announce("ready")
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        engine.do(*line.split())
        announce("done")
    engine.probe.close()


main()
