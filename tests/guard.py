"""The plugin that fails a test whose processes outlive it, and a run that leaves orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.children import children, remaining, started_in
from tests.cli.running import warm_pid

_RUN_ID = "TEST_RUN_ID"
"""What processes of this run have in their environment, those of xdist's workers as well."""
_BY_FIXTURE: dict[int, set[int]] = {}
"""Children that a fixture for several tests started, by the fixture."""
_LEFT = pytest.StashKey[list[str]]()
if _RUN_ID not in os.environ or "PYTEST_CURRENT_TEST" in os.environ:  # a run within a test
    os.environ[_RUN_ID] = uuid.uuid4().hex


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Iterator[None]:
    """Note the children that a fixture of several tests starts."""
    before = children()
    result = yield
    if fixturedef.scope != "function":
        _BY_FIXTURE[id(fixturedef)] = children() - before
    return result


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[object]) -> None:
    """Expect the fixture's children to be gone."""
    _BY_FIXTURE.pop(id(fixturedef), None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves a child process behind, and end the process."""
    try:
        return (yield)
    finally:
        lasting = {warm_pid()}.union(*_BY_FIXTURE.values())
        left = remaining(children() - lasting)
        for pid in left:
            _end(pid)
        if left:
            pytest.fail(f"{item.nodeid} left processes behind: {left}", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if orphans of its tests are there, end them, and name the tests."""
    if hasattr(session.config, "workerinput"):
        return
    others = {os.getpid(), *children()}
    by_test = {
        pid: test
        for pid, test in started_in(_RUN_ID, os.environ[_RUN_ID]).items()
        if pid not in others and test
    }
    left = remaining(set(by_test))
    for pid in left:
        _end(pid)
    session.config.stash[_LEFT] = [
        f"process {pid} ({command}) outlived {by_test[pid]}" for pid, command in left.items()
    ]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _end(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the processes that outlived the run, and their tests."""
    for line in terminalreporter.config.stash.get(_LEFT, []):
        terminalreporter.write_line(line, red=True)
