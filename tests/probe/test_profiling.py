"""Where the trace of a profile is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.probe import profiling
from inferscope.probe.profiling import Profiling
from inferscope.ring.profile_request import ask, request_path, trace_path
from tests.collecting.running import eventually


class Trace:
    """A profile without torch."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace", encoding="ascii")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_trace_is_a_new_file_whatever_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setattr(profiling, "record", lambda seconds: Trace())
    ring, precious = tmp_path / "core-0-1.ring", tmp_path / "precious"
    precious.write_text("precious", encoding="ascii")
    partial = trace_path(ring).with_suffix(".partial")
    if is_link:
        partial.symlink_to(precious)
    else:
        partial.write_text("of a killed process", encoding="ascii")
    ask(ring, 1.0)
    Profiling(ring).look()
    eventually(lambda: not request_path(ring).exists())
    assert trace_path(ring).read_text(encoding="ascii") == "trace"
    assert not trace_path(ring).is_symlink()
    assert precious.read_text(encoding="ascii") == "precious"
