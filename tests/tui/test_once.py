from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from inferscope.tui.once import once_text
from tests.tui.live_screen import assert_golden
from tests.tui.scenes import moving_snapshot, with_requests


def test_the_text_looks_like_its_golden() -> None:
    assert_golden("once_100", once_text(moving_snapshot(), width=100))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_asked_for(width: int) -> None:
    text = once_text(moving_snapshot(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_ascii_text_is_ascii() -> None:
    assert once_text(moving_snapshot(), ascii=True).isascii()


def test_nothing_to_show_is_said() -> None:
    nothing = replace(moving_snapshot(), engines=(), notes=("a block is damaged",))
    assert "no engine has written anything yet" in once_text(nothing)
    assert "note: a block is damaged" in once_text(nothing)
    assert "Requests: none yet" in once_text(with_requests(moving_snapshot(), ()))


def test_the_text_needs_no_textual() -> None:
    code = "import sys, inferscope.tui.once; print({'textual', 'rich'} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.strip() == "set()"
