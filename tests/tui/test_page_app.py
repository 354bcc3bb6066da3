"""The live screen over a page: it shows where it is from, and what is wrong when it cannot read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from inferscope.metrics_page.fetching import page_url
from inferscope.metrics_page.view import PageSource, PageView
from inferscope.text.page.lines import LABEL
from inferscope.tui.canvas import Canvas
from inferscope.tui.page_app import PageApp
from tests.metrics_page.page_server import serving

MINUTE_NS = 60_000_000_000
PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n"


def seen(app: PageApp) -> str:
    canvas = app.screen.query_one(Canvas)
    return "\n".join(canvas.render_line(y).text for y in range(canvas.size.height))


async def until(app: PageApp, text: str) -> None:
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        if text in seen(app):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{text!r} is not on the screen:\n{seen(app)}")


def test_the_screen_follows_the_page_and_states_when_it_cannot() -> None:
    async def look() -> None:
        app = PageApp(PageSource(page_url(server.url)), window_ns=MINUTE_NS, pace_s=0.05)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(app, LABEL)
            await until(app, "running            3")
            server.content = PAGE.replace(" 3", " 41")
            await until(app, "running           41")
            server.status = 500
            await until(app, "answers 500")
            assert "running           41" in seen(app), "the last numbers stay"
            server.status = 200
            await until(app, "Space freeze")
            await pilot.press("question_mark")
            await until(app, "once a second")
            await until(app, "window of the rates and latencies")
            await until(app, "latencies    within the bounds")
            await pilot.press("escape")
            await until(app, "? help")
            await pilot.press("w", "t", "q")

    with serving(PAGE) as server:
        asyncio.run(look())


@pytest.mark.thorough
def test_a_frozen_screen_steps_through_what_was_read_and_exports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def look() -> None:
        source = PageSource(page_url(server.url))
        app = PageApp(source, window_ns=MINUTE_NS, pace_s=0.02)
        async with app.run_test(size=(100, 30)) as pilot:
            for running in (3, 41, 57):
                server.content = PAGE.replace(" 3", f" {running}")
                await until(app, f"running  {running:>11}")
            await pilot.press("space")
            await until(app, f"frozen at reading {app._number + 1}")
            number = source.num_read
            while source.num_read < number + 2:  # polling continues
                await asyncio.sleep(0.02)
            assert "running           57" in seen(app)
            while "running           41" not in seen(app):
                await pilot.press("left_square_bracket")
            await pilot.press("e")
            await until(app, ".jsonl")
            frozen_at = app._number
            await pilot.press("end")
            await until(app, "running           57")
            assert "frozen" not in seen(app)
            await pilot.press("q")
        (jsonl,) = tmp_path.glob("*.jsonl")
        views = [
            msgspec.json.decode(line, type=PageView) for line in jsonl.read_bytes().splitlines()
        ]
        assert len(views) == frozen_at + 1, "one line for each reading up to the frozen one"
        ran = list(dict.fromkeys(view.num_running for view in views))
        assert ran == [3, 41]
        view = msgspec.json.decode(jsonl.with_suffix(".json").read_bytes(), type=PageView)
        assert view.num_running == 41
        assert "<svg" in jsonl.with_suffix(".svg").read_text()

    with serving(PAGE) as server:
        asyncio.run(look())


def test_help_gives_the_reason_of_each_dash_and_findings_stand_at_the_top() -> None:
    async def look() -> None:
        app = PageApp(PageSource(page_url(server.url)), window_ns=MINUTE_NS, pace_s=0.05)
        async with app.run_test(size=(100, 40)) as pilot:
            await until(app, "Requests wait while KV memory is free: 4 requests wait")
            await until(app, "prefix hit         -")
            await until(app, "Rates, over")
            await pilot.press("m")
            await until(app, "prefix hit, prompt, generated, preempted, TTFT")
            await until(app, "vLLM's page has no such values")
            await pilot.press("escape", "q")

    page = PAGE + (
        "vllm:num_requests_waiting 4\nvllm:kv_cache_usage_perc 0.2\n"
        "vllm:request_success_total 100\n"
    )
    with serving(page) as server:
        asyncio.run(look())
