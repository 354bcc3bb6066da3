"""Tests of the parts of a chat's prompt, by templates and through the real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine import load_tokenizer
from inferscope.engine.server.chat import Template, load_template, plain
from inferscope.engine.server.parts import sections_of
from inferscope.engine.server.protocol import ContentPart, Message
from inferscope.engine.tokenizer import Sections
from inferscope.probe.part_labels import MOST_RECORDED_PARTS
from inferscope.records import RequestEvent
from tests.cli.running import inferscope
from tests.engine.server.running import Server
from tests.engine.server.test_records import records, wait_for_end

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOVES_SYSTEM = (
    "{% set first, rest = '', messages %}{% if messages[0].role == 'system' %}"
    "{% set first, rest = '<<' ~ messages[0].content ~ '>>', messages[1:] %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if loop.index0 == 0 %}{{ first }}"
    "{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
SHOUTS = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
STRICT = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('ask something') }}{% endif %}"
    "{% for m in messages %}({{ m.content }}){% endfor %}"
)
CHAT = [
    Message("system", "be brief"),
    Message("user", "what is it"),
    Message("assistant", "a thing"),
    Message("tool", "it weighs 3 kg"),
    Message("user", "how heavy is it"),
]


def template_of(folder: Path, source: str) -> Template:
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return load_template(str(folder))


def cut(messages: list[Message], template: Template = plain) -> list[tuple[str, str]]:
    """Return the spans of a chat's prompt with their text."""
    prompt = template(messages, {})
    write = partial(template, template_args={}, begins_answer=False)
    sections, at = [], 0
    for name, num_chars in sections_of(messages, prompt, write):
        assert num_chars >= 0
        sections.append((name, prompt[at : at + num_chars]))
        at += num_chars
    assert "".join(text for _, text in sections) == prompt
    return sections


def test_turns_are_split_by_role_and_the_last_question_is_user() -> None:
    assert cut(CHAT) == [
        ("system", "system: be brief\n"),
        ("history", "user: what is it\nassistant: a thing\n"),
        ("tools", "tool: it weighs 3 kg\n"),
        ("user", "user: how heavy is it\nassistant:"),
    ]


def test_template_text_around_a_message_belongs_to_it(tmp_path: Path) -> None:
    assert cut(CHAT, template_of(tmp_path, CHATML)) == [
        ("system", "<s><|im_start|>system\nbe brief<|im_end|>\n"),
        (
            "history",
            "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\na thing<|im_end|>\n",
        ),
        ("tools", "<|im_start|>tool\nit weighs 3 kg<|im_end|>\n"),
        ("user", "<|im_start|>user\nhow heavy is it<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_message_moved_by_a_template_is_found_by_its_text(tmp_path: Path) -> None:
    assert cut(CHAT, template_of(tmp_path, MOVES_SYSTEM)) == [
        ("system", "[INST]<<be brief>>"),
        ("history", "what is it[/INST]a thing</s>"),
        ("tools", "it weighs 3 kg</s>"),
        ("user", "[INST]how heavy is it[/INST]"),
    ]


def test_long_chat_is_split_by_turns_and_a_huge_one_by_text_search() -> None:
    turns = [Message("assistant", "look"), Message("tool", "seen")] * 30
    chat = [Message("user", "go"), *turns, Message("user", "so?")]
    sections = cut(chat)
    assert len(sections) == 61
    assert {text for name, text in sections if name == "tools"} == {"tool: seen\n"}
    assert sections[-1] == ("user", "user: so?\nassistant:")
    huge = [*chat[:-1], Message("user", "so? " * 300_000)]
    assert {text for name, text in cut(huge) if name == "tools"} == {
        "seen\nassistant: ",
        "seen\nuser: ",
    }


@pytest.mark.parametrize("labels", [("xy", "xy"), ("xy", "yx")])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_cutting_a_chat_takes_time_in_proportion_to_its_messages(
    labels: tuple[str, str], is_dropped: bool
) -> None:
    def cutting_s(num_messages: int) -> float:
        pair = [
            Message("user", [ContentPart("text", "a", first), ContentPart("text", "b", second)])
            for first, second in labels
        ]
        messages = pair * (num_messages // 2)
        prompt = plain(messages, {})
        if is_dropped:
            prompt = prompt.replace("a", "?")
        began_s = time.thread_time()
        num = len(sections_of(messages, prompt, _never_written))
        assert num == (1 if is_dropped else MOST_RECORDED_PARTS)
        return time.thread_time() - began_s

    few_s = max(cutting_s(1000) for _ in range(2))
    assert min(cutting_s(8000) for _ in range(2)) < 24 * few_s


def _never_written(messages: list[Message]) -> str:
    raise AssertionError("a chat of this size is searched for its texts")


def test_template_that_rejects_partial_chats_uses_text_search(tmp_path: Path) -> None:
    assert cut(CHAT, template_of(tmp_path, STRICT)) == [
        ("system", "(be brief)("),
        ("history", "what is it)(a thing)("),
        ("tools", "it weighs 3 kg)("),
        ("user", "how heavy is it)"),
    ]


def test_undecidable_spans_are_other(tmp_path: Path) -> None:
    shouted = template_of(tmp_path, "{{ messages | length }} messages")
    assert cut(CHAT, shouted) == [("other", "5 messages")]


def test_labels_of_messages_and_of_their_parts_count_before_roles() -> None:
    question = [
        ContentPart("text", "document one", "retrieved"),
        ContentPart("text", "document two", "retrieved"),
        ContentPart("text", "what do they say"),
    ]
    chat = [
        Message("system", "be brief"),
        Message("user", "cite page 3", part="house_rules"),
        Message("user", question),
        Message("assistant", "They", part={"not": "a name"}),
    ]
    assert cut(chat) == [
        ("system", "system: be brief\n"),
        ("house_rules", "user: cite page 3\n"),
        ("retrieved", "user: document one\ndocument two\n"),
        ("user", "what do they say\n"),
        ("other", "assistant: They\nassistant:"),
    ]


MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "assistant", "tool", "bard"]),
        st.one_of(
            st.none(),
            st.text(max_size=9),
            st.lists(
                st.builds(
                    ContentPart,
                    st.just("text"),
                    st.text(max_size=9),
                    st.sampled_from([None, "retrieved", "X", 7]),
                ),
                max_size=4,
            ),
        ),
        st.none(),
        st.none(),
        st.sampled_from([None, None, "retrieved", ""]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Template]:
    sources = (CHATML, MOVES_SYSTEM, SHOUTS)
    return [plain, *(template_of(tmp_path_factory.mktemp("t"), source) for source in sources)]


@given(messages=MESSAGES)
def test_every_character_of_any_chat_is_in_one_span(
    templates: list[Template], messages: list[Message]
) -> None:
    for template in templates:
        cut(messages, template)


# --- over HTTP ------------------------------------------------------------------------------------


def recorded_parts(server: Server, name: str) -> tuple[int, Sections]:
    """Return the recorded prompt tokens and parts of a request."""
    wait_for_end(server, name)
    events = [one for one in records(server, "frontend") if isinstance(one, RequestEvent)]
    (index,) = {one.index for one in events if one.external_id == name}
    (event,) = [one for one in events if one.index == index and one.prompt_tokens is not None]
    assert event.prompt_tokens is not None
    return event.prompt_tokens, event.prompt_parts


def chat(server: Server, name: str, messages: list[Any], **headers: str) -> None:
    body = {"messages": messages, "max_tokens": 3, "temperature": 0}
    status, answer, _ = server.post("/v1/chat/completions", body, {"X-Request-Id": name, **headers})
    assert status == 200, answer


SYSTEM = "You are a canary-77b1 that sings briefly and never in the dark. " * 3
DOCUMENTS = "Coal is found in mines, and so are canaries, of which few come back. " * 6
TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "good day"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": DOCUMENTS, "part": "retrieved"},
            {"type": "text", "text": "where is coal found?"},
        ],
    },
]


def test_a_chats_parts_are_exact_counts_of_its_own_tokens(server: Server) -> None:
    chat(server, "roles", TALK)
    num, parts = recorded_parts(server, "roles")
    tokens = load_tokenizer("builtin").encode
    texts = {
        "system": f"system: {SYSTEM}\n",
        "history": "user: hello\nassistant: good day\n",
        "retrieved": f"user: {DOCUMENTS}\n",
        "user": "where is coal found?\nassistant:",
    }
    assert [name for name, _ in parts] == list(texts)
    assert sum(count for _, count in parts) == num == len(tokens("".join(texts.values())))
    for (name, count), text in zip(parts, texts.values(), strict=True):
        assert abs(count - len(tokens(text))) <= 1, name
    final = server.final("roles")
    assert [(part.name, part.tokens) for part in final.parts] == list(parts)
    assert sum(part.compute_ns for part in final.parts) == final.prefill_ns > 0
    assert sum(part.ttft_ns or 0 for part in final.parts) == final.ttft_ledger_ns["prefill_own"]
    assert sum(part.flops or 0 for part in final.parts) == final.prefill_flops
    costs = {part.name: part.compute_ns for part in final.parts}
    assert max(costs, key=lambda name: costs[name]) == "retrieved"


@pytest.mark.thorough
def test_why_names_the_prompt_part_with_the_highest_cost(server: Server) -> None:
    chat(server, "explained", TALK)
    assert server.final("explained").parts
    done = inferscope("why", "explained", rings=server.rings)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "Of its prompt's compute," in text
    assert "retrieved (" in text


def test_a_system_prompt_that_is_cached_costs_nothing(server: Server) -> None:
    first = [{"role": "system", "content": SYSTEM + "again."}, {"role": "user", "content": "one"}]
    again = [first[0], {"role": "user", "content": "two " + DOCUMENTS[:200]}]
    chat(server, "cold", first)
    chat(server, "warm", again)
    final = server.final("warm")
    system, user = final.parts
    assert system.cached_tokens + user.cached_tokens == final.cached_tokens > 0
    assert user.cached_tokens == 0
    free = system.cached_tokens / system.tokens
    assert free > 0.5
    assert system.compute_ns < (1 - free + 0.1) * system.tokens / user.tokens * user.compute_ns * 2


def test_header_applies_to_any_prompt_and_overrides_roles(server: Server) -> None:
    labels = {"X-InferScope-Parts": "system=4,Bad Name=2,user=100000"}
    chat(server, "header", TALK, **labels)
    assert recorded_parts(server, "header")[1] == (("system", 4), ("other", 2), ("user", 100_000))
    body = {"prompt": "def f(x): return x + 1", "max_tokens": 2, "temperature": 0}
    server.post("/v1/completions", body, {"X-Request-Id": "prompt", **labels})
    final = server.final("prompt")
    assert [part.name for part in final.parts] == ["system", "other", "user"]
    assert sum(part.tokens for part in final.parts) == final.prompt_tokens
    body["prompt"] = ["def f", "def g"]  # type: ignore[assignment]
    server.post("/v1/completions", body, {"X-Request-Id": "several", **labels})
    wait_for_end(server, "several")
    several = [one for one in records(server, "frontend") if isinstance(one, RequestEvent)]
    indices = {one.index for one in several if one.external_id == "several"}
    assert not any(one.prompt_parts for one in several if one.index in indices)


def test_invalid_header_is_logged_once_and_ignored(server: Server) -> None:
    for number in range(3):
        chat(server, f"bad-{number}", TALK, **{"X-InferScope-Parts": "canary-77b1 is my secret"})
    assert recorded_parts(server, "bad-2")[1] == recorded_parts(server, "bad-0")[1] != ()
    # The probe's housekeeping thread logs it.
    end_s = time.monotonic() + 30
    while "X-InferScope-Parts" not in server.said() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert server.said().count("X-InferScope-Parts") == 1


def test_no_text_of_a_chat_is_in_a_ring(server: Server) -> None:
    odd = [
        {"role": "user", "content": "sing", "part": "canary-77b1 in a coal mine"},
        {"role": "user", "content": [{"type": "text", "text": "low", "part": 5}]},
    ]
    chat(server, "odd", odd)
    assert {name for name, _ in recorded_parts(server, "odd")[1]} <= {"other", "user"}
    for secret in _secrets():
        for path in server.rings.glob("served/*.ring"):
            assert secret not in path.read_bytes()
    assert "canary-77b1" not in server.said()


def _secrets() -> Iterator[bytes]:
    yield b"canary-77b1"
    yield b"coal mine"
    yield b"Coal is found"
