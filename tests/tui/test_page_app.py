"""The live screen over a page: it shows where it is from, and what is wrong when it cannot read."""

from __future__ import annotations

import asyncio
import time

from inferscope.metrics_page.fetching import page_url
from inferscope.metrics_page.view import PageSource
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
            await until(app, "once a second")
            await pilot.press("question_mark")
            await until(app, "window of the rates and latencies")
            await until(app, "latencies    within the bounds")
            await pilot.press("escape")
            await until(app, "? help")
            await pilot.press("w", "t", "q")

    with serving(PAGE) as server:
        asyncio.run(look())
