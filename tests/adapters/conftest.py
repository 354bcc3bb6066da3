"""What all tests of adapters share."""

from __future__ import annotations

import gc

import pytest

from inferscope.probe.lifecycle import Life


@pytest.fixture(autouse=True)
def log_failures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the line of a failed probe before the call returns, not on a thread of its own."""
    fail = Life.fail

    def fail_and_log(life: Life, error: Exception) -> None:
        fail(life, error)
        life.write_messages()

    monkeypatch.setattr(Life, "fail", fail_and_log)


@pytest.fixture(autouse=True)
def _only_the_test_is_searched_for_garbage() -> None:
    """Exempt what tests before have imported: transformers collects garbage twice per batch."""
    gc.freeze()
