from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscope.engine.server.chat import load_template
from inferscope.engine.server.errors import ApiError
from inferscope.engine.server.protocol import (
    MOST_CONTAINERS,
    ChatRequest,
    ContentPart,
    Message,
    parse,
)
from inferscope.errors import BadInput

CHAT = [
    Message("system", "be brief"),
    Message("user", [ContentPart("text", "one"), ContentPart("text", "two")]),
]
SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize("model", ["builtin", "random:tiny"])
def test_a_model_without_a_template_gets_lines(model: str) -> None:
    assert load_template(model)(CHAT, {}) == "system: be brief\nuser: one\ntwo\nassistant:"


@pytest.mark.parametrize("place", ["settings", "by name", "file"])
def test_a_checkpoints_own_template_is_used(tmp_path: Path, place: str) -> None:
    settings: dict[str, object] = dict(TOKENS)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(SOURCE, encoding="utf-8")
    elif place == "settings":
        settings["chat_template"] = SOURCE
    else:
        settings["chat_template"] = [{"name": "default", "template": SOURCE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = load_template(str(tmp_path))
    text = template(CHAT, {"mood": "!", "messages": "not these"})
    assert text == "<s><system>be brief</s><user>one\ntwo</s><assistant>!"


def with_calls(*arguments: object, **message: object) -> list[Message]:
    """Return a chat as a client sends it, with a call for each of the arguments."""
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "find", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, **message},
        {"role": "tool", "tool_call_id": "c0", "name": "find", "content": "found"},
    ]
    return parse(json.dumps({"messages": turns}).encode(), ChatRequest).messages


CALLS = with_calls('{"a": "é", "b": [1, 2]}', "not JSON", "[1]", {"c": None})


def test_calls_are_lines_without_a_template_that_mentions_them(tmp_path: Path) -> None:
    written = 'I look.\nfind({"a": "é", "b": [1, 2]})\nfind(not JSON)\nfind([1])\nfind({"c": null})'
    text = load_template("builtin")(CALLS, {})
    assert text == f"user: go\nassistant: {written}\ntool: found\nassistant:"
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    text = load_template(str(tmp_path))(CALLS, {})
    assert text == f"<user>go<assistant>{written}<tool>found"


def test_a_template_that_mentions_calls_writes_them(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }} {{ m.tool_call_id }}>{{ m.content }}"
        "{% for call in m.tool_calls %}[{{ call.id }} {{ call.type }} {{ call.function.name }} "
        "{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    assert load_template(str(tmp_path))(CALLS, {}) == (
        '<user >go<assistant >I look.[c0 function find {"a": "é", "b": [1, 2]}]'
        '[c1 function find "not JSON"][c2 function find "[1]"][c3 function find {"c": null}]'
        "<tool c0>found"
    )


def test_a_call_in_the_former_field_is_a_call_too() -> None:
    chat = with_calls(content=None, function_call={"name": "old", "arguments": "{}"})
    assert "\nassistant: old({})\n" in load_template("builtin")(chat, {})


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (['{"a": [' + "[]," * (MOST_CONTAINERS // 2) + "1]}"] * 2, 413, "too many lists"),
        (['{"a": ' + "[" * 9000 + "]" * 9000 + "}"], 400, "nested too deeply"),
        ([7], 400, "arguments"),
    ],
)
def test_arguments_of_calls_are_limited_as_a_body_is(
    arguments: list[object], status: int, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        with_calls(*arguments)
    assert caught.value.status == status


def test_exception_raised_by_a_template_is_a_client_error(tmp_path: Path) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        load_template(str(tmp_path))(CHAT, {})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        (
            "{% for m in messages %}{% generation %}[{{ m.role }}]{% endgeneration %}{% endfor %}",
            "[system][user]",
        ),
        ("{{ {'b': '<ä>', 'a': 1} | tojson }}", '{"b": "<ä>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%Y')[:1] }}", "2"),
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    assert load_template(str(tmp_path))(CHAT, {}) == text


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[9].x.y }}", "{{ nothing() }}", "{{ {}['a'].b['c'] }}"]
)
def test_any_failure_in_a_template_is_a_client_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(ApiError) as caught:
        load_template(str(tmp_path))(CHAT, {})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"one\n{% if %}", "broken in line 2"),
        (b"{{ 1 | no_such_filter }}", "no_such_filter"),
        (b"\xff", "not UTF-8 text"),
    ],
)
def test_broken_template_error_is_one_line(tmp_path: Path, source: bytes, message: str) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(source)
    with pytest.raises(BadInput, match=message) as caught:
        load_template(str(tmp_path))
    assert "\n" not in str(caught.value)
