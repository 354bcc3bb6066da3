"""`run` starts no command that its interpreter's own options keep from being observed."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.cli.run.command import _engine
from inferscope.cli.run.target import _options, find_target
from tests.cli.running import inferscope as run_inferscope
from tests.cli.test_run import ROOT, executable, run, script

SEES_HOOK = "import sys\nprint('inferscope.adapters.inject' in sys.modules, *sys.argv[1:])\n"
SEES_PLUG_IN = """
import os
from importlib.metadata import entry_points
print([each.name for each in entry_points(group="vllm.general_plugins")], os.environ["INFERSCOPE"])
"""
OWN_PROBE = """
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "toy"))
probe.finished(probe.queued("one", prompt_tokens=3), "stop")
probe.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["-I"], "-I"),
        (["-E"], "-E"),
        (["-uE"], "-E"),
        (["-BI"], "-I"),
        (["-X", "dev", "-I"], "-I"),
        (["-W", "ignore", "-Xdev", "-E"], "-E"),
    ],
    ids=" ".join,
)
def test_an_option_that_keeps_the_import_hook_out_is_named(
    tmp_path: Path, options: list[str], flag: str
) -> None:
    python, program = script(tmp_path, SEES_HOOK)
    refused = run("--", python, *options, program, rings=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert f"with {flag} the command's Python ignores PYTHONPATH" in line
    assert f"Leave out {flag}, or set INFERSCOPE_INJECT=0" in line
    allowed = run("--unobserved", "--", python, *options, program, "x", rings=tmp_path)
    assert allowed.stdout == "False x\n"
    assert "not observed" in allowed.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["-S", "-IS", "-ES"])
def test_an_option_that_hides_the_package_is_named_and_nothing_is_to_be_installed(
    tmp_path: Path, option: str
) -> None:
    python, program = script(tmp_path, SEES_HOOK)
    refused = run("--", python, option, program, rings=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "with -S the command's Python cannot import inferscope" in line
    assert line.endswith("Leave out -S")
    assert "pip install" not in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [["-P"], ["-s"], ["-u", "-W", "ignore"], ["-X", "dev"]], ids=" ".join
)
def test_other_options_change_nothing(tmp_path: Path, options: list[str]) -> None:
    python, program = script(tmp_path, SEES_HOOK)
    done = run("--", python, *options, program, "-I", "-S", rings=tmp_path)
    assert done.stdout == "True -I -S\n", done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("head", "flag"),
    [
        (f"#!{sys.executable} -I", "-I"),
        (f"#!/usr/bin/env -S A=1 {sys.executable} -uE", "-E"),
        (f"#!/bin/sh\n'''exec' \"{sys.executable}\" -I \"$0\" \"$@\"\n' '''", "-I"),
    ],
    ids=["shebang", "env", "long"],
)
def test_an_option_in_a_scripts_first_line_is_found(tmp_path: Path, head: str, flag: str) -> None:
    program = executable(tmp_path / "program", f"{head}\n{SEES_HOOK}")
    refused = run("--", str(program), rings=tmp_path)
    assert refused.returncode == 2
    assert f"Leave out {flag} in the first line of {program}" in refused.stderr
    assert run("--unobserved", "--", str(program), rings=tmp_path).stdout == "False\n"


def test_a_program_with_a_probe_of_its_own_needs_no_import_hook(tmp_path: Path) -> None:
    python, program = script(tmp_path, OWN_PROBE)
    done = run(
        *("--record", str(tmp_path / "run.isr"), "--", python, "-I", program),
        rings=tmp_path / "rings",
        INFERSCOPE_INJECT="0",
        INFERSCOPE_RING_MB="1",
    )
    assert done.returncode == 0, done.stderr
    assert "records, 0 lost" in done.stderr


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_an_engine_with_a_plug_in_group_is_observed_without_the_import_hook(
    tmp_path: Path, flag: str
) -> None:
    vllm = executable(tmp_path / "vllm", f"#!{sys.executable} {flag}\n{SEES_PLUG_IN}")
    done = run("--", str(vllm), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['inferscope'] 1\n"


def test_no_engine_is_observed_without_site_packages(tmp_path: Path) -> None:
    vllm = executable(tmp_path / "vllm", f"#!{sys.executable} -S\n{SEES_PLUG_IN}")
    refused = run("--", str(vllm), rings=tmp_path)
    assert refused.returncode == 2
    assert "with -S the command's Python cannot import inferscope" in refused.stderr
    assert run("--unobserved", "--", str(vllm), rings=tmp_path).stdout == "[] 1\n"


def test_a_package_that_only_pythonpath_shows_is_hidden_by_the_option_that_ignores_it(
    tmp_path: Path,
) -> None:
    # An interpreter that has the package's dependencies and not the package.
    site = Path(ast.__file__).parent
    bare = executable(tmp_path / "python3", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    dependencies = str(Path(pytest.__file__).parents[1])
    path = f"{ROOT}:{dependencies}:{site}"
    (tmp_path / "vllm").write_text(f"#!{bare} -E\nprint('it ran')\n")
    (tmp_path / "vllm").chmod(0o755)
    refused = run_inferscope("run", "--", str(tmp_path / "vllm"), rings=tmp_path, PYTHONPATH=path)
    assert refused.returncode == 2
    assert "with -E the command's Python cannot import inferscope" in refused.stderr


LAW = "import sys; f = sys.flags; print(f.ignore_environment, f.no_site, f.no_user_site)"
"""What the interpreter makes of its options."""


@pytest.mark.parametrize("seed", range(8))
def test_options_are_read_as_the_interpreter_reads_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    words = []
    for _ in range(draw.randint(1, 4)):
        cluster = "".join(draw.choices("BuEISsqO", k=draw.randint(1, 3)))
        words += draw.choice(
            [[f"-{cluster}"], ["-W", "ignore"], [f"-{cluster}W", "ignore::UserWarning:E"],
             ["-Xutf8=1"], ["--check-hash-based-pycs", "never"]]
        )  # fmt: skip
    program = tmp_path / "program.py"
    program.write_text(LAW)
    for rest in (["--", str(program), "-I"], [str(program), "-S"], ["-c", LAW, "-I"]):
        done = subprocess.run(
            [sys.executable, *words, *rest], capture_output=True, text=True, check=True
        )
        flags, module = _options([*words, *rest])
        assert module is None
        assert [bool(int(each)) for each in done.stdout.split()] == [
            bool({"-E", "-I"} & {*flags}), "-S" in flags, bool({"-s", "-I"} & {*flags}),
        ], words  # fmt: skip


@pytest.mark.parametrize(
    ("words", "engine", "flags"),
    [
        (["-Im", "vllm.entrypoints.openai.api_server"], "vllm", ("-I",)),
        (["-I", "-msglang.launch_server", "-S"], "sglang", ("-I",)),
        (["program.py", "-m", "vllm"], None, ()),
        (["-c", "pass", "-m", "vllm", "-I"], None, ()),
        (["-m"], None, ()),
        (["-E"], None, ("-E",)),
        (["-W"], None, ()),
    ],
)
def test_the_module_that_an_interpreter_runs_is_known(
    words: list[str], engine: str | None, flags: tuple[str, ...]
) -> None:
    command = [sys.executable, *words]
    target = find_target(command, {"PATH": "/usr/bin"})
    assert _engine(target, command) == engine
    assert target.flags == flags
