from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.server.running import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server shared by the tests that do not stop it: few slots, short queue and timeouts."""
    with serving(
        tmp_path_factory.mktemp("server"),
        "builtin",
        "--max-running", "4",
        "--max-waiting", "8",
        "--client-timeout", "1.5",
        "--served-model-name", "tiny",
    ) as running:  # fmt: skip
        yield running.wait()
        assert running.stop() == 0, running.said()
