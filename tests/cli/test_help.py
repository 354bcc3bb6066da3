from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscope.cli.main import COMMANDS
from tests.cli.running import ANY_PORT, SHORT, inferscope, inferscope_cold
from tests.insight.test_why import SAMPLE


def test_help_names_every_command(tmp_path: Path) -> None:
    output = inferscope_cold("--help", rings=tmp_path).stdout
    for command in COMMANDS:
        assert f"\n    {command}" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(tmp_path: Path, command: str) -> None:
    done = inferscope(command, "--help", rings=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) > 5


def test_no_command_prints_the_help(tmp_path: Path) -> None:
    bare = inferscope_cold(rings=tmp_path)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == inferscope("help", rings=tmp_path).stdout
    assert bare.stdout.startswith("usage: inferscope ")


def test_help_and_version_are_commands_too(tmp_path: Path) -> None:
    for words, same in (
        (("help", "attach"), ("attach", "--help")),
        (("help", "slo", "check"), ("slo", "check", "--help")),
        (("version",), ("--version",)),
    ):
        done = inferscope(*words, rings=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == inferscope(*same, rings=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("atach", "inferscope: there is no command atach. Did you mean attach?"),
        ("help exprt", "inferscope: there is no command exprt. Did you mean export?"),
        ("xyzzy", "inferscope: there is no command xyzzy. `inferscope help` lists them."),
        ("attach --windw 5", "arguments: --windw. Did you mean --window?"),
        ("load http://x --ratee=4", "arguments: --ratee=4. Did you mean --rate?"),
        ("slo check slo.yaml --jsn", "arguments: --jsn. Did you mean --json?"),
        ("why x --xyzzy", "arguments: --xyzzy. `inferscope why --help` lists them."),
        ("attach --js", "arguments: --js. Did you mean --json?"),
        ("load http://x --r 4", "arguments: --r 4. Did you mean --rate or --requests or"),
        ("slo chek slo.yaml", "invalid choice: 'chek'"),
        ("slo chek slo.yaml", "Did you mean check?"),
        ("load http://x --kind rga", "Did you mean rag?"),
    ],
)
def test_a_misspelt_word_is_met_with_the_nearest(tmp_path: Path, words: str, message: str) -> None:
    done = inferscope(*words.split(), rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("at", [1, 3])
def test_a_source_may_stand_behind_an_option(tmp_path: Path, at: int) -> None:
    words = ["fe-9", "--pick", "1"]
    words.insert(at, str(SAMPLE))
    done = inferscope("why", *words, rings=tmp_path)
    assert (done.returncode, "fe-9" in done.stdout) == (0, True), done.stderr


def test_doctor_states_how_to_get_what_is_missing(tmp_path: Path) -> None:
    rows = json.loads(inferscope_cold("doctor", "--json", rings=tmp_path).stdout)["checks"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["ring folder"]["is_fine"]
    assert "inferscope demo" in by_name["engines"]["fix"]


FIRST = {
    "attach": (0, "FILE --once", "prefill"),
    "collect": (0, "--check", "pins"),
    "diff": (2, "FILE FILE", "needs at least"),
    "doctor": (0, "", "ring folder"),
    "export": (0, "FILE -o -", '"kind":"run"'),
    "findings": (0, "FILE", "requests"),
    "load": (1, "127.0.0.1:9", "no server answers"),
    "help": (0, "attach", "usage: inferscope attach"),
    "off": (1, "", "no engine is running"),
    "on": (1, "", "no engine is running"),
    "replay": (0, "FILE --check", "truncated"),
    "run": (2, "", "there is no command to run"),
    "sampler": (0, "--once --counters host", "cores"),
    "shares": (0, "FILE", "Shapley value"),
    "slo": (0, "check SLOS FILE", "requests over"),
    "version": (0, "", "inferscope "),
    "why": (0, "fe- FILE --pick 1", "fe-"),
}
"""What a command gives that is the first of its interpreter: exit code, arguments, some words."""


@pytest.mark.thorough
@pytest.mark.parametrize("command", sorted(SHORT))
def test_every_short_command_imports_what_it_needs_by_itself(tmp_path: Path, command: str) -> None:
    code, words, expected = FIRST[command]
    cut = tmp_path / "cut.isr"
    cut.write_bytes(SAMPLE.read_bytes()[:30_000])
    files = {"FILE": str(cut), "SLOS": str(SAMPLE.with_name("slo.yaml"))}
    arguments = [files.get(word, word) for word in words.split()]
    done = inferscope_cold(command, *arguments, rings=tmp_path / "rings", **ANY_PORT)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr
