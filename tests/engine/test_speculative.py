"""Tests that speculation changes the steps and nothing of the output."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine import Engine, EngineOptions, Sampling, core, load_engine
from inferscope.engine.kv import ROOT, BlockPool
from inferscope.engine.load import load_model
from inferscope.engine.request import Request
from inferscope.engine.speculative import NgramIndex, verified
from inferscope.errors import BadInput
from inferscope.exporting import load_exporter
from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.insight.overlaps import SharedSteps
from inferscope.probe import Probe
from inferscope.readers import RingSource
from inferscope.records import DECODE, DRAFT, RECOMPUTED, VERIFY
from tests.engine.checkpoints import VOCAB, Checkpoint, prompts
from tests.engine.steps import commit, make_request, make_scheduler
from tests.engine.test_core import Spy, drain
from tests.engine.test_correctness import (
    PROMPTS,
    WAYS,
    assert_greedy,
    expected_outputs,
    serve,
)
from tests.export_contract import check

Build = Callable[..., Engine]
NGRAM: dict[str, Any] = {"speculative": "ngram"}
POOR_DRAFT: dict[str, Any] = {"speculative": "draft", "draft_model": "random:tiny,layers=1"}
"""Weights of its own, so that nearly all of its proposals are rejected."""
EQUAL_DRAFT: dict[str, Any] = {"speculative": "draft", "draft_model": "random:tiny"}
"""The same weights as those of the target, so that all of its proposals are accepted."""
TIGHT: dict[str, Any] = {"num_blocks": 50, "block_tokens": 4, "token_budget": 23}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["ngram", "poor draft", "equal draft"])
def test_output_equals_transformers(checkpoint: Checkpoint, way: str, method: str) -> None:
    of_method = {
        "ngram": NGRAM,
        "poor draft": {**POOR_DRAFT, "draft_model": f"random:tiny,layers=1,vocab={VOCAB}"},
        "equal draft": {**EQUAL_DRAFT, "draft_model": str(checkpoint.folder)},
    }[method]
    options = EngineOptions(dtype="float32", **of_method, **WAYS[way])
    engine = load_engine(str(checkpoint.folder), options)
    engine.probe = spy = Spy()
    outputs, requests = serve(engine)
    expected = expected_outputs(checkpoint.reference)
    for prompt, output, wanted in zip(PROMPTS, outputs, expected, strict=True):
        assert len(output) == len(wanted)
        if output != wanted:
            assert_greedy(checkpoint.reference, prompt, output)
    assert_accounted(spy, requests)
    assert_published_tokens_are_known(engine.pool, requests)
    assert engine.pool.num_used == 0
    assert any(request.cached_tokens for request in requests) == ("prefix" in way or "all" in way)


def assert_accounted(spy: Spy, requests: list[Request]) -> None:
    """Assert the law: computed = prompt + output - 1 - cached + recomputed + rejected."""
    for request in requests:
        rows = rows_of(spy, request.index)
        assert all(row["accepted"] <= row["proposed"] for row in rows)
        assert all(
            row["proposed"] == row["tokens"] == row["sampled"] if row["phase"] == VERIFY
            else row["proposed"] == 0 for row in rows
        )  # fmt: skip
        computed = sum(row["tokens"] for row in rows if row["phase"] != DRAFT)
        recomputed = sum(row["tokens"] for row in rows if row["flags"] & RECOMPUTED)
        rejected = sum(row["proposed"] - row["accepted"] for row in rows)
        owed = request.num_prompt + request.num_output - 1 - request.cached_tokens
        assert computed == owed + recomputed + rejected
        assert request.recomputed_tokens == recomputed


def rows_of(spy: Spy, index: int) -> list[dict[str, int]]:
    """Return the recorded rows of one request."""
    rows = []
    for _, fields in spy.of("slices"):
        zeros = (0,) * len(fields["requests"])
        columns = zip(
            fields["requests"],
            fields["phases"],
            fields["tokens"],
            fields["flags"],
            fields["sampled"],
            fields["proposed"] or zeros,
            fields["accepted"] or zeros,
            strict=True,
        )
        names = ("phase", "tokens", "flags", "sampled", "proposed", "accepted")
        rows += [dict(zip(names, row, strict=True)) for of, *row in columns if of == index]
    return rows


def assert_published_tokens_are_known(pool: BlockPool, requests: list[Request]) -> None:
    """Assert that each published block holds tokens of a request: no rejected draft."""
    known = [tuple(request.tokens) for request in requests]
    before = {ROOT: ()}
    for (chain, tokens), (_, serial) in sorted(pool._published.items(), key=lambda item: item[1]):
        if chain in before:  # else its predecessor was evicted
            before[serial] = (*before[chain], *tokens)
            width = len(before[serial])
            assert any(each[:width] == before[serial] for each in known)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [NGRAM, POOR_DRAFT, EQUAL_DRAFT])
@pytest.mark.parametrize("pool", [{}, TIGHT])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=30, temperature=0.3, seed=5),
        Sampling(max_tokens=30, temperature=0.3, top_k=8, top_p=0.9, seed=6),
        Sampling(max_tokens=30, min_tokens=20, temperature=0.3, stop_token_ids=tuple(range(99))),
    ],
)
def test_sampled_output_equals_that_without_speculation(
    tiny_engine: Build, method: dict[str, Any], pool: dict[str, Any], sampling: Sampling
) -> None:
    given = prompts(8, vocab=64)
    expected = tiny_engine(**pool).generate(given, sampling)
    engine = tiny_engine(num_speculative_tokens=3, **method, **pool)
    engine.probe = spy = Spy()
    assert engine.generate(given, sampling) == expected
    verified = [fields for _, fields in spy.of("slices") if fields["proposed"]]
    assert any(any(fields["accepted"]) for fields in verified)
    is_rejected = any(fields["proposed"] != fields["accepted"] for fields in verified)
    assert is_rejected or method is EQUAL_DRAFT


@pytest.fixture
def foresight(tiny_engine: Build, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace all proposals by the tokens that the model will generate; return these."""
    (output,) = tiny_engine().generate([[1, 2, 3]], Sampling(max_tokens=20))

    class Foresight(NgramIndex):
        def propose(self, tokens: Sequence[int], num: int) -> list[int]:
            return output[len(tokens) - 3 :][:num]

    monkeypatch.setattr(core, "NgramIndex", Foresight)
    return output


def test_accepted_drafts_make_fewer_steps_with_several_tokens_each(
    tiny_engine: Build, foresight: list[int]
) -> None:
    engine = tiny_engine(speculative="ngram")
    engine.probe = spy = Spy()
    engine.submit([1, 2, 3], Sampling(max_tokens=20))
    outputs = drain(engine)
    assert [token for output in outputs for token in output.tokens] == foresight
    assert [len(output.tokens) for output in outputs] == [1, 5, 5, 5, 4]
    assert [fields["tokens"] for _, fields in spy.of("emitted")] == [[1], [5], [5], [5], [4]]
    _, last = spy.of("slices")[-1]
    assert last["phases"] == (DECODE, VERIFY)
    assert (last["tokens"], last["sampled"]) == ((1, 3), (1, 3))
    assert (last["proposed"], last["accepted"]) == ((0, 3), (0, 3))
    assert engine.stats().generated_tokens == 20


def test_drafts_behind_a_stop_are_rejected(tiny_engine: Build, foresight: list[int]) -> None:
    for stop in sorted(set(foresight)):
        engine = tiny_engine(speculative="ngram")
        engine.probe = spy = Spy()
        engine.submit([1, 2, 3], Sampling(max_tokens=20, stop_token_ids=(stop,)))
        outputs = drain(engine)
        ends = foresight.index(stop) + 1
        assert [token for output in outputs for token in output.tokens] == foresight[:ends]
        assert spy.finishes() == [(0, "stop")]
        assert_accounted(spy, [outputs[-1].request])


def test_aborts_at_random_moments_leak_no_block(tiny_engine: Build) -> None:
    draw = random.Random(3)
    engine = tiny_engine(speculative="ngram", **TIGHT)
    ids = [engine.submit(prompt, Sampling(max_tokens=60)) for prompt in prompts(12, vocab=32)]
    while engine.has_work:
        engine.step()
        if draw.random() < 0.3:
            engine.cancel(draw.choice(ids))
    assert engine.pool.num_used == 0
    assert not any(map(engine.pool.references, range(engine.pool.num_blocks)))


def test_draft_leaves_a_token_and_a_block_to_each_request_behind() -> None:
    scheduler = make_scheduler(num_blocks=7, token_budget=6, prefix_cache=False)
    requests = [make_request(index, [index] * 4) for index in range(2)]
    for request in requests:
        scheduler.enqueue(request)
        commit(scheduler, scheduler.schedule())
    requests[0].draft = [0] * 12
    plan = scheduler.schedule()
    assert [(part.num_tokens, part.num_drafts) for part in plan.slices] == [(5, 4), (1, 0)]
    commit(scheduler, plan)
    scheduler._token_budget = 32
    requests[0].draft = [0] * 32
    plan = scheduler.schedule()
    # The second request has 3 slots left, and may yet need a block.
    assert not plan.preempted
    assert requests[0].computed + plan.slices[0].num_tokens == 4 * (7 - 2 - 1)
    assert scheduler.pool.num_available == 1


def test_preempted_request_loses_its_draft() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_cache=False)
    first, second = (make_request(index, [index] * 7) for index in range(2))
    for request in (first, second):
        scheduler.enqueue(request)
    for _ in range(2):
        commit(scheduler, scheduler.schedule())
    second.draft = [0, 0]
    plan = scheduler.schedule()
    assert plan.preempted == [second]
    assert second.todo == len(second.tokens)


@given(
    draft=st.lists(st.integers(0, 2), max_size=5), chosen=st.lists(st.integers(0, 2), min_size=6)
)
def test_verified_tokens_are_those_of_one_by_one_decoding(
    draft: list[int], chosen: list[int]
) -> None:
    # Row i is valid only if its input, the draft before it, is the token chosen there.
    added = verified(draft, chosen[: len(draft) + 1])
    assert 1 <= len(added) <= len(draft) + 1
    assert added == chosen[: len(added)]
    assert added[:-1] == draft[: len(added) - 1]
    assert len(added) == len(draft) + 1 or added[-1] != draft[len(added) - 1]


def looked_up(tokens: list[int], num: int) -> list[int]:
    """Return the proposal by a search of all tokens."""
    for size in (2, 1):
        tail = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tail and len(tail) == size:
                extended = list(tokens)
                for _ in range(num):
                    extended.append(extended[len(extended) - len(tokens) + end])
                return extended[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    num=st.integers(0, 6),
    cuts=st.sets(st.integers(1, 29)),
)
def test_proposal_follows_the_latest_occurrence_of_the_last_tokens(
    tokens: list[int], num: int, cuts: set[int]
) -> None:
    index = NgramIndex()
    for end in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        assert index.propose(tokens[:end], num) == looked_up(tokens[:end], num)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "magic"}, "speculative 'magic' is unknown. Use ngram, draft"),
        ({"draft_model": "random:tiny"}, "draft_model is 'random:tiny', and speculative is None"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        (
            {"speculative": "ngram", "num_speculative_tokens": 8, "token_budget": 8},
            "verifying 8 proposed tokens takes 9 tokens of a step, and token_budget is 8",
        ),
    ],
)
def test_impossible_speculation_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        EngineOptions(**options)


class Run:
    """Folded records of an engine that ran to its end."""

    def __init__(self, rings: Path) -> None:
        self.steps: list[FinalStep] = []
        lines = io.BytesIO()
        exporter = load_exporter("jsonl")(lines)
        watch = RunSummarizer()
        source = RingSource(
            lambda: rings.glob("*/*.ring"),
            name="",
            sinks=(watch, exporter, self),
            listen=watch.on_record,
        )
        while not source.has_ended:
            source.advance()
        (view,) = source.collector.engines.values()
        self.finals = list(view.lives.finished)
        exporter.close(source.collector.devices(), source.collector.totals())
        self.contract = check(map(json.loads, lines.getvalue().splitlines()))
        (found,) = findings(watch)
        self.findings = {finding.id: finding for finding in found.findings or ()}
        source.close()

    def on_step(self, step: FinalStep) -> None:
        """Keep a final step."""
        self.steps.append(step)

    def on_request(self, request: FinalRequest) -> None:
        """Ignore a final request: the collector keeps it."""


def defeated(folder: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]) -> Run:
    """Serve random prompts with drafts, which are nearly all rejected."""
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("INFERSCOPE_DIR", str(folder))
    options = EngineOptions(dtype="float32", max_running=16, num_speculative_tokens=8, **method)
    engine = load_engine("random:tiny", options, open_probe=Probe.open)
    draw = random.Random(0)
    given = [[draw.randrange(512) for _ in range(300)] for _ in range(24)]
    engine.generate(given, Sampling(max_tokens=60, temperature=1.0))
    engine.close()
    engine.probe.close()
    run = Run(folder)
    assert run.contract.breaches == []
    assert run.contract.num_requests == 24
    for final in run.finals:
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert (final.ledger_ns.get("draft", 0) > 0) == (method is POOR_DRAFT)
        own, name = SharedSteps(), final.request_id
        for step in run.steps:
            if name in step.request_ids:
                own.add(step, name)
        # One token of the output each: that is what `why` divides the decode by.
        assert own.computing({}, is_prefill=False).num_steps <= final.output_tokens
    return run


@pytest.mark.thorough
@pytest.mark.parametrize("method", [NGRAM, POOR_DRAFT])
def test_random_prompts_that_defeat_drafts_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    for attempt in range(4):  # the cost of a step is this machine's, which others use too
        run = defeated(tmp_path / str(attempt), monkeypatch, method)
        if "costly_speculation" in run.findings:
            break
    evidence = {number.name: number.value for number in run.findings["costly_speculation"].evidence}
    assert evidence["proposed_tokens"] > 1000
    assert evidence["accepted_tokens"] < 0.02 * evidence["proposed_tokens"]
    assert evidence["token_time_with_over_without"] > 1.05


@pytest.mark.parametrize(
    ("model", "draft_model", "message"),
    [
        ("random:tiny", None, "random:tiny has no draft model of its own"),
        ("random:tiny", "random:tiny,vocab=300", "a vocabulary of 300 tokens, .* one of 512"),
        ("random:tiny", "random:tiny,positions=64", "has 64 positions, .* would use 2048"),
    ],
)
def test_draft_model_that_does_not_fit_is_refused(
    model: str, draft_model: str | None, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_engine(model, EngineOptions(speculative="draft", draft_model=draft_model))


def test_pool_is_sized_for_the_keys_of_both_models() -> None:
    options = EngineOptions(dtype="float32", **POOR_DRAFT)
    model = load_model("random:tiny", options)
    plain = load_model("random:tiny", EngineOptions(dtype="float32"))
    assert model.kv_token_bytes == plain.kv_token_bytes * 3 // 2  # one layer beside two


def test_equal_draft_model_is_always_accepted_and_has_steps_of_its_own(tiny_engine: Build) -> None:
    engine = tiny_engine(prefix_cache=False, **EQUAL_DRAFT)
    engine.probe = spy = Spy()
    engine.submit([1, 2, 3], Sampling(max_tokens=11))
    outputs = drain(engine)
    assert [len(output.tokens) for output in outputs] == [1, 5, 5]
    assert [step for step, _ in spy.of("plan")] == [1, 3, 5]
    assert [(step, fields["mode"]) for step, fields in spy.of("start")] == [
        (0, "draft"), (1, "eager"), (2, "draft"), (3, "eager"), (4, "draft"), (5, "eager")
    ]  # fmt: skip
    rows = dict(spy.of("slices"))
    drafting = [rows[step] for step in (0, 2, 4)]
    assert all(fields["phases"] == (DRAFT,) for fields in drafting)
    # The prompt; then the last two known tokens and three of four proposed ones.
    assert [(fields["contexts"], fields["tokens"]) for fields in drafting] == [
        ((0,), (3,)), ((2,), (5,)), ((7,), (5,))
    ]  # fmt: skip
    assert [fields["sampled"] for fields in drafting] == [(0,), (4,), (4,)]


def test_draft_model_reads_a_prefix_hit_from_the_cache(tiny_engine: Build) -> None:
    engine = tiny_engine(num_speculative_tokens=1, **EQUAL_DRAFT)
    prompt = list(range(40))
    first = engine.generate([prompt], Sampling(max_tokens=13))
    engine.probe = spy = Spy()
    assert engine.generate([prompt], Sampling(max_tokens=13)) == first
    assert spy.of("admitted")[0][1]["cached_tokens"] == 32
    verified = [fields for _, fields in spy.of("slices") if fields["proposed"]]
    assert verified
    assert all(fields["proposed"] == fields["accepted"] for fields in verified)
