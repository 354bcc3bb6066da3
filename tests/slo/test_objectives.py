"""What can be an objective, and the errors for what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.errors import BadInput
from inferscope.slo import Objective, Objectives, read_objectives

_DAY_NS = 86400 * 10**9
_WHOLE = """
slos:
  - metric: ttft
    threshold: 500ms
    objective: 99%
    window: 30d
  - {name: ttft, metric: ttft, threshold: 2 s, objective: 0.95, window: 7d, model: big}
  - {name: chat-tbt, metric: tbt, threshold: 200ms, objective: 99.9%, window: 1w, model: small}
  - {metric: availability, objective: 0.999, window: 30d}
  - {metric: goodput, objective: 90 %, window: 1h}
"""
_TTFT = "{metric: ttft, threshold: 1s, objective: 99%, window: 30d}"


def written(folder: Path, text: str) -> Path:
    file = folder / "slo.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def one(**changed: str) -> str:
    fields = {"metric": "ttft", "threshold": "1s", "objective": "99%", "window": "30d"} | changed
    lines = [f"{key}: {value}" for key, value in fields.items() if value]
    return "slos:\n  - " + "\n    ".join(lines)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    assert read_objectives(written(tmp_path, _WHOLE)).all == (
        Objective("ttft", "ttft", 500_000_000, 0.99, 30 * _DAY_NS),
        Objective("ttft", "ttft", 2_000_000_000, 0.95, 7 * _DAY_NS, "big"),
        Objective("chat-tbt", "tbt", 200_000_000, pytest.approx(0.999), 7 * _DAY_NS, "small"),
        Objective("availability", "availability", None, 0.999, 30 * _DAY_NS),
        Objective("goodput", "goodput", None, 0.9, 3600 * 10**9),
    )


def test_a_models_own_objective_takes_the_place_of_the_one_for_all(tmp_path: Path) -> None:
    objectives = read_objectives(written(tmp_path, _WHOLE))
    names = {
        model: [(each.name, each.threshold_ns) for each in objectives.of_model(model)]
        for model in ("big", "small", "unheard of")
    }
    rest = [("availability", None), ("goodput", None)]
    assert names == {
        "big": [("ttft", 2 * 10**9), *rest],
        "small": [("ttft", 500_000_000), ("chat-tbt", 200_000_000), *rest],
        "unheard of": [("ttft", 500_000_000), *rest],
    }
    assert [objectives.excepted(each) for each in objectives.all] == [("big",), (), (), (), ()]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "slos is missing"),
        ("slos: []", 1, "slos has 0 objectives. Give 1 to 100."),
        ("slos: ttft", 1, "slos is 'ttft'. Give a list of sections"),
        ("slos: [ttft]", 1, "slos is a list. Give a list of sections"),
        ("slo: []", 1, "unknown setting slo. Did you mean slos?"),
        ("slos:\n- {}", 1, "slos[1].metric is missing. Give one of: ttft"),
        (one(metric="tfft"), 2, "slos[1].metric is 'tfft'. Did you mean ttft?"),
        (one(metric="3"), 2, "slos[1].metric is 3. There are: ttft"),
        (one(treshold="1s"), 6, "unknown setting slos[1].treshold. Did you mean threshold?"),
        (one(threshold=""), 2, "slos[1].threshold is missing. Give a time"),
        (one(threshold="500"), 3, "slos[1].threshold is 500. Give a time with its unit"),
        (one(threshold="0ms"), 3, "slos[1].threshold is '0ms'. Give a time with its unit"),
        (one(threshold="2d"), 3, "slos[1].threshold is '2d'. Give a time up to 1d"),
        (one(metric="availability"), 3, "slos[1].threshold is '1s'. Give none: availability"),
        (one(objective=""), 2, "slos[1].objective is missing. Give the target share"),
        (one(objective="99"), 4, "slos[1].objective is 99. Give a share below 1"),
        (one(objective="100%"), 4, "slos[1].objective is '100%'. Give a share below 1"),
        (one(objective="0"), 4, "slos[1].objective is 0. Give a share below 1"),
        (one(objective=".nan"), 4, "Give a share below 1"),
        (one(objective="true"), 4, "slos[1].objective is True. Give a share below 1"),
        (one(window=""), 2, "slos[1].window is missing. Give a time from 1m to 366d"),
        (one(window="30s"), 5, "slos[1].window is '30s'. Give a time from 1m to 366d"),
        (one(window="2000000w"), 5, "slos[1].window is '2000000w'. Give a time"),
        (one(window="9" * 400 + "d"), 5, "Give a time with its unit"),
        (one(objective="9" * 4000 + "%"), 4, "Give a share below 1"),
        (one(objective="9" * 5000 + "%"), 4, "a value of more than 4096 characters"),
        (one(window="forever"), 5, "slos[1].window is 'forever'. Give a time with its unit"),
        (one(name="a b"), 6, "slos[1].name is 'a b'. Give up to 63 letters"),
        (one(model="[x]"), 6, "slos[1].model is a list. Give text."),
        (f"slos:\n- {_TTFT}\n- {_TTFT}", 3, "ttft occurs twice for all models"),
        (
            f"slos:\n- {_TTFT}\n- {{name: ttft, metric: availability, objective: 0.9, "
            "window: 1d, model: m}",
            3,
            "ttft is about availability, for other models about ttft",
        ),
        (
            "slos:\n- {metric: goodput, objective: 0.9, window: 1d}",
            2,
            "goodput needs a threshold to meet, and there is none",
        ),
        ("slos: [&a {metric: *a}]", 1, ""),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(BadInput) as raised:
        read_objectives(file)
    assert str(raised.value).startswith(f"{file}:{line}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: f"slos:\n- {t}".encode()))
def test_whatever_is_in_the_file_it_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    file = tmp_path_factory.mktemp("slo") / "slo.yaml"
    file.write_bytes(raw)
    found, message = Objectives(), ""
    try:
        found = read_objectives(file)
    except BadInput as error:
        message = str(error)
    assert bool(found.all) != (str(file) in message)
