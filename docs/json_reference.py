"""Write `json.md`, the reference of what `--json` prints, from the types of the documents.

python -m docs.json_reference
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from inferscope.cli.documents import DOCUMENTS
from inferscope.json_document import VERSION, Document

PAGE = Path(__file__).with_name("json.md")
UNITS = {
    "ns": "nanoseconds",
    "bytes_s": "bytes per second",
    "flops_s": "FLOPs per second",
    "tok_s": "tokens per second",
    "s": "per second",
    "bytes": "bytes",
    "tokens": "tokens",
    "share": "share, 0 to 1",
    "mhz": "MHz",
    "w": "watts",
}
"""Meaning of a key's suffix for its number, longer suffixes first."""
_INTRODUCTION = f"""\
# JSON documents

`python -m docs.json_reference` writes this page from the types of the documents.

Commands that take `--json` print one JSON object on one line. It begins with `version`, an integer:
{VERSION} for all documents of this version. A renamed or removed key, or one with another meaning,
raises it; a new key does not, so a reader should ignore keys that it does not know.

The last word of a key is its unit, and each unit has one:

- `_ns`: a duration or a time, in whole nanoseconds. `real_ns` is since the Unix epoch; other times
  are on the monotonic clock of the records.
- `_s`: a rate per second, with what is counted before it: `bytes_s`, `flops_s`, `tok_s`.
- `_share`: a fraction, 0 to 1; never a percentage.
- `_bytes`, `_tokens`, `_mhz`, `_w`: bytes, tokens, MHz, watts.
- A count has no suffix. It is `num_x`, or a plain word.

Keys of a map are names: causes, phases, devices, counters. A counter's name ends in its unit too
([counters](counters.md)). An unknown number is `null`, never 0. The JSON Lines of `export` are
another format ([files](files.md)).
"""


class Field(NamedTuple):
    """One key of a type."""

    key: str
    type: Any
    meaning: str


def page() -> str:
    """Return the page."""
    headings = _headings()
    parts = [_INTRODUCTION, "## Commands\n", *rows(("command", "document"), _commands(headings))]
    for title, found in (("Documents", True), ("Parts", False)):
        parts.append(f"\n## {title}")
        for each, heading in headings.items():
            if issubclass(each, Document) is found:
                parts += ["", f"### {heading}", "", *_section(each, headings)]
    return "\n".join(parts) + "\n"


def documented() -> list[type]:
    """Return the types of all documents and of their parts, each once, in the order of use."""
    found: dict[type, None] = {}

    def visit(each: type) -> None:
        if each not in found:
            found[each] = None
            for field in fields(each):
                for part in _parts(field.type):
                    visit(part)

    for document in DOCUMENTS.values():
        visit(document)
    return list(found)


def fields(of: type) -> list[Field]:
    """Return the keys of a type, in their order."""
    hints = typing.get_type_hints(of)
    if issubclass(of, msgspec.Struct):
        names = [(each.name, each.encode_name) for each in msgspec.structs.fields(of)]
    elif dataclasses.is_dataclass(of):
        names = [(each.name, each.name) for each in dataclasses.fields(of)]
    else:
        names = [(name, name) for name in of._fields]  # type: ignore[attr-defined]
    meanings = _meanings(of)
    return [Field(key, hints[name], meanings.get(name, "")) for name, key in names]


def unit(key: str) -> str:
    """Return the unit that a key names, empty for a count or a word."""
    for end, words in UNITS.items():
        if key == end or key.endswith(f"_{end}"):
            return words
    return ""


def _headings() -> dict[type, str]:
    """Return a heading for each type: its name, with its module's where another has that name."""
    types_ = documented()
    names = [each.__name__ for each in types_]
    return {
        each: each.__name__
        if names.count(each.__name__) == 1
        else f"{each.__name__} ({each.__module__.removeprefix('inferscope.')})"
        for each in types_
    }


def _commands(headings: Mapping[type, str]) -> Iterator[tuple[str, str]]:
    for command, document in DOCUMENTS.items():
        yield f"`{command}`", _link(headings[document])


def _section(of: type, headings: Mapping[type, str]) -> Iterator[str]:
    yield textwrap.dedent(inspect.getdoc(of) or "")
    if hasattr(of, "_fields"):
        yield "\nIt is a list, with these in their order."
    yield ""
    cells = (
        (f"`{field.key}`", _type(field.type, headings), unit(field.key), field.meaning)
        for field in fields(of)
    )
    yield from rows(("key", "type", "unit", "meaning"), cells)


def rows(heads: tuple[str, ...], cells: typing.Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Return the lines of a table."""
    for row in (heads, ("---",) * len(heads), *cells):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _type(annotation: Any, headings: Mapping[type, str]) -> str:
    """Return a type in words, with a link where the page has it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in headings:
        return _link(headings[annotation])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each, headings) for each in arguments))
    if origin is Literal:
        return "string"
    if origin is tuple and len(arguments) > 1 and arguments[1] is not ...:
        return f"list of {len(arguments)}: {_type(arguments[0], headings)}"
    if origin in (tuple, list):
        return f"list of {_type(arguments[0], headings)}"
    if origin is not None and issubclass(origin, Mapping):
        return f"map to {_type(arguments[1], headings)}"
    return {
        bool: "boolean", float: "number", int: "integer", str: "string", type(None): "null"
    }[annotation]  # fmt: skip


def _parts(annotation: Any) -> Iterator[type]:
    """Yield the types with keys of their own within an annotation."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        is_part = dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields")
        if is_part or issubclass(annotation, msgspec.Struct):
            yield annotation
    for each in typing.get_args(annotation):
        yield from _parts(each)


def _meanings(of: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, those of its bases included."""
    meanings: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if base.__module__.partition(".")[0] != "inferscope":
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                meaning = " ".join(str(after.value.value).split())
                meanings[before.target.id] = re.sub(r"\bNone\b", "null", meaning)
    return meanings


def _link(heading: str) -> str:
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](#{anchor})"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
