"""Programs of other people that tests run: those that Debian has, and `.ci/monitoring` installs."""

from __future__ import annotations

import shutil

import pytest

_MISSING = "is not on PATH; Debian has it in the package "


def program(*names: str, package: str = "prometheus") -> str:
    """Return where a program is, by the first of its names that is there, or skip the test."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"{names[0]} {_MISSING}{package}")


def alertmanager() -> str:
    """Return where Alertmanager is, or skip the test; Debian calls it otherwise than its makers."""
    return program("prometheus-alertmanager", "alertmanager", package="prometheus-alertmanager")


def missing_package(reason: str) -> str | None:
    """Return what was missing where a test was skipped for this reason; None for any other."""
    _, _, package = reason.partition(_MISSING)
    return package.strip(" .'\")") or None
