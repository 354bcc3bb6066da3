"""What a command prints with `--json`, checked against the type that its page documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from inferscope.cli.documents import COMPARISON, DOCUMENTS, LIST, PAGE, PASSES
from inferscope.cli.engine_list import SOURCE as LIST_SOURCE
from inferscope.insight.passes.view import SOURCE as PASSES_SOURCE
from inferscope.json_document import VERSION
from inferscope.metrics_page.view import SOURCE as PAGE_SOURCE


def check_document(verb: str, text: str) -> None:
    """Check that a text is the document of a verb.

    Decoding refuses a missing key and a value of another type. A key that the type lacks is lost
    when the document is encoded again; a default that was not printed is added.
    """
    assert text.startswith(f'{{"version":{VERSION},'), text[:60]
    assert text.count("\n") == 1
    assert text.endswith("\n")
    document = msgspec.json.decode(text, type=DOCUMENTS[verb], strict=True)
    assert json.loads(msgspec.json.encode(document)) == json.loads(text)


def check_printed(arguments: Sequence[str], text: str) -> None:
    """Check what a command has printed with --json."""
    if (verb := _verb(arguments, text)) in DOCUMENTS:
        check_document(verb, text)


def _verb(arguments: Sequence[str], text: str) -> str:
    if arguments[0] == "slo":
        return " ".join(arguments[:2])
    if arguments[0] == "attach":
        printed: dict[str, Any] = json.loads(text)
        return {LIST_SOURCE: LIST, PASSES_SOURCE: PASSES, PAGE_SOURCE: PAGE}.get(
            printed["source"], "attach"
        )
    return COMPARISON if "--compare" in arguments else arguments[0]
