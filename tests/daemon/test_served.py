"""A real server's requests through a collector: into the client's trace, and never their text."""

from __future__ import annotations

import json
import signal
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inferscope.engine import load_tokenizer
from inferscope.probe.ids import digits
from inferscope.ring.recording import RecordingReader
from tests.cli.running import inferscope
from tests.daemon.running import Scrape, collecting, eventually
from tests.engine.server.running import Server, serving
from tests.exporters.otlp.sink import Received, receiving

pytestmark = pytest.mark.thorough

_CONFIG = """  otlp: {{endpoint: "{url}", metrics_endpoint: "{metrics_url}", metrics_interval_s: 1}}
  parquet: {{folder: {folder}/parquet}}
headers: ["tenant:hash"]
pins: {{folder: {folder}/pins, before_s: 60, after_s: 0.1, on: [signal]}}
slo: {{file: slo.yaml, state: {folder}/budgets.json}}
"""
_SLO = "slos: [{metric: ttft, threshold: 1us, objective: 50%, window: 1d}]"
_TRACE, _PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_PIECE_BYTES = 1 << 16
CANARY = "quartz canary 5d1f sings below"
NAME, TENANT = "named-by-its-client", "acme-of-lyon"


@dataclass
class Served:
    """Requests of a server, and everything that was published of them."""

    server: Server
    answer: Any = None
    """To the first request, which is in a trace."""
    scrape: Scrape | None = None
    """When that one had ended."""
    spans: list[Received] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    """Texts that were generated for the canary."""
    published: dict[str, bytes] = field(default_factory=dict)
    """All published text, by its source."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Run all of it once."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    folder = tmp_path_factory.mktemp("served")
    (folder / "slo.yaml").write_text(_SLO, encoding="utf-8")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("INFERSCOPE_HEADERS", "tenant=x-tenant,priority=x-priority")
        run = Served(stack.enter_context(serving(folder, "builtin")))
        sink = stack.enter_context(receiving())
        config = _CONFIG.format(
            url=sink.url, metrics_url=sink.url.replace("traces", "metrics"), folder=folder
        )
        collector = stack.enter_context(collecting(run.server.rings, folder, config))
        run.server.wait()
        status, run.answer, _ = run.server.post(
            "/v1/completions",
            {
                "prompt": "def f",
                "max_tokens": 9,
                "ignore_eos": True,
                "top_k": 5,
                "stop": "never generated",
            },
            {"traceparent": f"00-{_TRACE}-{_PARENT}-01", "X-Request-Id": "of-the-client"},
        )
        assert status == 200
        eventually(lambda: bool(sink.spans()))
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        run.scrape = collector.scrape()

        run.answers = [*_ask(run.server)]
        num_requests = 1 + len(run.answers)
        eventually(lambda: _num_answered(collector.scrape()) == num_requests)
        eventually(lambda: len(sink.roots()) >= num_requests and bool(sink.metrics))
        for kind in ("text/plain", "application/openmetrics-text"):
            asked = urllib.request.Request(collector.url, headers={"Accept": kind})
            with urllib.request.urlopen(asked, timeout=30) as page:
                run.published[f"/metrics as {kind}"] = page.read()
        collector.process.send_signal(signal.SIGUSR1)
        eventually(lambda: any((folder / "pins").glob("pin-*")))
        run.published["the collector's memory"] = _memory(collector.process.pid)
        assert run.server.stop() == 0
        assert collector.stop() == 0
        run.published["the server's log"] = run.server.log.read_bytes()
        run.published["the collector's log"] = collector.log().encode()
        run.published["budgets"] = (folder / "budgets.json").read_bytes()
        run.published["spans"] = b"".join(post.SerializeToString() for post in sink.posts)
        run.published["metrics by OTLP"] = b"".join(
            post.SerializeToString() for post in sink.metrics
        )
        run.published["rings"] = b"".join(
            path.read_bytes() for path in run.server.rings.rglob("*.ring")
        )
        run.published["Parquet"] = _rows(folder / "parquet")
        (pin,) = (folder / "pins").glob("*.isr")
        reader = RecordingReader(pin)
        run.published["pins"] = b"".join(frame.payload for frame in reader.frames())
        reader.close()
        run.published |= _commands(pin, folder)
        run.spans = sink.spans()
    return run


def _num_answered(scrape: Scrape) -> float:
    ends = ("length", "stop")
    return sum(scrape.total("inferscope_requests_total", finish_reason=end) for end in ends)


def _ask(server: Server) -> Iterator[str]:
    """Send the canary in every field of a request; yield the generated text."""
    wanted = {"max_tokens": 16, "min_tokens": 16, "temperature": 1.5, "seed": 4}
    headers = {"X-Request-Id": NAME, "X-InferScope-Parts": f"{CANARY}=3"}
    headers |= {"X-Tenant": TENANT, "X-Priority": "of-its-own"}
    talk = [{"role": "user", "content": CANARY, "name": CANARY, "part": CANARY}]
    ids = load_tokenizer("builtin").encode(CANARY)
    # A refused request is not published either.
    for path, refused in (
        ("/v1/completions", {"prompt": CANARY, "max_tokens": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
        ("/v1/completions", {"prompt": "x", "cache_salt": f"{CANARY} " * 64}),
        ("/v1/completions", {"prompt": f"{CANARY} " * 5_000}),
        ("/v1/completions", {"prompt": CANARY, "response_format": {"type": CANARY}}),
        ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": {"a": CANARY}}]}),
        ("/v1/completions", f'{{"prompt": "{CANARY}'.encode()),
        (f"/v1/{CANARY.replace(' ', '/')}", {"prompt": CANARY}),
    ):
        assert 400 <= server.post(path, refused)[0] < 500
    assert server.post("/tokenize", {"prompt": CANARY})[1]["tokens"] == ids
    assert server.post("/detokenize", {"tokens": ids})[0] == 200
    for path, body in (
        ("completions", {"prompt": CANARY, "stop": [CANARY, "never"], "user": CANARY}),
        ("completions", {"prompt": ids, "stop_token_ids": ids, "cache_salt": CANARY}),
        (
            "chat/completions",
            {"messages": talk, "chat_template_kwargs": {"mood": CANARY}, "cache_salt": CANARY},
        ),
    ):
        status, answer, _ = server.post(f"/v1/{path}", body | wanted, headers)
        assert status == 200, answer
        (choice,) = answer["choices"]
        yield choice["text"] if "text" in choice else choice["message"]["content"]
    events = server.events("/v1/chat/completions", {"messages": talk, **wanted})
    yield "".join(each["choices"][0]["delta"].get("content") or "" for each in events[:-1])


def _rows(folder: Path) -> bytes:
    """Return all that Parquet files hold, as text."""
    import pyarrow.parquet as pq

    files = sorted(folder.rglob("*.parquet"))
    assert {file.relative_to(folder).parts[0] for file in files} == {"requests", "steps", "slices"}
    return "\n".join(str(pq.ParquetFile(file).read().to_pylist()) for file in files).encode()


def _commands(pin: Path, folder: Path) -> dict[str, bytes]:
    """Return the output of every command on a pin."""
    outputs = {}
    for words in (
        ("export", str(pin), "--format", "jsonl", "-o", "-"),
        ("export", str(pin), "--format", "perfetto", "-o", "-"),
        ("why", NAME, str(pin), "--pick", "1"),
        ("why", NAME, str(pin), "--pick", "1", "--json"),
        ("findings", str(pin), "--json"),
        ("shares", str(pin)),
        ("attach", str(pin), "--once"),
        ("attach", str(pin), "--once", "--json"),
    ):
        done = inferscope(*words, rings=folder / "none")
        assert done.returncode == 0, done.stderr
        name = " ".join(("inferscope", *(word for word in words if word != str(pin))))
        outputs[name] = (done.stdout + done.stderr).encode()
    return outputs


def _memory(pid: int) -> bytes:
    """Return what a process can write to, as a core dump of it would have it."""
    found = bytearray()
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in lines:
            bounds, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(each, 16) for each in bounds.split("-"))
                memory.seek(start)
                for _ in range(start, end, _PIECE_BYTES):
                    piece = memory.read(min(_PIECE_BYTES, end - memory.tell()))
                    if piece.strip(b"\0"):  # most of it was never written to
                        found += piece
    return bytes(found)


def test_a_requests_spans_join_the_trace_of_its_client(served: Served) -> None:
    # It was no stream: all its tokens came with the answer.
    scrape, answer = served.scrape, served.answer
    assert scrape is not None
    assert scrape.one("inferscope_request_duration_seconds_count") == 1
    for name in ("time_to_first_token", "time_between_tokens", "time_per_output_token"):
        assert scrape.one(f"inferscope_{name}_seconds_count") == 0
    spans = {each.name: each for each in served.spans if each.span.trace_id.hex() == _TRACE}
    root = spans["text_completion builtin"]
    assert root.span.parent_span_id.hex() == _PARENT
    assert root.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert root.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert root.attributes["gen_ai.request.stream"] is False
    assert "of-the-client" in root.attributes.values()
    asked = {k: v for k, v in root.attributes.items() if k.startswith("gen_ai.request.")}
    assert asked == {
        "gen_ai.request.id": asked["gen_ai.request.id"],
        "gen_ai.request.model": "builtin",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.top_k": 5.0,
    }
    assert root.attributes["server.address"] == "127.0.0.1"
    assert root.attributes["server.port"] == served.server.port
    for name in ("inferscope.queue", "inferscope.prefill", "inferscope.decode"):
        child = spans[name].span
        assert child.trace_id.hex() == _TRACE
        assert child.parent_span_id == root.span.span_id


def secrets(served: Served) -> Iterator[tuple[str, bytes]]:
    """Yield what must not be published, in the forms in which it could be."""
    texts = {"the prompt": CANARY, **{f"answer {n}": t for n, t in enumerate(served.answers)}}
    encode = load_tokenizer("builtin").encode
    for name, text in texts.items():
        for form in {text, json.dumps(text)[1:-1], text[:16], text[-16:]}:
            yield name, form.encode()
        yield f"{name} in UTF-16", text.encode("utf-16-le")
        ids = encode(text)[:8]
        assert len(set(ids)) > 2, f"{name} is too dull to be known again"
        for width in "HIQ":
            yield f"{name}'s tokens, {width}", struct.pack(f"<{len(ids)}{width}", *ids)
        for comma in (",", ", ", " "):
            yield f"{name}'s tokens in words", comma.join(map(str, ids)).encode()


def test_no_prompt_completion_or_token_is_published(served: Served) -> None:
    assert len(served.published) == 19
    found = [
        (name, where)
        for name, secret in secrets(served)
        for where, content in served.published.items()
        if secret in content
    ]
    assert found == []
    # All of it was looked through: what may be published is there.
    anonymous = {
        where for where, content in served.published.items() if NAME.encode() not in content
    }
    assert anonymous == {
        "/metrics as text/plain",
        "/metrics as application/openmetrics-text",
        "metrics by OTLP",
        "the server's log",
        "the collector's log",
        "budgets",
        "inferscope findings --json",
        "inferscope shares",
    }
    for where in anonymous:
        content = served.published[where]
        assert any(word in content for word in (b"builtin", b"served", b"ttft", b"measured")), where


def test_exporters_receive_only_allowed_headers(served: Served) -> None:
    contents = served.published
    assert TENANT.encode() in contents["rings"]
    assert b"of-its-own" in contents["rings"]
    for where in ("Parquet", "spans", "metrics by OTLP", "/metrics as text/plain", "budgets"):
        assert TENANT.encode() not in contents[where]
        assert b"of-its-own" not in contents[where]
    assert f"'tenant': '{digits(TENANT.encode())}'".encode() in contents["Parquet"]
