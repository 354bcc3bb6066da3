"""Tests of the HTTP API: responses, streams and errors."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inferscope.engine import EngineOptions, Sampling, load_engine, load_tokenizer
from tests.cli.running import inferscope
from tests.engine.server.running import Server, Stream, in_background

if TYPE_CHECKING:
    import openai

PROMPT = "def main(argv"
ROUNDING = 1e-3
"""Difference of a token's log probability between batches of different sizes."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    import openai  # the other test workers do not need it

    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def test_openai_completion_streams_the_same_text_that_it_returns_whole(
    client: openai.OpenAI,
) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=5)
    pieces = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, seed=5, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    usage = pieces.pop()
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(whole.choices[0].text) > 5
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens > 3


def test_openai_chat_takes_parts_and_streams(client: openai.OpenAI) -> None:
    plain: Any = [{"role": "user", "content": "import os"}]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "import os"}]}]
    whole = client.chat.completions.create(
        model="tiny", messages=plain, max_completion_tokens=9, temperature=0
    )
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=parts, max_tokens=9, temperature=0, stream=True
        )
    )
    assert whole.choices[0].message.role == "assistant"
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"


def test_openai_reads_log_probabilities_of_completions(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": PROMPT + " # é", "max_tokens": 20, "logprobs": 3}
    for sampling in ({"temperature": 0}, {"temperature": 1.2, "seed": 5, "top_p": 0.9}):
        whole = client.completions.create(**body, **sampling)
        choice = whole.choices[0]
        found = choice.logprobs
        assert found is not None
        tokens, values, tops, offsets = columns_of(found)
        assert whole.usage is not None
        lengths = {len(column) for column in (tokens, values, tops, offsets)}
        assert lengths == {whole.usage.completion_tokens}
        for token, value, top, begin in zip(tokens, values, tops, offsets, strict=True):
            assert top[token] == value <= max(top.values())
            assert len(top) in (3, 4)
            assert sum(map(math.exp, top.values())) <= 1.0001
            if not token.startswith(("bytes:", "<|")):
                assert choice.text[begin:].startswith(token)
        columns: list[list[Any]] = [[], [], [], []]
        for chunk in client.completions.create(**body, **sampling, stream=True):
            if (piece := chunk.choices[0].logprobs) is not None:
                for column, more in zip(columns, columns_of(piece), strict=True):
                    column += more
        assert (columns[0], columns[3]) == (tokens, offsets)
        assert columns[1] == pytest.approx(values, abs=ROUNDING)
        for top, other in zip(columns[2], tops, strict=True):
            assert sorted(top.values()) == pytest.approx(sorted(other.values()), abs=ROUNDING)
    plain = client.completions.create(**{**body, "logprobs": None, "temperature": 0})
    assert plain.choices[0].logprobs is None


def columns_of(found: Any) -> tuple[list[str], list[float], list[dict[str, float]], list[int]]:
    return found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset


def test_openai_reads_log_probabilities_of_chats(client: openai.OpenAI) -> None:
    body: Any = {
        "model": "tiny", "messages": [{"role": "user", "content": "import os"}], "n": 2,
        "max_tokens": 12, "temperature": 0.8, "seed": 2, "logprobs": True,
    }  # fmt: skip
    for num in (None, 0, 4):
        asked = body if num is None else {**body, "top_logprobs": num}
        whole = client.chat.completions.create(**asked)
        rows: list[list[Any]] = [[], []]
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            rows[choice.index] = choice.logprobs.content
            for row in choice.logprobs.content:
                assert len(row.top_logprobs) == (num or 0)
                likeliest = [one.logprob for one in row.top_logprobs]
                assert likeliest == sorted(likeliest, reverse=True)
                assert row.logprob <= max(likeliest, default=0.0)
            content = b"".join(
                bytes(row.bytes or ())
                for row in choice.logprobs.content
                if not row.token.startswith("<|")
            )
            assert content.decode(errors="replace") == choice.message.content
        streamed: list[list[Any]] = [[], []]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for piece in chunk.choices:
                if piece.logprobs is not None:
                    streamed[piece.index] += piece.logprobs.content or []
        for found, expected in zip(streamed, rows, strict=True):
            assert [row.bytes for row in found] == [row.bytes for row in expected]
            logprobs = [row.logprob for row in expected]
            assert [row.logprob for row in found] == pytest.approx(logprobs, abs=ROUNDING)
        assert whole.usage is not None
        assert sum(map(len, rows)) == whole.usage.completion_tokens


def test_a_stop_string_ends_log_probabilities_with_its_last_token(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0}
    _, answer, _ = server.post("/v1/completions", body)
    text = answer["choices"][0]["text"]
    _, stopped, _ = server.post("/v1/completions", {**body, "stop": text[9:15]})
    num = stopped["usage"]["completion_tokens"]
    assert num < 40
    found = stopped["choices"][0]["logprobs"]
    assert found["tokens"] == answer["choices"][0]["logprobs"]["tokens"][:num]
    assert [set(top) for top in found["top_logprobs"]] == [{token} for token in found["tokens"]]


def test_openai_sends_back_calls_of_tools(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
    }  # fmt: skip
    messages: Any = [
        {"role": "user", "content": "how warm is it"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0
    )
    written = (
        'user: how warm is it\nassistant: weather({"city": "Zürich"})\ntool: 18 degrees\nassistant:'
    )
    same = client.completions.create(model="tiny", prompt=written, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage is not None
    assert same.usage is not None
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, top_p=1.5)
    assert caught.value.param == "top_p"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_tokens_are_those_of_the_engine_in_process(server: Server) -> None:
    engine = load_engine("builtin", EngineOptions(dtype="float32"))
    tokenizer = load_tokenizer("builtin")
    prompt = tokenizer.encode(PROMPT)
    for temperature, seed in ((0.0, 0), (0.9, 11)):
        (tokens,) = engine.generate(
            [prompt], Sampling(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
        )
        for given in (PROMPT, prompt):
            _, answer, _ = server.post(
                "/v1/completions",
                {"prompt": given, "max_tokens": 24, "temperature": temperature, "seed": seed,
                 "ignore_eos": True},
            )  # fmt: skip
            assert answer["choices"][0]["text"] == tokenizer.decode(tokens)


def test_texts_of_several_prompts_equal_those_of_single_prompts(server: Server) -> None:
    def text(prompt: object, seed: int) -> str:
        body = {"prompt": prompt, "max_tokens": 6, "seed": seed}
        return str(server.post("/v1/completions", body)[1]["choices"][0]["text"])

    prompts = ["def a(", "class B:"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 6, "seed": 3}
    _, answer, _ = server.post("/v1/completions", body)
    alone = [text(prompt, seed) for prompt in prompts for seed in (3, 4)]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    events = server.events("/v1/completions", body)
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == alone
    assert answer["usage"]["completion_tokens"] == 24


def test_a_stop_string_over_several_tokens_is_never_emitted(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    _, answer, _ = server.post("/v1/completions", body)
    text = answer["choices"][0]["text"]
    stop = text[9:15]
    assert len(load_tokenizer("builtin").encode(stop)) > 1
    stopped = {**body, "stop": ["never there", stop]}
    _, whole, _ = server.post("/v1/completions", stopped)
    assert whole["choices"][0]["text"] == text[: text.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    events = server.events("/v1/completions", stopped)[:-1]
    assert "".join(e["choices"][0]["text"] for e in events) == text[: text.index(stop)]
    assert whole["usage"]["completion_tokens"] < 60


def test_stop_tokens_and_min_tokens(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    _, answer, _ = server.post("/v1/completions", body)
    tokens = load_tokenizer("builtin").encode(answer["choices"][0]["text"])
    _, stopped, _ = server.post("/v1/completions", {**body, "stop_token_ids": tokens})
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 20
    some = {**body, "stop_token_ids": tokens, "min_tokens": 15}
    _, late, _ = server.post("/v1/completions", some)
    assert late["usage"]["completion_tokens"] > 15


def test_repeated_load_is_flagged_as_measuring_the_prefix_cache(
    server: Server, tmp_path: Path
) -> None:
    arguments = ("--rate", "20", "--requests", "6", "--prompt-tokens", "120..160")
    arguments += ("--output-tokens", "2", "--shared-prefix", "60")

    def document(*more: str) -> Any:
        url = f"http://127.0.0.1:{server.port}"
        done = inferscope("load", url, *arguments, *more, "--json", rings=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, second = document(), document()
    assert first["seed"] != second["seed"]
    repeated = document("--seed", str(second["seed"]))
    summaries = [each["summary"] for each in (first, second, repeated)]
    assert [each["was_seen_before"] for each in summaries] == [False, False, True]
    assert summaries[2]["cached_share"] > 0.8 > summaries[1]["cached_share"]


@pytest.mark.thorough
def test_usage_counts_cached_tokens_and_is_in_each_chunk(server: Server) -> None:
    body = {
        "prompt": list(range(100, 180)),
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
    }
    server.post("/v1/completions", body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", {**body, "stream_options": options})
    assert events.pop() == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 200
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    plain = server.events("/v1/completions", body)
    assert not any("usage" in event for event in plain[:-1])


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    _, tokenized, _ = server.post("/tokenize", {"prompt": PROMPT})
    assert tokenized["tokens"] == load_tokenizer("builtin").encode(PROMPT)
    assert tokenized["count"] == len(tokenized["tokens"])
    _, text, _ = server.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert text == {"prompt": PROMPT}
    _, chat, _ = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    _, text, _ = server.post("/detokenize", {"tokens": chat["tokens"]})
    assert text == {"prompt": "user: hi\nassistant:"}


def test_models_health_and_version(server: Server) -> None:
    _, models, _ = server.ask("GET", "/v1/models")
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] == 4096
    assert server.ask("GET", "/v1/models/tiny")[1] == models["data"][0]
    assert server.ask("GET", "/health")[0] == 200
    assert server.ask("GET", "/version")[1]["version"]


TOO_LONG = [1] * 5000
DEEP = b'{"prompt": "x", "made_up": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"
CHAT = [{"role": "user", "content": "x"}]
DEEP_CHAT = (
    b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"a": '
    + b"[" * 9000
    + b"]" * 9000
    + b"}}"
)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "message"),
    [
        ("POST", "/v1/completions", b'{"prompt": "x"', 400, None, "not valid JSON"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, None, "not valid JSON"),
        ("POST", "/v1/completions", [], 400, "body", "object"),
        ("POST", "/v1/completions", {}, 400, "body", "prompt"),
        ("POST", "/v1/completions", {"prompt": 7}, 400, "prompt", "int"),
        ("POST", "/v1/completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("POST", "/v1/completions", {"prompt": []}, 400, "prompt", "empty"),
        ("POST", "/v1/completions", {"prompt": [1, "x"]}, 400, "prompt", "mixes"),
        ("POST", "/v1/completions", {"prompt": [[1], "x"]}, 400, "prompt", "mixes"),
        ("POST", "/v1/completions", {"prompt": [99999]}, 400, "prompt", "1023"),
        ("POST", "/v1/completions", {"prompt": TOO_LONG}, 400, "prompt", "5000 tokens"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "-1"),
        ("POST", "/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt", ">= 1"),
        ("POST", "/v1/completions", {"prompt": "x", "cache_salt": 7}, 400, "cache_salt", "int"),
        ("POST", "/v1/completions", {"prompt": "x", "top_k": -2}, 400, "top_k", "-2"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "1"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": "9"}, 400, "max_tokens", "str"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 1000}, 400, "n", "256"),
        ("POST", "/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop", "0"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs", "0 to 20"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": -1}, 400, "logprobs", "0 to 20"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": True}, 400, "logprobs", "0 to 20"),
        ("POST", "/v1/completions", {"prompt": "x", "top_logprobs": 2}, 400, "top_logprobs", "0"),
        (
            "POST", "/v1/completions", {"prompt": "x", "prompt_logprobs": 1},
            400, "prompt_logprobs", "give null",
        ),
        (
            "POST", "/v1/completions", {"prompt": "x", "logprobs": 20, "max_tokens": 4000, "n": 3},
            400, "max_tokens", "12000 tokens",
        ),
        (
            "POST", "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 21},
            400, "top_logprobs", "0 to 20",
        ),
        (
            "POST", "/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2},
            400, "top_logprobs", "without logprobs",
        ),
        ("POST", "/v1/chat/completions", {"messages": CHAT, "logprobs": 3}, 400, "logprobs", "int"),
        (
            "POST", "/v1/chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_object"}},
            400, "response_format", 'is not supported. Leave it out, or give {"type":"text"}',
        ),
        (
            "POST", "/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]},
            400, "tools", "give []",
        ),
        ("POST", "/v1/completions", {"prompt": "x", "echo": True}, 400, "echo", "false"),
        (
            "POST", "/v1/completions", {"prompt": "x", "presence_penalty": 0.5},
            400, "presence_penalty", "give 0",
        ),
        (
            "POST", "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400, "messages", "image_url",
        ),
        ("POST", "/v1/completions", {"prompt": "x", "model": "y"}, 404, "model", "tiny"),
        ("GET", "/v1/models/a/b", None, 404, "model", "'a/b' does not exist"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2**70}, 400, "max_tokens", "int"),
        ("POST", "/v1/completions", {"prompt": "x", "seed": 2**70}, 400, "seed", "int"),
        ("POST", "/v1/completions", {"prompt": "x", "seed": -(2**70)}, 400, "seed", "int"),
        ("POST", "/v1/completions", {"prompt": "x", "seed": 2**63 - 1, "n": 2}, 400, "seed", "n"),
        ("POST", "/v1/completions", {"prompt": "x", "top_k": 2**64}, 400, "top_k", "int"),
        ("POST", "/v1/completions", {"prompt": [2**70]}, 400, "prompt[0]", "int"),
        ("POST", "/detokenize", {"tokens": [2**70]}, 400, "tokens[0]", "int"),
        (
            "POST", "/v1/completions", {"prompt": "x", "stop_token_ids": [2**70]},
            400, "stop_token_ids[0]", "int",
        ),
        (
            "POST", "/v1/completions",
            {"prompt": "x", "min_tokens": 1, "stop_token_ids": [3, 99999999]},
            400, "stop_token_ids", "holds 99999999; this model has 0 to 1023",
        ),
        ("POST", "/v1/completions", {"prompt": "x", "stop_token_ids": [-1]},
         400, "stop_token_ids", "-1"),
        ("POST", "/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 1025, "n": 99},
         400, "stop_token_ids", "length <= 1024"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5.5}, 400, "max_tokens", "int"),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1e30}, 400, "max_tokens", "int"),
        ("POST", "/v1/completions", {"prompt": [1.0]}, 400, "prompt[0]", "float"),
        ("POST", "/v1/completions", b'{"prompt": "x", "user": "\xff"}', 400, None, "valid JSON"),
        ("POST", "/v1/completions", b'{"prompt": "x", "user": "\\ud800"}', 400, None, "valid JSON"),
        ("POST", "/v1/completions", b'{"prompt": "x", "top_p": NaN}', 400, None, "not valid JSON"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "messages", "length >= 1"),
        ("POST", "/tokenize", {"messages": []}, 400, "messages", "length >= 1"),
        ("POST", "/v1/completions", DEEP, 400, None, "nested too deeply"),
        ("POST", "/v1/chat/completions", DEEP_CHAT, 400, None, "nested too deeply"),
        (
            "POST", "/v1/completions", {"prompt": "x", "bad_words": ["y"]},
            400, "bad_words", "give []",
        ),
        (
            "POST", "/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 9},
            400, "truncate_prompt_tokens", "give null",
        ),
        (
            "POST", "/v1/completions", {"prompt": "x", "include_stop_str_in_output": True},
            400, "include_stop_str_in_output", "give false",
        ),
        (
            "POST", "/v1/completions", {"prompt": "x", "allowed_token_ids": [1]},
            400, "allowed_token_ids", "give null",
        ),
        (
            "POST", "/v1/completions", {"prompt": "x", "prompt_embeds": "AAAA"},
            400, "prompt_embeds", "give []",
        ),
        (
            "POST", "/v1/chat/completions", {"messages": CHAT, "continue_final_message": True},
            400, "continue_final_message", "give false",
        ),
        (
            "POST", "/v1/chat/completions", {"messages": CHAT, "add_generation_prompt": False},
            400, "add_generation_prompt", "give true",
        ),
        (
            "POST", "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            400, "messages[0].tool_calls[0]", "`function`",
        ),
        ("GET", "/v1/nothing", None, 404, None, "/v1/nothing"),
        ("GET", "/v1/completions", None, 405, None, "POST"),
        ("POST", "/v1/completions", b" " * (9 << 20), 413, None, "bytes"),
        ("POST", "/tokenize", {}, 400, "prompt", "messages"),
        ("POST", "/detokenize", {"tokens": [-1]}, 400, "tokens", "negative"),
    ],
)  # fmt: skip
def test_every_error_has_the_form_of_openai(
    server: Server,
    method: str,
    path: str,
    body: object,
    status: int,
    param: str | None,
    message: str,
) -> None:
    got, answer, _ = server.ask(method, path, body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_unknown_and_neutral_fields_are_ignored(server: Server) -> None:
    body = {
        "prompt": "x", "max_tokens": 1, "made_up": {"a": 1}, "presence_penalty": 0.0, "user": "u",
        "logprobs": False, "top_logprobs": 0, "best_of": 1, "response_format": {"type": "text"},
        "temperature": None, "tools": [],
    }  # fmt: skip
    assert server.post("/v1/completions", body)[0] == 200


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_extreme_seeds_are_served(server: Server, seed: int) -> None:
    body = {"prompt": "x", "max_tokens": 2, "seed": seed, "top_k": 2**63 - 1, "ignore_eos": True,
            "stop_token_ids": [0, 1023]}  # fmt: skip
    assert server.post("/v1/completions", body)[0] == 200


def test_integral_floats_are_accepted_as_integers(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 5.0, "seed": 3.0, "n": 1.0, "top_k": -1.0,
            "ignore_eos": True, "temperature": 1}  # fmt: skip
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5
    body |= {"max_tokens": 5, "seed": 3, "n": 1, "top_k": -1}
    assert server.post("/v1/completions", body)[1]["choices"] == answer["choices"]


def test_temperature_near_zero_is_greedy(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    texts = [
        server.post("/v1/completions", {**body, "temperature": temperature})[1]["choices"]
        for temperature in (0, 1e-39, 1e-300)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_full_queue_is_429_with_retry_after_and_recorded_as_shed(server: Server) -> None:
    endless = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    streams = [Stream(server.port, "/v1/completions", endless) for _ in range(4)]
    for stream in streams:
        next(stream.events())  # all four sequence slots are taken
    waiting = [Stream(server.port, "/v1/completions", endless) for _ in range(8)]
    try:
        refused = {}
        for number in range(50):
            status, answer, headers = server.post(
                "/v1/completions",
                {"prompt": "x", "stream": True, "max_tokens": 1},
                {"X-Request-Id": f"refused-{number}"},
            )
            if status == 429:
                refused = {"answer": answer, "headers": headers}
                break
        assert refused["answer"]["error"]["type"] == "rate_limit_error"
        assert int(refused["headers"]["retry-after"]) >= 1
        assert server.final(f"refused-{number}").finish == "shed"
    finally:
        for stream in (*streams, *waiting):
            stream.close()
    server.wait_until_idle()


@pytest.mark.thorough
def test_client_that_does_not_read_delays_no_other_client(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 3900, "ignore_eos": True}
    headers = {"X-Request-Id": "never-reads"}
    with Stream(server.port, "/v1/completions", body, headers=headers, receive_bytes=2048):
        events = server.events("/v1/completions", {**body, "max_tokens": 40})
        assert events[-1] == "[DONE]"
        final = server.final("never-reads")
    assert final.finish == "timeout"
    assert 0 < final.output_tokens < 3900
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


def test_a_connection_serves_many_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for stream in (False, True, False):
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"choices" in answer.read()
    connection.close()


def test_many_streams_at_once_are_each_complete(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
    started = [in_background(server.events, "/v1/completions", body) for _ in range(8)]
    for thread, results in started:
        thread.join()
        assert results[0][-1] == "[DONE]"
        assert results[0][-2]["choices"][0]["finish_reason"] == "length"
