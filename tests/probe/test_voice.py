"""What the probe has to say is heard, unless its owner has said otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
{setting}
from inferscope.probe.voice import warn
warn("something is %s", "wrong")
warn("something is %s", "wrong")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("setting", "num_heard"),
    [
        ("", 2),
        ("logging.getLogger().setLevel(logging.ERROR)", 2),
        ("logging.basicConfig(level=logging.ERROR)", 2),
        ("logging.getLogger('inferscope').setLevel(logging.ERROR)", 0),
    ],
)
def test_a_roots_level_that_was_meant_for_others_silences_nobody(
    setting: str, num_heard: int
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stderr.count("inferscope: something is wrong") == num_heard
