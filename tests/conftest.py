"""Hypothesis profiles, the order of tests, and a demo run that tests share."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import guard
from tests.cli.running import Run, inferscope
from tests.debian import missing_package
from tests.examples import change_examples

# How long one example takes says something of the machine only. CI draws the same ones each time.
settings.register_profile(
    "inferscope",
    parent=settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("inferscope")

# The machine's calibration must not affect tests.
os.environ["INFERSCOPE_CACHE"] = os.devnull

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "telemetry/test_end_to_end.py",
    "engine/server/test_processes.py",
    "cli/test_open_history.py",
    "daemon/test_scrape.py",
    "slo/test_rules.py",
    "cli/test_demo.py",
    "dashboards/test_queries.py",
    "cli/test_live.py",
    "daemon/test_promises.py",
    "adapters/test_transformers.py",
    "daemon/test_collect.py",
    "cli/test_run.py",
    "engine/test_worker.py",
    "exporters/otlp/test_delivery.py",
    "cli/test_bad_input.py",
    "engine/server/test_records.py",
    "fold/test_follow.py",
    "insight/test_rules.py",
    "daemon/test_fleet.py",
    "daemon/test_shards.py",
    "daemon/test_users.py",
    "daemon/test_served.py",
    "tui/test_keys.py",
)
"""Files of ten seconds and more, such that wait for something among such that compute.

A file runs in one worker: one of them begun last is waited for by all others.
"""
TOGETHER = {
    "the server of tests": (
        "engine/server/test_api.py",
        "engine/server/test_connections.py",
        "engine/server/test_limits.py",
        "engine/server/test_parts.py",
        "engine/server/test_records.py",
    ),
    "transformers": (
        "adapters/test_transformers.py",
        "adapters/test_shapes.py",
        "engine/test_correctness.py",
        "engine/test_model.py",
        "engine/test_weights.py",
    ),
}
"""Files that share what takes seconds to start or to import, and so run in one worker."""

# A shell ignores SIGINT in background jobs, and all that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# All that is collected stays to the end. To look through it for garbage takes a third of a second,
# again and again. When Python ends it does look: compiled modules complain otherwise.
gc.disable()
atexit.register(gc.unfreeze)


def pytest_configure(config: pytest.Config) -> None:
    """Guard all tests; hooks of this file are not called for fixtures of the whole session."""
    if not config.pluginmanager.has_plugin(guard.__name__):
        config.pluginmanager.register(guard, guard.__name__)


def pytest_collection_finish() -> None:
    """Leave what is collected out of every later look for garbage."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, and draw a part of each property test's examples."""
    if "TEST_THOROUGH" not in os.environ and not config.pluginmanager.has_plugin("tests.pure"):
        change_examples(items, lambda wanted: -(-wanted // 3))
    place = {TESTS / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Return a line on tests skipped for lack of a real Prometheus or Alertmanager."""
    skipped = terminalreporter.stats.get("skipped", [])
    missing = [found for each in skipped if (found := missing_package(str(each.longrepr)))]
    if missing:
        terminalreporter.write_line(
            f"{len(missing)} tests with a real Prometheus or Alertmanager were skipped: "
            f"apt-get install {' '.join(sorted(set(missing)))}"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run four files on two cores: many tests wait for processes and deadlines."""
    num_cores = len(os.sched_getaffinity(0))
    return num_cores + max(2, num_cores // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign whole files to workers, as `--dist loadfile` does, and keep grouped files together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    group_by_file = {f"tests/{name}": group for group in TOGETHER for name in TOGETHER[group]}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return group_by_file.get(file, file)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demo once for all workers: the first to ask for it does.

    Its rate is fixed: the same requests arrive, and are awaited, however busy the machine is.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, rings, snapshot = base / "demo", base / "rings", base / "demo.json"
    with (base / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not snapshot.exists():
            done = inferscope(
                *("demo", "--headless", "--duration", "5", "--rate", "6", "--seed", "1", "--json"),
                *("--out", str(folder)),
                rings=rings,
                timeout_s=110,
            )
            assert done.returncode == 0, done.stderr
            snapshot.write_text(done.stdout, encoding="utf-8")
    lines = (folder / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    document = json.loads(snapshot.read_text(encoding="utf-8"))
    return Run(folder, rings, document, [json.loads(line) for line in lines])
