"""A plain program's engine is observed when it is imported, and the program notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import inferscope
from inferscope.adapters import shim

ROOT = Path(inferscope.__file__).parents[1]
SHIM = Path(shim.__path__[0])

OBSERVER = """
def observe(module):
    print("observed", module.__name__, module.READY)

def faulty(module):
    raise RuntimeError("our mistake")

def interrupted(module):
    import signal
    signal.raise_signal(signal.SIGALRM)
"""
ENGINE = """
print("engine runs")
READY = "ready"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with an engine, an observer of it and a table that knows it."""
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "__init__.py").write_text(ENGINE)
    (tmp_path / "toy_observer.py").write_text(OBSERVER)
    return tmp_path


def run_program(
    program: Path, text: str, *, observer: str = "observe", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program behind the shim, with the toy engine in the table."""
    (program / "usercustomize.py").write_text(
        "from inferscope.adapters import inject\n"
        f"inject.install({{'toy_engine': 'toy_observer:{observer}'}})\n"
    )
    script = program / "program.py"
    script.write_text(text)
    path = os.pathsep.join([str(SHIM), str(program), str(ROOT)])
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=program,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "INFERSCOPE": "1", **environment},
    )


# A `usercustomize` is not imported in a virtual environment, so the programs do it themselves.
IMPORT = "import usercustomize\n"


def test_an_engine_is_observed_once_it_has_been_executed(program: Path) -> None:
    done = run_program(program, IMPORT + "import toy_engine\nimport toy_engine\nprint('over')")
    assert done.stdout.split("\n")[:3] == ["engine runs", "observed toy_engine ready", "over"]
    assert not done.stderr


def test_an_engine_that_is_imported_already_is_observed_at_once(program: Path) -> None:
    done = run_program(program, "import toy_engine\n" + IMPORT)
    assert done.stdout.split("\n")[:2] == ["engine runs", "observed toy_engine ready"]


def test_an_engine_is_observed_after_it_was_looked_up_and_after_a_failed_import(
    program: Path,
) -> None:
    (program / "toy_engine" / "__init__.py").write_text(
        "import os\nif os.environ.pop('TOY_FAILS', ''): raise ImportError('not yet')\n" + ENGINE
    )
    done = run_program(
        program,
        IMPORT + "from importlib.util import find_spec\n"
        "print(find_spec('toy_engine').name)\n"
        "try:\n    import toy_engine\n"
        "except ImportError as error:\n    print(error)\n"
        "import toy_engine\n"
        "print('exec_module' in vars(toy_engine.__loader__))\n"
        "import importlib\nimportlib.reload(toy_engine)\n",
        TOY_FAILS="1",
    )
    assert not done.stderr
    assert done.stdout.split("\n") == [
        *("toy_engine", "not yet", "engine runs", "observed toy_engine ready", "False"),
        *("engine runs", ""),
    ]


def test_modules_of_one_loader_are_observed_each_and_however_often_they_are_looked_up(
    program: Path,
) -> None:
    with zipfile.ZipFile(program / "engines.zip", "w") as file:
        for name in ("one", "two"):
            file.writestr(f"{name}.py", ENGINE)
    text = """
import sys
sys.path.insert(0, "engines.zip")
from importlib.util import find_spec
from inferscope.adapters import inject
inject.when_imported({"one": "toy_observer:observe", "two": "toy_observer:observe"})
for _ in range(2000):
    find_spec("one"), find_spec("two")
import one, two
"""
    done = run_program(program, text)
    assert not done.stderr
    lines = ["engine runs", "observed one ready", "engine runs", "observed two ready", ""]
    assert done.stdout.split("\n") == lines


def test_a_loader_that_takes_no_attributes_is_reported_and_its_module_imported(
    program: Path,
) -> None:
    text = """
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

class Loader:
    __slots__ = ()
    def create_module(self, spec): return None
    def exec_module(self, module): module.READY = "ready"

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Loader()) if name == "archived" else None

sys.meta_path.insert(0, Finder)
from inferscope.adapters import inject
inject.when_imported({"archived": "toy_observer:observe"})
find_spec("archived")
import archived
print(archived.READY)
"""
    done = run_program(program, text)
    assert done.stdout == "ready\n"
    assert done.stderr.count("archived is not observed: ") == 1


def test_a_program_without_the_engine_imports_nothing_of_it(program: Path) -> None:
    done = run_program(program, IMPORT + "import sys\nprint('toy_engine' in sys.modules)")
    assert done.stdout == "False\n"


def test_a_missing_engine_is_missing_as_ever(program: Path) -> None:
    (program / "toy_engine" / "__init__.py").unlink()
    (program / "toy_engine").rmdir()
    done = run_program(program, IMPORT + "import toy_engine")
    assert "ModuleNotFoundError: No module named 'toy_engine'" in done.stderr


def test_a_faulty_observer_is_reported_and_the_program_runs(program: Path) -> None:
    done = run_program(program, IMPORT + "import toy_engine\nprint('over')", observer="faulty")
    assert done.returncode == 0
    assert done.stdout == "engine runs\nover\n"
    assert done.stderr.count("toy_engine is not observed: RuntimeError: our mistake") == 1


def test_an_exception_of_the_hosts_signal_handler_reaches_the_import(program: Path) -> None:
    text = """
import signal, usercustomize
def late(number, frame):
    raise TimeoutError("late")
signal.signal(signal.SIGALRM, late)
try:
    import toy_engine
except TimeoutError as error:
    print(error)
"""
    done = run_program(program, text, observer="interrupted")
    assert (done.stdout, done.stderr) == ("engine runs\nlate\n", "")


@pytest.mark.parametrize("environment", [{"INFERSCOPE_INJECT": "0"}, {"INFERSCOPE": "0"}])
def test_injection_can_be_forbidden(program: Path, environment: dict[str, str]) -> None:
    done = run_program(program, IMPORT + "import toy_engine", **environment)
    assert done.stdout == "engine runs\n"


def test_the_shim_runs_the_sitecustomize_that_it_hides(program: Path) -> None:
    (program / "sitecustomize.py").write_text("import sys\nsys.was_customised = __file__\n")
    done = run_program(
        program,
        "import sys, sitecustomize\n"
        "print(sys.was_customised == sitecustomize.__file__)\n"
        "print(any(entry.endswith('shim') for entry in sys.path))\n"
        "print('inferscope.adapters.inject' in sys.modules)",
    )
    assert done.stdout == "True\nFalse\nTrue\n"
    assert not done.stderr


def test_an_error_in_that_one_is_reported_as_ever_and_we_still_wait(program: Path) -> None:
    (program / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    done = run_program(program, "import sys\nprint('inferscope.adapters.inject' in sys.modules)\n")
    assert "theirs" in done.stderr
    assert done.stdout == "True\n"


def test_an_environment_without_inferscope_runs_as_if_nothing_were_here(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import sitecustomize, sys; print('inferscope' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(SHIM), "INFERSCOPE": "1"},
    )
    assert done.stdout == "False\n"
    assert not done.stderr
