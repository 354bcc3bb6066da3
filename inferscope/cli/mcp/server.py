"""Tools of the MCP server, each a verb of the command line with its `--json` document.

A tool runs its verb in a process of its own: its output cannot mix with the protocol's, its memory
is returned, and a request that the assistant cancels ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from inferscope import __version__
from inferscope.cli.engine_list import list_json
from inferscope.cli.mcp.redaction import hidden_names, named, redacted, slowest
from inferscope.cli.remote import ALLOW_VARIABLE
from inferscope.ring import find_engines

_PATIENCE_S = 180.0
_MOST_AT_A_TIME = 2
_INSTRUCTIONS = """\
Facts about live or recorded LLM inference. To explain bad latency, call `findings` first, then
`snapshot` for the slowest requests, and `why` on one of them. Durations are nanoseconds (`_ns`),
rates end in `_s`, shares are 0 to 1, and null is unknown, never 0. Ledgers divide each request's
time by cause and sum to it. A target is an engine ID, a model name, a pid, the path of a recording
or ring folder, or the URL of a server's /metrics; without one, the only running engine is meant.
"""
_READ_ONLY = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)

Target = Annotated[
    str | None, Field(description="engine ID, model name, pid, path or URL; null: the only engine")
]
Records = Annotated[
    str | None, Field(description="engine ID, model name, pid or path; null: the only engine")
]
Limit = Annotated[str | None, Field(description="maximum, such as 500ms; null: none")]
Rank = Literal["ttft_ns", "tbt_p99_ns", "e2e_ns"]


class Tools:
    """Read-only tools over the command line.

    Attributes:
        is_hashing: whether IDs of requests and names of tenants are replaced by digits.
    """

    def __init__(self, *, hash_ids: bool) -> None:
        self.is_hashing = hash_ids
        self._limiter = anyio.Semaphore(_MOST_AT_A_TIME)

    async def list_engines(self) -> str:
        """List the engines of this host that are or were observed, the newest first."""
        return list_json(find_engines())

    async def snapshot(
        self,
        target: Target = None,
        window_s: Annotated[float, Field(gt=0, description="window of all numbers")] = 60.0,
        requests: Annotated[int, Field(ge=0, description="requests to list")] = 10,
        rank: Annotated[Rank, Field(description="list the requests with the largest")] = "ttft_ns",
    ) -> str:
        """Show an engine's state: rates, latency quantiles, ledger by cause, slowest requests."""
        options = ["--window", str(window_s), "--once"]
        document = await self._document("attach", options, [target])
        return slowest(document, requests, rank)

    async def findings(
        self,
        target: Target = None,
        slo: Annotated[str | None, Field(description="path of a file of objectives")] = None,
    ) -> str:
        """Detect common performance problems: evidence, advice, and the run without each."""
        return await self._document("findings", [f"--slo={slo}"] if slo else [], [target])

    async def why(
        self,
        request: Annotated[str, Field(description="request ID, or the beginning of one")],
        target: Records = None,
        ttft: Limit = None,
        tbt: Limit = None,
        tpot: Limit = None,
        e2e: Limit = None,
    ) -> str:
        """Explain where one request's time went, and why it missed a limit."""
        limits = {"ttft": ttft, "tbt": tbt, "tpot": tpot, "e2e": e2e}
        options = [f"--{name}={limit}" for name, limit in limits.items() if limit is not None]
        names: tuple[str, ...] = ()
        if self.is_hashing:
            _refuse_option(request, target)
            names = await anyio.to_thread.run_sync(hidden_names, target, request)
            request = named(names, request)
        return await self._document("why", options, [request, target], names)

    async def shares(
        self,
        target: Records = None,
        by: Annotated[
            Literal["request", "tenant", "phase", "model"], Field(description="rows")
        ] = "tenant",
    ) -> str:
        """Divide the device's time by request, tenant, phase or model."""
        return await self._document("shares", ["--by", by], [target])

    async def diff(
        self,
        a: Annotated[str, Field(description="recording or engine: the baseline")],
        b: Annotated[str, Field(description="recording or engine compared with it")],
    ) -> str:
        """Compare two recordings: what changed at the same workload, and which causes moved."""
        return await self._document("diff", [], [a, b])

    async def _document(
        self,
        verb: str,
        options: Sequence[str],
        arguments: Sequence[str | None],
        names: Sequence[str] = (),
    ) -> str:
        """Return what a verb prints with `--json`.

        Raises:
            ToolError: the verb failed; the message is its own.
        """
        _refuse_option(*arguments)
        words = [verb, *options, "--json", *(word for word in arguments if word is not None)]
        command = [sys.executable, "-m", "inferscope", *words]
        # A tool that reads must not start the probe in another process.
        environment = {**os.environ, ALLOW_VARIABLE: "0"}
        try:
            async with self._limiter:
                with anyio.fail_after(_PATIENCE_S):
                    done = await anyio.run_process(
                        command, stdin=subprocess.DEVNULL, env=environment, check=False
                    )
        except TimeoutError:
            raise ToolError(f"{verb} took over {_PATIENCE_S:g} s.") from None
        if done.returncode or not done.stdout:
            reason = done.stderr.decode(errors="replace").strip()
            raise ToolError(redacted(reason, names) if names else reason or f"{verb} failed")
        text = done.stdout.decode()
        return redacted(text, names) if self.is_hashing else text


def make_server(*, hash_ids: bool) -> MCPServer:
    """Return the server with its tools.

    Args:
        hash_ids: whether to replace IDs of requests and names of tenants by digits.
    """
    server = MCPServer(
        "inferscope", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    tools = Tools(hash_ids=hash_ids)
    for tool in (
        tools.list_engines,
        tools.snapshot,
        tools.findings,
        tools.why,
        tools.shares,
        tools.diff,
    ):
        server.add_tool(tool, annotations=_READ_ONLY, structured_output=False)
    return server


def _refuse_option(*arguments: str | None) -> None:
    """Refuse an argument that a verb would take for an option.

    Raises:
        ToolError: an argument begins with a dash.
    """
    for argument in arguments:
        if argument is not None and argument.startswith("-"):
            raise ToolError(f"{argument} begins with a dash. Give a name or a path.")
