"""Injected cache misses: whether the records name the cause of each, with exact tokens.

    python benchmarks/cache_truth.py [--engine reference|vllm|sglang] [--each N] [--seed N]
                                     [--core python|rust] [--out FILE]

Each request is made to miss for one known reason. What counts as right is an exact prediction of
the records: every class of `CacheLookup`, evictor and time of an eviction, and the positions of
`PromptLikeness`. Evictor and time are checked against the pool itself, which is asked after each
request that makes room how much of the victim's prompt it still holds.

    reference   the engine and its model, in this process
    vllm        vLLM's own scheduler and KV cache manager with the adapter's hooks, in this process;
                no model: tokens are made up. MODEL is a checkpoint's folder
    sglang      SGLang's radix cache and requests with the adapter's hooks, in this process; no
                model either. The tree's core in Rust shows no nodes: there the true evictor has to
                be among those listed

Run the last two with the Python of an environment that has the engine, PYTHONPATH on this checkout.

Prompts are random tokens, but for `documents`: distinct texts behind one system prompt, of which
few tokens may count as text seen before. Thresholds were set with seeds below 100; what is
reported has seeds from 100 on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from inferscope.probe import EngineInfo, Probe
from inferscope.records import (
    LOOKUP_CLASSES,
    LORA,
    SALT,
    CacheLookup,
    PromptLikeness,
    decode,
)
from inferscope.ring import RingReader

ROOT = Path(__file__).parents[1]
MOST_CHANGED = 0.02
"""Largest share of tokens of distinct documents that may count as seen before."""
ROOMY_BLOCKS = 20_000
Tokens = list[int]


class Served(NamedTuple):
    """A request that was served."""

    index: int
    start_ns: int
    end_ns: int


class Rig(Protocol):
    """An engine under its probe, and a front end's probe."""

    block_tokens: int
    """Tokens that a key stands for."""
    page_tokens: int
    """Tokens that the engine caches at a time."""
    vocab: int
    """Token above those of the prompts; large where a single token can be a hit."""
    is_exact: bool
    """Whether evictors are named, not derived."""
    version: str

    def serve(self, prompts: Sequence[Tokens], **namespace: Any) -> list[Served]:
        """Serve prompts together, to their first token."""

    def held(self, prompt: Tokens) -> int:
        """Return how many tokens of a prompt the cache would give now."""

    def records(self) -> tuple[dict[int, CacheLookup], dict[int, PromptLikeness]]:
        """Return lookups and comparisons by request."""

    def close(self) -> None:
        """Close the rings."""


class Expected(NamedTuple):
    """What the records have to say of a request."""

    case: str
    index: int
    tokens: dict[str, int]
    likeness: dict[str, Any] | None
    """Fields of the comparison; None if there must be none."""
    evictors: dict[int, tuple[int, int, int]]
    """True evictor, and when it was served, by the number of the first missing block."""
    twin: int = -1


# --- the cases --------------------------------------------------------------------------------


class Cases:
    """Maker of requests that miss for a known reason."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.key = random.Random(seed)
        self.width = rig.block_tokens
        self.page = rig.page_tokens
        self.expected: list[Expected] = []

    def text(self, num: int | None = None) -> Tokens:
        """Return random tokens."""
        num = num or self.key.randrange(8 * self.width, 24 * self.width)
        return [self.key.randrange(3, self.rig.vocab) for _ in range(num)]

    def one(self, prompt: Tokens, **namespace: Any) -> Served:
        """Serve one prompt."""
        (served,) = self.rig.serve([prompt], **namespace)
        return served

    def expect(
        self,
        case: str,
        served: Served,
        prompt: Tokens,
        *,
        likeness: dict[str, Any] | None,
        twin: int = -1,
        evictors: dict[int, tuple[int, int, int]] | None = None,
        **tokens: int,
    ) -> None:
        """Expect classes; what is not named is unmatched, but for the end of the prompt."""
        num = len(prompt)
        top, whole = self.most_hit(num), num // self.page * self.page
        classes = {"rule": whole - top, "rounding": num - whole, **tokens}
        classes["unmatched"] = classes.get("unmatched", num - sum(classes.values()))
        found = {name: count for name, count in classes.items() if count}
        self.expected.append(Expected(case, served.index, found, likeness, evictors or {}, twin))

    def most_hit(self, num: int) -> int:
        """Return how many tokens of a prompt the engine takes from its cache at most."""
        return (num - 1) // self.page * self.page

    def most_known(self, num: int) -> int:
        """Return how many of them lie in whole blocks, of which an eviction or a wait is known."""
        return min(num // self.width * self.width, self.most_hit(num))

    def new(self) -> None:
        """A prompt that is like none."""
        prompt = self.text()
        self.expect("new", self.one(prompt), prompt, likeness=None)

    def next_turn(self) -> None:
        """A conversation goes on."""
        first = self.text()
        before = self.one(first)
        prompt = [*first, *self.text(3 * self.width)]
        served = self.one(prompt)
        self.expect(
            "next_turn",
            served,
            prompt,
            hit=len(first) // self.page * self.page,
            likeness=_like(before, len(first)),
        )

    def edited(self) -> None:
        """One token differs."""
        first = self.text()
        before = self.one(first)
        at = self.key.randrange(len(first) - 60)
        prompt = [*first[:at], 501, *first[at + 1 :]]
        self.expect(
            "edited_token",
            self.one(prompt),
            prompt,
            hit=at // self.page * self.page,
            likeness=_like(before, at, (at + 1, len(prompt))),
        )

    def header(self) -> None:
        """A clock at the head differs."""
        body = self.text()
        first = self.text(1)[0]
        clocks = [[first + at, *self.text(11)] for at in range(2)]
        before = self.one([*clocks[0], *body])
        prompt = [*clocks[1], *body]
        self.expect(
            "timestamp_header",
            self.one(prompt),
            prompt,
            likeness=_like(before, 0, (12, len(prompt))),
        )

    def inserted(self) -> None:
        """Tokens are inserted."""
        first = self.text()
        before = self.one(first)
        at, num = self.key.randrange(1, len(first) - 60), self.key.randrange(1, 20)
        # No token of the first text: the insertion is unambiguous.
        prompt = [*first[:at], *[501] * num, *first[at:]]
        self.expect(
            "inserted_tokens",
            self.one(prompt),
            prompt,
            hit=at // self.page * self.page,
            likeness=_like(before, at, (at + num, len(prompt)), shift=num),
        )

    def below_block(self) -> None:
        """A prompt shorter than a block, twice."""
        self._twice("below_one_block", self.key.randrange(8, self.width))

    def whole_blocks(self) -> None:
        """A prompt of whole blocks, twice."""
        self._twice("whole_blocks", self.width * self.key.randrange(3, 12))

    def _twice(self, case: str, num_tokens: int) -> None:
        prompt = self.text(num_tokens)
        before = self.one(prompt)
        self.expect(
            case,
            self.one(prompt),
            prompt,
            hit=self.most_hit(num_tokens),
            likeness=_like(before, num_tokens),
        )

    def duplicate(self) -> None:
        """Two equal prompts at a time."""
        prompt = self.text()
        first, second = self.rig.serve([prompt, prompt])
        known = self.most_known(len(prompt))
        self.expect("new", first, prompt, likeness=None)
        # vLLM caches blocks when they are scheduled: a duplicate hits, unless the prefill is cut.
        hit = self.rig.records()[0][second.index].hit
        self.expect(
            "duplicate_in_flight",
            second,
            prompt,
            hit=hit,
            pending=max(0, known - hit),
            twin=first.index if hit < known else -1,
            likeness=_like(first, len(prompt)),
        )

    def evicted(self, *, is_edited: bool = False) -> None:
        """A prompt whose blocks made room for others."""
        first = self.text()
        before = self.one(first)
        evictors: dict[int, tuple[int, int, int]] = {}
        held = self.rig.held(first)
        while held > 2 * self.width:  # some of its head may stay
            filler = self.one(self.text(24 * self.width))
            now = self.rig.held(first)
            lost = range(now // self.width, -(-held // self.width))
            evictors |= dict.fromkeys(lost, filler)
            held = now
        known = self.most_known(len(first))
        prompt, likeness = first, _like(before, len(first))
        if is_edited:
            at = self.key.randrange(held + self.width, len(first) - 60)
            prompt = [*first[:at], 501, *first[at + 1 :]]
            likeness = _like(before, at, (at + 1, len(prompt)))
            known = at // self.width * self.width
        # What the last filler did not evict, this prompt's own allocation may.
        self.expect(
            "evicted_and_edited" if is_edited else "evicted",
            self.one(prompt),
            prompt,
            hit=held,
            evicted=known - held,
            likeness=likeness,
            evictors=evictors,
        )

    def evicted_edited(self) -> None:
        """The same, with a token that differs as well."""
        self.evicted(is_edited=True)

    def salted(self) -> None:
        """An equal prompt of another client."""
        first = self.text()
        before = self.one(first, salt="one")
        served = self.one(first, salt="two")
        self.expect("salt", served, first, likeness=_like(before, len(first), differs=SALT))

    def adapted(self) -> None:
        """An equal prompt for another adapter."""
        first = self.text()
        before = self.one(first)
        served = self.one(first, adapter="lora")
        self.expect("lora", served, first, likeness=_like(before, len(first), differs=LORA))

    def prompt_logprobs(self) -> None:
        """A request that must not read the cache."""
        first = self.text()
        before = self.one(first)
        served = self.one(first, prompt_logprobs=1)
        self.expect(
            "prompt_logprobs",
            served,
            first,
            off=len(first),
            rule=0,
            rounding=0,
            likeness=_like(before, len(first)),
        )

    def reset(self) -> None:
        """A prompt after a reset of the cache."""
        first = self.text()
        before = self.one(first)
        held = self.rig.held(first)
        self.rig.reset()  # type: ignore[attr-defined]
        self.expect(
            "cache_reset",
            self.one(first),
            first,
            cleared=min(held, self.most_known(len(first))),
            likeness=_like(before, len(first)),
        )


def _like(
    before: Served, at: int, *spans: tuple[int, int], shift: int = 0, differs: int = 0
) -> dict[str, Any]:
    return {
        "earlier": before.index,
        "diverged_at": at,
        "equal_again_at": spans[0][0] if spans else None,
        "shift": shift,
        "spans": tuple(spans),
        "differs": differs,
    }


COMMON: tuple[Callable[[Cases], None], ...] = (
    Cases.new,
    Cases.next_turn,
    Cases.edited,
    Cases.header,
    Cases.inserted,
    Cases.below_block,
    Cases.whole_blocks,
    Cases.duplicate,
    Cases.evicted,
    Cases.evicted_edited,
)
REMOVING = (Cases.evicted, Cases.evicted_edited, Cases.reset)
"""Cases that empty the cache."""
CASES = {
    "reference": (*COMMON, Cases.salted),
    "vllm": (*COMMON, Cases.salted, Cases.adapted, Cases.prompt_logprobs, Cases.reset),
    "sglang": (*COMMON, Cases.salted, Cases.prompt_logprobs, Cases.reset),
}


# --- the engines ------------------------------------------------------------------------------


class Probes:
    """The core's probe and the front end's, and what their rings hold."""

    is_exact = True
    vocab = 500

    def __init__(self, folder: Path) -> None:
        os.environ["INFERSCOPE_DIR"] = str(folder)
        os.environ["INFERSCOPE_RING_MB"] = "32"
        os.environ["INFERSCOPE_BUDGET"] = "0.9"  # nothing is computed but prompts
        self.folder = folder
        self.core = Probe.disabled()
        self.front = Probe.open(EngineInfo(0, "front"), role="frontend")

    def close(self) -> None:
        """Close the rings."""
        self.front.close()
        self.core.close()

    def compare(self, prompt: Tokens, namespace: dict[str, Any]) -> None:
        """Compare a prompt as a front end does."""
        index = self.front.received("r")
        self.front.compare_prompt(
            index,
            prompt,
            salt=namespace.get("salt"),
            adapter=namespace.get("adapter"),
        )

    def records(self) -> tuple[dict[int, CacheLookup], dict[int, PromptLikeness]]:
        """Return lookups and comparisons by request."""
        lookups: dict[int, CacheLookup] = {}
        likenesses: dict[int, PromptLikeness] = {}
        for path in self.folder.rglob("*.ring"):
            reader = RingReader(path)
            while frames := reader.read():
                for frame in frames:
                    payload = getattr(frame, "payload", None)
                    if payload is None:
                        raise SystemExit("the ring is too small: records were lost")
                    if frame.code == CacheLookup.CODE:
                        lookup = decode(frame.code, payload)
                        lookups[lookup.index] = lookup  # type: ignore[attr-defined,assignment]
                    elif frame.code == PromptLikeness.CODE:
                        like = decode(frame.code, payload)
                        likenesses[like.index] = like  # type: ignore[attr-defined,assignment]
            reader.close()
        return lookups, likenesses


class ReferenceRig(Probes):
    """The reference engine with its built-in tiny model."""

    block_tokens = page_tokens = 16

    def __init__(
        self,
        folder: Path,
        num_blocks: int,
        model: str = "random:tiny",
        step_tokens: int = 512,
    ) -> None:
        from inferscope import __version__
        from inferscope.engine import EngineOptions, load_engine
        from inferscope.engine.request import Sampling

        super().__init__(folder)
        self.version = __version__
        self.engine = load_engine(
            model,
            EngineOptions(num_blocks=num_blocks, max_running=8, token_budget=step_tokens),
        )
        self.engine.probe = self.core = Probe.open(EngineInfo(0, "reference"))
        self._sampling = Sampling(max_tokens=1, ignore_eos=True)
        self._num = 0

    def serve(self, prompts: Sequence[Tokens], **namespace: Any) -> list[Served]:
        """Serve prompts together, to their first token."""
        first, start_ns = self._num, time.monotonic_ns()
        self._num += len(prompts)
        for prompt in prompts:
            self.compare(prompt, namespace)
        salt = namespace.get("salt", "")
        for prompt in prompts:
            self.engine.submit(prompt, self._sampling, cache_salt=salt)
        while self.engine.has_work:
            self.engine.step()
        end_ns = time.monotonic_ns()
        return [Served(first + at, start_ns, end_ns) for at in range(len(prompts))]

    def held(self, prompt: Tokens) -> int:
        """Return how many tokens of a prompt the cache would give now."""
        most = (len(prompt) - 1) // self.block_tokens
        return len(self.engine.pool.match(prompt, max_blocks=most).blocks) * self.block_tokens


def rig_of(engine: str, folder: Path, args: argparse.Namespace) -> Rig:
    """Return the engine's rig."""
    if engine == "reference":
        return ReferenceRig(folder, num_blocks=args.blocks)
    rig: Rig
    if engine == "sglang":
        from cache_truth_sglang import SglangRig

        rig = SglangRig(folder, num_blocks=args.blocks, core=args.core)
    else:
        from cache_truth_vllm import VllmRig

        rig = VllmRig(folder, num_blocks=args.blocks, model=args.model)
    return rig


# --- the verdict ------------------------------------------------------------------------------


def faults_of(
    rig: Rig, expected: Expected, lookup: CacheLookup | None, like: PromptLikeness | None
) -> list[str]:
    """Return what the records of a request say wrong."""
    faults = []
    if lookup is None:
        return ["no lookup"]
    found = {name: num for name in LOOKUP_CLASSES if (num := getattr(lookup, name))}
    if found != expected.tokens:
        faults.append(f"classes {found}, not {expected.tokens}")
    if found.get("evicted"):
        true = expected.evictors.get(found.get("hit", 0) // rig.block_tokens)
        named = (lookup.evictor,) if rig.is_exact else lookup.evictors
        if lookup.is_inferred == rig.is_exact:
            faults.append(f"inferred {lookup.is_inferred}")
        elif true is None:
            faults.append("evicted, where nothing was")
        elif true[0] not in named:
            faults.append(f"evictor {named}, not {true[0]}")
        elif rig.is_exact and not true[1] <= (lookup.evicted_ns or 0) <= true[2]:
            faults.append("time of the eviction")
    if lookup.twin != expected.twin:
        faults.append(f"twin {lookup.twin}, not {expected.twin}")
    if like is None or expected.likeness is None:
        if (like is None) != (expected.likeness is None):
            faults.append(f"likeness {like}, not {expected.likeness}")
        return faults
    for name, value in expected.likeness.items():
        if getattr(like, name) != value:
            faults.append(f"{name} {getattr(like, name)}, not {value}")
    return faults


def documents(rig: Rig, key: random.Random) -> dict[str, float]:
    """Serve distinct documents behind one system prompt; return shares of their tokens."""
    from inferscope.engine import load_tokenizer

    tokenizer = load_tokenizer("random:tiny")
    paths = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("inferscope/**/*.py")]
    key.shuffle(paths)
    system = tokenizer.encode("You are a careful assistant. " * 12)
    served, num_tokens = [], 0
    for path in paths[:150]:
        text = path.read_text(encoding="utf-8")[600:3000]
        prompt = [*system, *tokenizer.encode(text)][:1500]
        served.append((rig.serve([prompt])[0], len(prompt), len(system)))
        num_tokens += len(prompt)
    likenesses = rig.records()[1]
    changed = sum(
        end - start
        for one, _, _ in served
        if one.index in likenesses
        for start, end in likenesses[one.index].spans
    )
    return {"documents": len(served), "tokens": num_tokens, "changed_share": changed / num_tokens}


def in_roomy_pool(args: argparse.Namespace) -> dict[str, Any]:
    """Serve documents, then cases, in a pool that is never full, in a process of its own.

    An engine's hooks are placed once in a process, on the first pool.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_roomy, args).result()


def _roomy(args: argparse.Namespace) -> dict[str, Any]:
    args.blocks = ROOMY_BLOCKS
    with tempfile.TemporaryDirectory() as folder:
        rig = rig_of(args.engine, Path(folder), args)
        cases = Cases(rig, args.seed)
        natural = documents(rig, cases.key)
        order = [case for case in CASES[args.engine] for _ in range(args.each)]
        cases.key.shuffle(order)
        for case in order:
            if case not in REMOVING:
                case(cases)
        lookups = rig.records()[0].values()
        never_full = {
            "requests": len(lookups),
            "evicted_tokens": sum(one.evicted for one in lookups),
        }
        rig.close()
    return {"natural_text": natural, "never_full": never_full}


def main() -> int:
    """Run the cases and write the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=sorted(CASES), default="reference")
    parser.add_argument("--each", type=int, default=35, help="requests per case (default: 35)")
    parser.add_argument("--seed", type=int, default=100, help="seed (default: 100)")
    parser.add_argument("--blocks", type=int, default=160, help="KV blocks (default: 160)")
    parser.add_argument("--model", default="", help="vllm: folder of a checkpoint")
    parser.add_argument("--core", choices=("python", "rust"), default="python", help="sglang's")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rig = rig_of(args.engine, Path(folder) / "rings", args)
        cases = Cases(rig, args.seed)
        order = [case for case in CASES[args.engine] for _ in range(args.each)]
        cases.key.shuffle(order)
        for case in order:
            case(cases)
        lookups, likenesses = rig.records()
        wrong: dict[str, list[str]] = {}
        num_evictors = 0
        total: dict[str, int] = {}
        for expected in cases.expected:
            total[expected.case] = total.get(expected.case, 0) + 1
            index = expected.index
            num_evictors += bool(expected.evictors)
            faults = faults_of(rig, expected, lookups.get(index), likenesses.get(index))
            if faults:
                wrong.setdefault(expected.case, []).append("; ".join(faults))
        rig.close()
    roomy = in_roomy_pool(args)
    num = sum(total.values())
    num_wrong = sum(map(len, wrong.values()))
    result = {
        "engine": args.engine,
        "version": rig.version,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}",
        "seed": args.seed,
        "requests": num,
        "right": num - num_wrong,
        "right_share": (num - num_wrong) / num,
        "by_case": {case: [total[case] - len(wrong.get(case, ())), total[case]] for case in total},
        "wrong": wrong,
        "evictors_checked": num_evictors,
        **roomy,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    is_right = num_wrong <= num * 0.01 and not roomy["never_full"]["evicted_tokens"]
    return 0 if is_right and roomy["natural_text"]["changed_share"] <= MOST_CHANGED else 1


if __name__ == "__main__":
    sys.exit(main())
