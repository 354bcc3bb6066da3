"""The hooks of llama-cpp-python, on a stand-in: a class of its `Llama`'s shape, not the package.

What the stand-in does follows the package's published source: the prefix that the cache keeps, the
batches of `eval`, the generator that is sent nothing, drafts and their verification.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import inferscope
from inferscope.adapters import llama_cpp, recorder
from inferscope.records import StepSlices
from tests.adapters.exported import Exported
from tests.adapters.interrupts import Interrupts
from tests.probe.fakes import of

EOS = 0


class Llama:
    """Chooses the next token by adding one; drafts by the same rule, wrong now and then."""

    def __init__(self, drafts: Callable[[int], list[int]] | None = None) -> None:
        self.model_path = "/models/stand-in.gguf"
        self.n_batch = 8
        self.n_tokens = 0
        self.input_ids = [0] * 512
        self._drafts = drafts
        self.logits_processor: Callable[[], object] = lambda: None

    def eval(self, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), self.n_batch):
            batch = tokens[at : at + self.n_batch]
            self.input_ids[self.n_tokens : self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)

    def generate(
        self, tokens: Sequence[int], reset: bool = True
    ) -> Generator[int, Sequence[int] | None, None]:
        tokens = list(tokens)
        if reset:
            kept = 0
            while kept < min(self.n_tokens, len(tokens) - 1) and (
                self.input_ids[kept] == tokens[kept]
            ):
                kept += 1
            self.n_tokens, tokens = kept, tokens[kept:]
        at = self.n_tokens + len(tokens) - 1
        while True:
            self.eval(tokens)
            self.logits_processor()
            while at < self.n_tokens:
                token = (self.input_ids[at] + 1) % 100
                at += 1
                yield token
                tokens = [token]
                if at < self.n_tokens and token != self.input_ids[at]:
                    self.n_tokens = at
                    break
            if self._drafts is not None:
                tokens += self._drafts(token)

    def create_completion(
        self, prompt: list[int], suffix: None = None, max_tokens: int = 16
    ) -> Any:
        out = []
        for token in self.generate(prompt):
            out.append(token)
            if token == EOS or len(out) >= max_tokens:
                break
        return out


Llama.__module__ = "llama_cpp.llama"


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "here")
    before = dict(vars(Llama))
    yield
    assert llama_cpp._session is None
    assert dict(vars(Llama)) == before


def test_completions_are_unchanged_and_every_token_is_recorded(tmp_path: Path) -> None:
    prompts = [[*range(10, 30)], [*range(10, 30), 31, 32], [*range(60, 95)], [98]]

    def go(llama: Llama) -> list[Any]:
        return [llama.create_completion(prompt, max_tokens=9) for prompt in prompts]

    expected = go(Llama())
    llama = Llama()
    with inferscope.observe(llama):
        assert go(llama) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    rows = list(exported.requests.values())
    assert [row["prompt_tokens"] for row in rows] == [20, 22, 35, 1]
    assert [row["cached_tokens"] for row in rows] == [0, 20, 0, 0]
    assert [row["output_tokens"] for row in rows] == [9, 9, 6, 2]
    assert [row["finish"] for row in rows] == ["length", "length", "stop", "stop"]
    assert all(exported.surplus(name) == 0 for name in exported.requests)


def test_a_second_llama_is_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_engines", recorder.Engines())
    first, second = Llama(), Llama()
    second.model_path = "/models/another.gguf"
    with inferscope.observe(first), inferscope.observe(second):
        for llama in (first, second, first):
            llama.create_completion([1, 2, 3], max_tokens=4)
    assert len(Exported(tmp_path / "here").requests) == 2
    exported = Exported(tmp_path / "here-2")
    exported.check_sums()
    assert len(exported.requests) == 1


def test_drafts_are_verified_in_the_step_of_the_token_before(tmp_path: Path) -> None:
    def drafts(token: int) -> list[int]:
        return [token + 1, token + 2, 7]  # two right, one wrong

    expected = Llama().create_completion([1, 2, 3], max_tokens=13)
    llama = Llama(drafts)
    with inferscope.observe(llama) as seen:
        assert llama.create_completion([1, 2, 3], max_tokens=13) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    ((name, counts),) = exported.tokens.items()
    judged = [each for each in of(StepSlices, seen.path) if each.proposed]
    accepted = sum(sum(each.accepted[::2]) for each in judged)
    assert counts["verify"] == 3 * len(judged) > 0
    assert accepted == 2 * len(judged)
    assert exported.surplus(name) == -accepted


def test_a_run_left_early_is_over_and_another_llama_is_not_seen(tmp_path: Path) -> None:
    llama, other = Llama(), Llama()
    with inferscope.observe(llama):
        run = llama.generate([1, 2, 3])
        assert [next(run), next(run)] == [4, 5]
        other.create_completion([5, 6])
        run.close()
    exported = Exported(tmp_path)
    (row,) = exported.requests.values()
    assert (row["output_tokens"], row["finish"]) == (2, "stop")


@pytest.mark.parametrize("is_run", [True, False])
@pytest.mark.parametrize("is_observed", [True, False])
def test_what_another_llama_evaluates_within_a_run_is_not_the_runs(
    tmp_path: Path, is_run: bool, is_observed: bool
) -> None:
    other = Llama()

    def ask(*_: int) -> list[int]:
        if is_run:
            other.create_completion([7], max_tokens=2)
        else:
            other.eval([7])
        return []

    llama = Llama(drafts=ask)
    llama.logits_processor = ask
    expected = Llama().create_completion([1, 2, 3], max_tokens=4)
    with (
        inferscope.observe(other) if is_observed else contextlib.nullcontext(),
        inferscope.observe(llama),
    ):
        assert llama.create_completion([1, 2, 3], max_tokens=4) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    (name,) = (name for name, row in exported.requests.items() if row["prompt_tokens"] == 3)
    assert exported.requests[name]["output_tokens"] == 4
    assert exported.tokens[name] == {"prefill": 3, "decode": 3}
    others = [row for row in exported.requests.values() if row["prompt_tokens"] != 3]
    assert len(others) == (7 if is_run and is_observed else 0)


class Stop(Exception):
    pass


def _leaves_early(llama: Llama) -> None:
    llama.create_completion([1, 2, 3], max_tokens=2)


def _throws(llama: Llama) -> None:
    run = llama.generate([1, 2, 3])
    next(run)
    with contextlib.suppress(Stop):
        run.throw(Stop())


def _fails(llama: Llama) -> None:
    llama.n_batch = 0
    with contextlib.suppress(ValueError):
        llama.create_completion([1, 2, 3])


@pytest.mark.parametrize("use", [_leaves_early, _throws, _fails])
def test_a_model_is_freed_with_its_last_reference(use: Callable[[Llama], None]) -> None:
    class Module(ModuleType):
        Llama = Llama

    llama_cpp.observe_module(Module("llama_cpp.llama"))
    gc.disable()
    try:
        llama = Llama()
        use(llama)
        freed = weakref.ref(llama)
        del llama
        assert freed() is None
    finally:
        gc.enable()
        assert llama_cpp._session is not None
        llama_cpp._session.close()
        llama_cpp._session = None


def test_what_is_thrown_into_a_run_reaches_the_engine(tmp_path: Path) -> None:
    class Answering(Llama):
        def generate(
            self, tokens: Sequence[int], reset: bool = True
        ) -> Generator[int, Sequence[int] | None, None]:
            self.eval(tokens)
            try:
                yield 5
            except Stop:
                self.eval([5])
                yield 6

    with inferscope.observe(llama := Answering()):
        run = llama.generate([1, 2, 3])
        assert (next(run), run.throw(Stop()), next(run, None)) == (5, 6, None)
        run = llama.generate([1, 2, 3])
        next(run)
        with pytest.raises(KeyboardInterrupt):
            run.throw(KeyboardInterrupt())
    exported = Exported(tmp_path)
    exported.check_sums()
    ends = [(row["output_tokens"], row["finish"]) for row in exported.requests.values()]
    assert ends == [(2, "stop"), (1, "client_cancel")]


def test_interrupts_at_all_lines_of_a_run_that_begins_cost_no_recorder() -> None:
    begins = {"generate", "_begin", "__init__"}
    interrupts = Interrupts(
        lambda code: code.co_name in begins and code.co_filename == llama_cpp.__file__
    )
    places = interrupts.places
    llama = Llama()

    def is_interrupted() -> bool:
        with contextlib.closing(llama.generate([10, 11, 12])) as run:
            return interrupts.stop(lambda: next(run))

    with inferscope.observe(llama):
        recorders = llama_cpp._session.recorders
        (only,) = recorders._open
        while is_interrupted():
            assert only.model.free == recorders._open == [only], list(places)[-1]
            assert only.probe.live_requests == [], list(places)[-1]
    assert len(places) > 20


@pytest.mark.parametrize("hook", ["eval_begins", "eval_ends", "yields", "ends", "_judge"])
def test_a_fault_in_any_hook_changes_nothing_and_is_reported_once(
    hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_args: object) -> None:
        raise ZeroDivisionError("a hook's own fault")

    expected = Llama().create_completion([1, 2, 3])
    monkeypatch.setattr(llama_cpp.Run, hook, fails)
    llama = Llama()
    with inferscope.observe(llama):
        assert llama.create_completion([1, 2, 3]) == expected
        assert llama.create_completion([1, 2, 3]) == expected
    lines = [record for record in caplog.records if record.name == "inferscope"]
    assert len(lines) == 1
