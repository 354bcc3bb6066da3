"""`inferscope mcp`: what an assistant is given, through the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent

from inferscope.cli.mcp.redaction import named, redacted, slowest
from inferscope.cli.mcp.server import make_server
from inferscope.probe import digits
from tests.cli.documents import check_document
from tests.cli.running import ROOT, inferscope
from tests.engine.server.running import serving
from tests.insight.test_why import SAMPLE

TOOLS = {"list_engines", "snapshot", "findings", "why", "shares", "diff"}


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def over_stdio(use: Callable[[Client], Awaitable[None]], rings: Path, *arguments: str) -> None:
    """Use the server as an assistant does: a process that speaks on its standard streams."""
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "inferscope", "mcp", *arguments],
        env={**os.environ, "INFERSCOPE_DIR": str(rings), "PYTHONPATH": str(ROOT)},
    )

    async def session() -> None:
        async with Client(parameters, read_timeout_seconds=170) as client:
            await use(client)

    asyncio.run(session())


def test_every_tool_only_reads_and_refuses_what_is_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))

    async def use() -> None:
        async with Client(make_server(hash_ids=False)) as client:
            tools = (await client.list_tools()).tools
            assert {tool.name for tool in tools} == TOOLS
            for tool in tools:
                assert tool.annotations is not None
                assert tool.annotations.read_only_hint
                assert tool.description
            listed = text_of(await client.call_tool("list_engines", {}))
            check_document("attach (several engines)", listed)
            assert json.loads(listed)["engines"] == []
            for name, arguments in (
                ("findings", {"target": "--refit"}),
                ("why", {"request": "--slo=x", "target": str(SAMPLE)}),
            ):
                refused = await client.call_tool(name, arguments)
                assert refused.is_error
                assert "begins with a dash" in text_of(refused)

    asyncio.run(use())


@pytest.mark.slow
@pytest.mark.process
def test_answers_over_stdio_are_the_documents_of_the_verbs(tmp_path: Path) -> None:
    sample = {"target": str(SAMPLE)}

    async def use(client: Client) -> None:
        for verb in ("findings", "shares"):
            answer = text_of(await client.call_tool(verb, sample))
            extra = ["--by", "tenant"] if verb == "shares" else []
            same = inferscope(verb, str(SAMPLE), *extra, "--json", rings=tmp_path).stdout
            assert answer == same
        snapshot = text_of(await client.call_tool("snapshot", {**sample, "requests": 3}))
        check_document("attach", snapshot)
        rows = json.loads(snapshot)["engines"][0]["requests"]
        assert len(rows) == 3
        request = rows[0]["external_id"]
        why = text_of(await client.call_tool("why", {"request": request, **sample}))
        assert why == inferscope("why", request, str(SAMPLE), "--json", rings=tmp_path).stdout
        diff = text_of(await client.call_tool("diff", {"a": str(SAMPLE), "b": str(SAMPLE)}))
        check_document("diff", diff)
        missing = await client.call_tool("why", {"request": "no-such-request", **sample})
        assert missing.is_error
        assert "no request ID begins with no-such-request" in text_of(missing)

    over_stdio(use, tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_no_name_of_a_client_passes_where_ids_are_hashed(tmp_path: Path) -> None:
    names: set[str] = set()
    whole = json.loads(inferscope("attach", str(SAMPLE), "--json", rings=tmp_path).stdout)
    for row in whole["engines"][0]["requests"]:
        names |= {row["request_id"], row["external_id"]}

    async def use(client: Client) -> None:
        snapshot = text_of(await client.call_tool("snapshot", {"target": str(SAMPLE)}))
        hidden = json.loads(snapshot)["engines"][0]["requests"][0]["external_id"]
        assert hidden in {digits(name) for name in names}
        why = text_of(await client.call_tool("why", {"request": hidden, "target": str(SAMPLE)}))
        check_document("why", why)
        shares = text_of(await client.call_tool("shares", {"target": str(SAMPLE), "by": "request"}))
        words = set(f"{snapshot} {why} {shares}".replace('"', " ").replace("(", " ").split())
        assert not names & words

    over_stdio(use, tmp_path, "--hash-ids")


@pytest.mark.slow
@pytest.mark.process
def test_an_assistant_can_follow_a_live_engine_from_its_list_to_one_request(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "builtin") as server:
        server.wait()
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        assert server.post("/v1/completions", body)[0] == 200

        async def use(client: Client) -> None:
            (engine,) = json.loads(text_of(await client.call_tool("list_engines", {})))["engines"]
            assert engine["is_alive"]
            snapshot = text_of(await client.call_tool("snapshot", {"target": engine["engine_id"]}))
            check_document("attach", snapshot)
            (view,) = json.loads(snapshot)["engines"]
            request = view["requests"][0]["request_id"]
            why = text_of(await client.call_tool("why", {"request": request}))
            assert sum(json.loads(why)["facts"]["row"]["ledger_ns"].values()) > 0
            page = text_of(
                await client.call_tool("findings", {"target": f"http://127.0.0.1:{server.port}"})
            )
            check_document("findings", page)

        over_stdio(use, server.rings)


def test_redaction_replaces_names_in_keys_and_sentences_and_nothing_else() -> None:
    document: dict[str, Any] = {
        "version": 1,
        "requests": [{"request_id": "fe-1", "external_id": "chat-1", "tenant": "acme"}],
        "sentence": "behind chat-1, chat-10 and fe-1 of acme; acmeville stays",
        "num": 1,
        "external_id": None,
    }
    hidden = json.loads(redacted(json.dumps(document), ["chat-10"]))
    assert hidden["requests"] == [
        {"request_id": digits("fe-1"), "external_id": digits("chat-1"), "tenant": digits("acme")}
    ]
    assert hidden["sentence"] == (
        f"behind {digits('chat-1')}, {digits('chat-10')} and {digits('fe-1')} of "
        f"{digits('acme')}; acmeville stays"
    )
    assert (hidden["num"], hidden["external_id"]) == (1, None)
    rows = {"by": "tenant", "rows": [{"name": "acme"}, {"name": "?"}, {"name": None}]}
    assert [each["name"] for each in json.loads(redacted(json.dumps(rows)))["rows"]] == [
        *(digits("acme"), "?", None)
    ]
    assert named(("chat-1", "chat-2"), digits("chat-2")) == "chat-2"
    assert named(("chat-1",), "chat") == "chat"


def test_a_snapshot_keeps_the_slowest_requests_of_each_engine() -> None:
    rows = [{"ttft_ns": ns, "id": number} for number, ns in enumerate((5, None, 9, 7))]
    cut = json.loads(slowest(json.dumps({"engines": [{"requests": rows}]}), 2, "ttft_ns"))
    assert [row["id"] for row in cut["engines"][0]["requests"]] == [2, 3]
    page = {"source": "metrics page", "num_running": 1}
    assert json.loads(slowest(json.dumps(page), 2, "ttft_ns")) == page
