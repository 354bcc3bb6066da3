"""Chat templates of checkpoints, in transformers' dialect of Jinja.

Its page "Writing a chat template" defines it: sandboxed Jinja with loop controls,
`raise_exception`, `strftime_now`, a `tojson` that escapes no characters, and a tag around the
assistant's text, which matters only in training. This module requires jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferscope.errors import BadInput


class _Generation(Extension):
    """Tag `{% generation %}...{% endgeneration %}`, rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def compile_template(source: str, *, origin: str) -> Callable[[Mapping[str, Any]], str]:
    """Compile a template and return its render function.

    Args:
        source: text of the template.
        origin: name of its model, for the error.

    Raises:
        BadInput: the template does not compile.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source).render
    except jinja2.TemplateSyntaxError as error:
        raise BadInput(
            f"the chat template of {origin} is broken in line {error.lineno}: {error.message}. "
            "Correct it, or download the checkpoint again."
        ) from None
    except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
        raise BadInput(
            f"cannot compile the chat template of {origin}: {error}. Correct it."
        ) from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
