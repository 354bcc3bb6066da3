"""The plugin of `make quick`: tests of the pure rooms, which load no torch and start no process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.examples import change_examples

TESTS = Path(__file__).parent
_NEED_MORE = (
    *("cost/test_flops.py", "cost/test_hbm.py", "cost/test_shape.py", "cost/test_table.py"),
)
"""Files of those rooms that need the reference engine, and so torch."""
_EXAMPLES = 10
_FORBIDDEN = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    # Of the process that runs the tests: the one that only hands them out starts those.
    if event in _FORBIDDEN and "PYTEST_CURRENT_TEST" in os.environ:
        raise AssertionError(
            f"a test of `make quick` starts a process: mark it `process` ({event})"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Make a test that is not pure fail, whatever is installed."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.addaudithook(_refuse)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that need more than the base install."""
    needs_more = any(collection_path == TESTS / name for name in _NEED_MORE)
    return True if needs_more else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that start a process; draw few examples for each property."""
    left_out = [item for item in items if item.get_closest_marker("process")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    change_examples(items, lambda wanted: min(wanted, _EXAMPLES))
