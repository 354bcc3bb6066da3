"""Routing of a mixture's tokens: as recorded, against transformers, and as a finding."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from inferscope.engine import EngineOptions, Sampling, load_engine
from inferscope.probe import Probe
from inferscope.records import COLUMNS, ExpertLoad, StepSlices
from tests.engine.checkpoints import VOCAB, prompts, save
from tests.insight.runs import Judged, judge
from tests.probe.fakes import of


def column(raw: bytes, name: str) -> list[int]:
    return np.frombuffer(raw, dtype=COLUMNS[name]).tolist()


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "mixture")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "8")
    return tmp_path / "rings" / "mixture"


@pytest.mark.thorough
def test_recorded_loads_are_those_of_transformers(rings: Path, tmp_path: Path) -> None:
    saved = save("qwen3_moe", tmp_path)
    options = EngineOptions(dtype="float32", token_budget=20)
    engine = load_engine(str(saved.folder), options, open_probe=Probe.open)
    (prompt,) = prompts(1, vocab=VOCAB)
    (output,) = engine.generate([prompt], Sampling(max_tokens=6))
    engine.close()
    engine.probe.close()
    (core,) = rings.glob("*.ring")
    loads, slices = of(ExpertLoad, core), of(StepSlices, core)
    assert [load.step for load in loads] == [each.step for each in slices]
    for load, each in zip(loads, slices, strict=True):
        assert load.tokens == sum(column(each.tokens, "tokens"))
        assert sum(column(load.experts, "experts")) == load.tokens * load.per_token * 2
    known = [*prompt, *output][:-1]
    with torch.inference_mode():
        routed = saved.reference(torch.tensor([known]), output_router_logits=True).router_logits
    chosen = torch.stack(routed).topk(2, dim=-1).indices.flatten()
    summed = np.sum([column(load.experts, "experts") for load in loads], axis=0)
    assert summed.tolist() == chosen.bincount(minlength=8).tolist()


def served(rings: Path, prompt_tokens: list[list[int]]) -> Judged:
    options = EngineOptions(dtype="float32", prefix_cache=False)
    engine = load_engine("random:tiny-moe", options, open_probe=Probe.open)
    engine.generate(prompt_tokens, Sampling(max_tokens=2, ignore_eos=True))
    engine.close()
    engine.probe.close()
    return judge(rings)


def test_repeated_text_is_an_imbalance(rings: Path) -> None:
    found = served(rings, [[5] * 120] * 24)
    assert "expert_imbalance" in found.ids
    assert found.of_engine.findings is not None
    (finding,) = (each for each in found.of_engine.findings if each.id == "expert_imbalance")
    evidence = {number.name: number.value for number in finding.evidence}
    assert evidence["busiest_over_mean"] == pytest.approx(4.0, rel=0.02)  # 8 experts, 2 a token
    assert evidence["even_router_over_mean"] < 1.5
    assert finding.lost_share == 0.0


def test_varied_text_is_none(rings: Path) -> None:
    draw = random.Random(1)
    given = [[draw.randrange(512) for _ in range(120)] for _ in range(24)]
    found = served(rings, given)
    assert found.run.experts.mean_tokens > 1000
    assert "expert_imbalance" not in found.ids


def test_dense_model_has_no_loads(rings: Path) -> None:
    options = EngineOptions(dtype="float32")
    engine = load_engine("random:tiny", options, open_probe=Probe.open)
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    engine.close()
    engine.probe.close()
    (core,) = rings.glob("*.ring")
    assert not of(ExpertLoad, core)
