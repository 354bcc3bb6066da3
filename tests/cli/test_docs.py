"""What the pages show can be typed, and what an export holds is on its page."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.cli.main import COMMANDS, build_parser
from inferscope.exporting import load_exporter
from inferscope.readers.source import open_source
from tests.insight.test_why import SAMPLE

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OPEN_MAPS = ("ns_by", "seconds_by", "ledger_ns", "ttft_ledger_ns", "provenance")
"""Their keys are causes, places and fields."""


def typed(line: str) -> list[str] | None:
    """Return the arguments of a line that shows a command; None for other lines."""
    found = re.match(r" {0,2}(?:\.venv/bin/)?inferscope (?P<rest>.*)", line)
    if found is None:
        return None
    command = re.split(r" {2,}| [|&#>] ?|\\$|…", found["rest"])[0]
    words = shlex.split(command)
    return words if words and words[0] in COMMANDS else None


def shown(text: str) -> Iterator[list[str]]:
    """Yield the commands in the blocks of a page."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from filter(None, map(typed, block.splitlines()))


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_can_be_parsed(page: Path) -> None:
    for words in shown(page.read_text(encoding="utf-8")):
        build_parser(words[:1]).parse_args(words)


def test_every_command_of_the_samples_can_be_parsed() -> None:
    files = [each for each in (ROOT / "samples").rglob("*") if each.suffix in (".sh", ".yml")]
    parsed = []
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)  # a variable's default
        text = re.sub(r'"?\$[@\d]"?', "x.isr", text)
        text = re.sub(r"\$(?:port|url)\b", "8000", text)
        for line in re.findall(
            r"^\s*(?:- run: )?(inferscope [a-z].*?)(?: >&2| &)?$", text, re.MULTILINE
        ):
            words = shlex.split(line)[1:]
            build_parser(words[:1]).parse_args(words)
            parsed.append((file.name, words[0]))
    assert {name for name, _ in parsed} == {"gate.yml", "record.sh"}
    assert {"serve", "record", "load", "diff", "run"} <= {verb for _, verb in parsed}


def test_pages_show_commands() -> None:
    pages = [page for page in PAGES if any(shown(page.read_text(encoding="utf-8")))]
    assert len(pages) > 5


def test_no_page_and_no_advice_names_a_command_that_there_is_not() -> None:
    sources = [
        path
        for folder, names in (
            *(("inferscope", "*.py"), ("exporters", "*.py")),
            *(("dashboards", "*.yaml"), ("samples", "*.yaml")),
        )
        for path in (ROOT / folder).rglob(names)
    ]
    named = {
        word: path
        for path in (*PAGES, *sources)
        for word in re.findall(
            r"(?:^[ #]*|`)inferscope ([a-z]+)\b", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert len(named) > 10
    assert {word: path for word, path in named.items() if word not in COMMANDS} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_a_command_can_be_parsed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser([command]).parse_args([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:")
    for words in filter(None, map(typed, examples.splitlines())):
        build_parser(words[:1]).parse_args(words)


def test_pages_link_to_pages_and_headings_that_are_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            text = (page.parent / name).read_text(encoding="utf-8")
            assert not heading or heading in set(map(anchor, text.splitlines())), (page, target)


def anchor(line: str) -> str:
    """Return the anchor of a heading, as it is made of Markdown."""
    words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
    return words.replace(" ", "-") if line.startswith("#") else ""


@pytest.mark.thorough
def test_every_key_of_the_json_lines_is_on_the_page_about_files() -> None:
    out = io.BytesIO()
    exporter = load_exporter("jsonl")(out)
    source = open_source(SAMPLE, sinks=(exporter,))
    source.advance()
    exporter.close(source.collector.devices(), source.collector.totals())
    source.close()
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    keys = {key for line in out.getvalue().splitlines() for key in keys_of(json.loads(line))}
    assert {"blame", "saved_by_cache", "digest"} <= keys
    assert {key for key in keys if f'"{key}"' not in page} == set()


def keys_of(value: object) -> Iterator[str]:
    """Yield the keys of a line, but for those of open maps."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in OPEN_MAPS:
                yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)
