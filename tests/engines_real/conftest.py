"""Collects what the tests here show of their engines, for the table of `INFERSCOPE_CONFORMANCE`."""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.engines_real.conformance import Claim, Evidence, Show, update

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = "conformance"
_evidence = Evidence()


# Before tests are deselected: a cell whose tests are not all run is left alone.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Read the claims of all tests."""
    for item in items:
        try:
            claims = [Claim(*m.args, **m.kwargs) for m in item.iter_markers("conformance")]
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error
        if claims:
            _evidence.claims_by_test[item.nodeid] = claims


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Show:
    """Return what takes a claim while a test runs; of several for a cell the least one counts."""

    def shown(claim: Claim) -> None:
        request.node.user_properties.append((_SHOWN, astuple(claim)))

    return shown


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a phase of a test ended, and what it has shown."""
    if report.when == "call":
        claims = [Claim(*words) for name, words in report.user_properties if name == _SHOWN]
        _evidence.claims_by_test.setdefault(report.nodeid, []).extend(claims)
    _evidence.happened(report.nodeid, report.outcome, is_call=report.when == "call")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Merge what was found into the table, if there is one to be written."""
    page = os.environ.get("INFERSCOPE_CONFORMANCE")
    # A test picked by its id hides its twins, and a worker of xdist sees a part of the outcomes.
    is_part = any("::" in word for word in session.config.args)
    if page and not is_part and not hasattr(session.config, "workerinput"):
        peers = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
        update(session.config.invocation_params.dir / page, peers, _evidence.findings())
