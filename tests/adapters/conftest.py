"""What all tests of adapters share."""

from __future__ import annotations

import pytest

from inferscope.probe.life import Life


@pytest.fixture(autouse=True)
def log_failures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the line of a failed probe before the call returns, not on a thread of its own."""
    fail = Life.fail

    def fail_and_log(life: Life, error: Exception) -> None:
        fail(life, error)
        life.say()

    monkeypatch.setattr(Life, "fail", fail_and_log)
