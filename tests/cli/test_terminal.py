"""What a terminal that cannot draw, and a stream that lacks signs, are given."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.cli import terminal
from tests.children import child
from tests.cli.running import inferscope_cold
from tests.report.test_why import SAMPLE

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_dumb_terminal_gets_one_look_as_text(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with child(
        [sys.executable, "-m", "inferscope", "attach", str(SAMPLE)],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path), "TERM": "dumb"},
    ) as process:  # fmt: skip
        os.close(theirs)
        printed = b""
        try:
            while piece := os.read(ours, 65536):
                printed += piece
        except OSError:  # the terminal's other end is closed
            pass
        assert process.wait(90) == 0
    os.close(ours)
    assert b"Where latency went" in printed
    assert b"\x1b" not in printed


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_what_cannot_move_its_cursor_is_not_drawn_on(
    monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as stream:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert terminal.can_draw(stream)
        monkeypatch.setenv("TERM", term)
        assert not terminal.can_draw(stream)


def test_an_ascii_output_is_printed_with_signs_that_it_has(tmp_path: Path) -> None:
    done = inferscope_cold("attach", str(SAMPLE), "--once", rings=tmp_path, **ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "  + prefill" in done.stdout
    assert "#####" in done.stdout


def printed(monkeypatch: pytest.MonkeyPatch, text: str, *, is_json: bool) -> bytes:
    out = io.BytesIO()
    stream = io.TextIOWrapper(out, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.print_what_is_encodable(is_json=is_json)
    stream.write(text)
    stream.flush()
    return out.getvalue()


@given(text=st.text())
def test_any_text_is_printed_cell_by_cell(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert len(printed(monkeypatch, text, is_json=False)) == len(text)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_json_says_the_same_in_ascii(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        document = json.dumps({"a": text}, ensure_ascii=False)
        assert json.loads(printed(monkeypatch, document, is_json=True)) == {"a": text}
