"""What `pip install inferscope-llm` would do to the environment of a real engine: add one package.

The engine's own pip is asked, and nothing is changed there. Without an index it can take nothing
that is not there already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
OURS = "inferscope-llm"
FEATURE = "installing it changes no other package"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build what a user would install."""
    folder = tmp_path_factory.mktemp("wheel")
    # The build's tool is not in every engine's environment: the wheel is made by ours.
    done = pip(sys.executable, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("inferscope_llm-*.whl")
    return wheel


def pip(
    python: Path | str, *words: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python's own pip, which sees what is installed there, and in one folder more."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    return subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *words],
        env=variables,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vllm", marks=pytest.mark.conformance("vLLM", FEATURE)),
        pytest.param("sgl", marks=pytest.mark.conformance("SGLang", FEATURE)),
    ],
)
def test_it_is_added_to_an_engines_environment_and_nothing_else_is_changed(
    name: str, wheel: Path, tmp_path: Path
) -> None:
    python = PEERS / "venvs" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment {name} in {PEERS} (INFERSCOPE_PEERS)")

    words = ["install", "-q", "--no-index", str(wheel)]
    dry = pip(python, *words, "--dry-run", "--report", "-")
    assert dry.returncode == 0, dry.stderr
    due = {item["metadata"]["name"] for item in json.loads(dry.stdout)["install"]}
    assert due <= {OURS}  # or nothing, where it is installed already

    with_it = tmp_path / "with"
    done = pip(python, *words, "--no-deps", "--target", str(with_it))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in with_it.glob("inferscope_llm-*.dist-info")]
    assert {path.name.split("-")[0] for path in with_it.glob("*.dist-info")} == {"inferscope_llm"}

    assert _freeze(python, with_it) - {OURS} == _freeze(python) - {OURS}
    assert OURS in _freeze(python, with_it)
    complaints = pip(python, "check", path=with_it).stdout.splitlines()
    assert complaints == pip(python, "check").stdout.splitlines()
    assert not [line for line in complaints if "inferscope" in line]


def _freeze(python: Path, path: Path | None = None) -> set[str]:
    """Return the packages and their versions; of ours the name alone."""
    listed = json.loads(pip(python, "list", "--format", "json", path=path).stdout)
    assert len(listed) > 20
    return {
        item["name"] if item["name"] == OURS else f"{item['name']}=={item['version']}"
        for item in listed
    }
