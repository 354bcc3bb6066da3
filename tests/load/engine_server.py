"""The built-in engine behind the streaming half of OpenAI's API, as a process of its own.

    python -m tests.load.engine_server

Prints its port on a line and serves until standard input ends. It keeps the headers and bodies of
what it was asked and shows them at /asked, so that a test can say what really arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inferscope.engine import EngineOptions, Sampling, load_engine, load_tokenizer
from inferscope.engine.frontend import FrontEnd
from inferscope.probe import Probe

MODEL = "builtin"
engine = load_engine(MODEL, EngineOptions(dtype="float32"))
tokenizer = load_tokenizer(MODEL)
front_end = FrontEnd(engine, tokenizer, probe=Probe.disabled())
asked: list[dict[str, Any]] = []


async def models(_: Request) -> Response:
    """List the one model."""
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "owned_by": "inferscope"}]})


async def tokenize(request: Request) -> Response:
    """Count a text's tokens."""
    body = await request.json()
    text = body.get("prompt") or body["messages"][0]["content"]
    return JSONResponse({"count": len(tokenizer.encode(text))})


async def show_asked(_: Request) -> Response:
    """Return what was asked so far."""
    return JSONResponse(asked)


async def complete(request: Request) -> Response:
    """Stream an answer."""
    body = await request.json()
    asked.append({"headers": dict(request.headers), "body": body})
    is_chat = "messages" in body
    prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
    sampling = Sampling(max_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False))
    counts_along = body["stream_options"].get("continuous_usage_stats", False)
    num_prompt = len(tokenizer.encode(prompt))

    async def stream() -> AsyncIterator[str]:
        num_output = 0
        async for delivery in front_end.generate(prompt, sampling):
            num_output += delivery.num_tokens
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
            text: dict[str, Any] = {"text": delivery.text}
            if is_chat:
                text = {"delta": {"content": delivery.text}}
            chunk: dict[str, Any] = {"choices": [{**text, "finish_reason": delivery.finish}]}
            if counts_along:
                chunk["usage"] = usage
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


@contextlib.asynccontextmanager
async def _engine_running(_: Starlette) -> AsyncIterator[None]:
    front_end.start()
    yield
    front_end.close()


def main() -> int:
    """Serve until standard input ends."""
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/asked", show_asked),
        ],
        lifespan=_engine_running,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    def leave_with_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        server.should_exit = True

    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
