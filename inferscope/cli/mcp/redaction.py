"""Documents for an assistant: cut to the slowest requests, and without names of clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from inferscope.cli.why import request_source_of
from inferscope.probe import digits

_ID_KEYS = ("request_id", "external_id", "peer_request_id", "tenant", "trace")
_ID_LISTS = ("request_ids",)
_ROWS_OF_CLIENTS = ("request", "tenant")
"""Kinds of the rows of `shares` whose names are clients'."""
_UNKNOWN = "?"


def slowest(document: str, num: int, rank: str) -> str:
    """Return a snapshot with the requests of each engine that have the largest numbers."""
    snapshot = json.loads(document)
    for engine in snapshot.get("engines", ()):
        rows = engine["requests"]
        rows.sort(key=lambda row: -(row[rank] or 0))
        del rows[num:]
    return _line(snapshot)


def hidden_names(target: str | None, request: str) -> tuple[str, ...]:
    """Return the names of all requests of a source, those of the wanted one among them.

    Raises:
        NotFound: the source does not exist.
        UnreadableFile: the source's file cannot be read.
    """
    source = request_source_of(target)
    refs = [*source.refs(request), *source.refs(digits(request))]
    return tuple({name: None for ref in refs for name in ref.names})


def named(names: Sequence[str], request: str) -> str:
    """Return the name that digits stand for; any other text is a name, or the beginning of one."""
    return next((name for name in names if digits(name) == request), request)


def redacted(text: str, names: Sequence[str] = ()) -> str:
    """Return a document or a sentence with digits in place of names.

    The names that the document's own keys hold are replaced in its sentences too.

    Args:
        text: document, or any other text.
        names: further names to replace.
    """
    try:
        document = json.loads(text)
    except ValueError:
        return _replace(text, _pattern(names))
    pattern = _pattern({*names, *_names_in(document)})
    return _line(_walk(document, pattern))


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names of requests and tenants that a document holds."""
    if isinstance(value, list):
        for each in value:
            yield from _names_in(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in _ID_KEYS and isinstance(each, str):
                yield each
            elif key in _ID_LISTS:
                yield from each
            else:
                yield from _names_in(each)
        if value.get("by") in _ROWS_OF_CLIENTS:
            yield from (row["name"] for row in value["rows"] if row["name"])


def _pattern(names: Sequence[str] | set[str]) -> re.Pattern[str] | None:
    """Return a pattern of whole names, the longest first; None without names."""
    ordered = sorted({*names} - {"", _UNKNOWN}, key=len, reverse=True)
    if not ordered:
        return None
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, ordered))})(?!\w)")


def _walk(value: Any, pattern: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return _replace(value, pattern)
    if isinstance(value, list):
        return [_walk(each, pattern) for each in value]
    if isinstance(value, dict):
        return {key: _walk(each, pattern) for key, each in value.items()}
    return value


def _replace(text: str, pattern: re.Pattern[str] | None) -> str:
    return text if pattern is None else pattern.sub(lambda found: digits(found[0]), text)


def _line(document: Any) -> str:
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")) + "\n"
