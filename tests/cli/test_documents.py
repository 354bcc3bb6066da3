"""What `--json` prints: its page, its units, and its version."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from docs.json_reference import PAGE, documented, fields, page, unit
from inferscope.cli.documents import COMPARISON, DOCUMENTS, LIST, PASSES
from inferscope.cli.documents import PAGE as URL
from inferscope.cli.main import COMMANDS, build_parser
from inferscope.json_document import VERSION, Document
from tests.cli.documents import check_document

RATE = re.compile(r"(bytes|flops|tok|requests|finished|preemptions)_s")
OTHER_UNITS = {
    *("us", "ms", "sec", "secs", "seconds", "min", "mins", "minutes", "hours", "ago"),
    *("kb", "mb", "gb", "mib", "gib", "byte", "percent", "pct", "hz", "khz", "ghz", "mw"),
}
TIMES = {"ns", "us", "ms", "s"}


@pytest.mark.thorough
def test_the_page_is_what_the_generator_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.json_reference"


def test_every_command_with_json_has_a_document() -> None:
    def verbs(parser: argparse.ArgumentParser, name: str) -> set[str]:
        """Return the commands and verbs below a parser that take --json."""
        found = {name} if "--json" in parser._option_string_actions else set()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb, below in action.choices.items():
                    found |= verbs(below, f"{name} {verb}".strip())
        return found

    assert verbs(build_parser(COMMANDS), "") == DOCUMENTS.keys() - {LIST, URL, PASSES, COMPARISON}


@pytest.mark.parametrize(
    "document", dict.fromkeys(DOCUMENTS.values()), ids=lambda each: each.__name__
)
def test_the_version_is_the_first_key_of_a_document(document: type[Document]) -> None:
    first = msgspec.structs.fields(document)[0]
    assert (first.name, first.type, first.default) == ("version", int, VERSION)


def test_every_type_and_every_key_has_a_docstring() -> None:
    for of in documented():
        assert of.__doc__, of
        assert [field.key for field in fields(of) if not field.meaning] == [], of


def test_a_key_ends_in_the_one_suffix_of_its_unit() -> None:
    for of in documented():
        for field in fields(of):
            key = (of, field.key)
            words = field.key.split("_")
            assert words[-1] not in OTHER_UNITS, key
            assert words[-2:-1] != ["per"] or words[-1] not in TIMES, f"a rate ends in _s: {key}"
            assert not TIMES & set(words[:-1]), f"a unit is the last word: {key}"
            numbers = {each for each in leaves(field.type) if each in (int, float)}
            if words[-1] == "ns":
                assert numbers == {int}, f"a duration is a whole number: {key}"
            if words[-1] == "s":
                assert RATE.search(field.key), key
            if unit(field.key):
                assert numbers, f"only a number has a unit: {key}"


def leaves(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of; of a map those of its values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if not arguments or origin is typing.Literal:
        return {annotation}
    if origin in (dict, Mapping):
        arguments = arguments[1:]
    return {leaf for each in arguments for leaf in leaves(each)}


@pytest.mark.parametrize(
    "wrong",
    [
        '{"checks":[]}',
        '{"checks":[],"version":1}',
        '{"version":2,"checks":[]}',
        '{"version":1,"checks":[],"more":0}',
        '{"version":1,"checks":[{"name":"a","is_fine":true,"found":"b"}]}',
        '{"version":1,"checks":[{"name":"a","is_fine":1,"found":"b","fix":""}]}',
        '{"version":1}',
    ],
)
def test_a_document_with_other_keys_is_refused(wrong: str) -> None:
    check_document("doctor", '{"version":1,"checks":[]}\n')
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        check_document("doctor", f"{wrong}\n")
