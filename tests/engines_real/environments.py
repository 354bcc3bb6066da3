"""Environments of engines at given versions, under `venvs/` of INFERSCOPE_PEERS.

A specification is `vllm@0.30.0`, or `vllm` for the environment of that name. INFERSCOPE_VERSIONS
lists those that the tests of each version are to run with. What is missing is built by the program
that INFERSCOPE_SETUP names, called with the folder and the specification, and gets inferscope.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
VERSIONS = tuple(
    os.environ.get("INFERSCOPE_VERSIONS", "vllm vllm@0.30.0 sgl sgl@0.5.21 tf").split()
)
DISTRIBUTIONS = {"vllm": "vllm", "sgl": "sglang", "tf": "transformers"}
_BUILD_S = 600


def folder_of(specification: str) -> str:
    """Return the name of a specification's environment: the usual one if it has the version."""
    kind, _, version = specification.partition("@")
    packages = (PEERS / "venvs" / kind).glob(f"lib/python*/site-packages/{DISTRIBUTIONS[kind]}-*")
    usual = {path.name.partition("-")[2].removesuffix(".dist-info") for path in packages}
    has_version = any(version == each.partition("+")[0] for each in usual)
    return kind if not version or has_version else f"{kind}-{version}"


def python_of(specification: str) -> Path:
    """Return the interpreter of an environment; build it, or skip the test with the reason."""
    python = PEERS / "venvs" / folder_of(specification) / "bin" / "python"
    setup = os.environ.get("INFERSCOPE_SETUP")
    if not python.exists() and setup is not None:
        _do(specification, [setup, str(PEERS), specification])
        _do(specification, [str(python), "-m", "pip", "install", "--quiet", "-e", str(ROOT)])
    if not python.exists():
        pytest.skip(f"no {specification} under {PEERS}: set INFERSCOPE_PEERS or INFERSCOPE_SETUP")
    if not (PEERS / "tiny-qwen2").exists():
        pytest.skip(f"no checkpoint under {PEERS}")
    return python


def _do(specification: str, words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if done.returncode:
        pytest.skip(f"{specification} cannot be built: {done.stderr[-500:]}")
