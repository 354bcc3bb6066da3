"""Filter language behind `/`: terms that a request must all meet.

    state:decode p99>30 id:rag* ttft>200 out>=10 !state:done

`field:pattern` matches words with `*` and `?`, alternatives separated by commas. `field>number`
(and `>= < <= = !=`) compares numbers, times in ms. A bare word is searched in the ID; `!` negates.
An unknown value never meets a comparison.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from inferscope.errors import BadInput
from inferscope.fold import RequestRow
from inferscope.text import STATE_MARKS

Predicate = Callable[[RequestRow], bool]

_MS = 1_000_000


def _in_ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / _MS


NUMBERS: dict[str, Callable[[RequestRow], float | None]] = {
    "p99": lambda row: _in_ms(row.tbt_p99_ns),
    "tbt": lambda row: _in_ms(row.tbt_mean_ns),
    "ttft": lambda row: _in_ms(row.ttft_ns),
    "e2e": lambda row: _in_ms(row.e2e_ns),
    "age": lambda row: _in_ms(row.age_ns),
    "prefill": lambda row: _in_ms(row.prefill_ns),
    "decode": lambda row: _in_ms(row.decode_ns),
    "prompt": lambda row: row.prompt_tokens,
    "cached": lambda row: row.cached_tokens,
    "out": lambda row: row.output_tokens,
    "preempted": lambda row: row.num_preemptions,
    "interfered": lambda row: (
        None if row.interference_share is None else 100 * row.interference_share
    ),
}
"""Numeric fields; times in ms, shares in percent."""

WORDS: dict[str, Callable[[RequestRow], str]] = {
    "id": lambda row: row.external_id or row.request_id,
    "state": lambda row: row.state,
    "finish": lambda row: row.finish or "",
    "tenant": lambda row: row.tenant or "-",
    "adapter": lambda row: row.adapter or "-",
}
"""Text fields; tenant and adapter are `-` without one."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_TERM = re.compile(r"(?P<field>[a-z0-9]+)(?P<op>>=|<=|!=|[:<>=])(?P<value>.*)", re.ASCII)


@dataclass(frozen=True)
class Filter:
    """A parsed filter; `matches` tests a request against all its terms."""

    text: str
    predicates: tuple[Predicate, ...]

    def matches(self, row: RequestRow) -> bool:
        """Return whether a request meets every term."""
        return all(predicate(row) for predicate in self.predicates)


EVERYTHING = Filter("", ())


def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Raises:
        BadInput: a term is invalid; the message names it and shows a valid one.
    """
    terms = text.split()
    return Filter(" ".join(terms), tuple(_term(term) for term in terms))


def _term(term: str) -> Predicate:
    if term.startswith("!") and len(term) > 1:
        inner = _term(term[1:])
        return lambda row: not inner(row)
    match = _TERM.fullmatch(term)
    if match is None:
        needle = term.lower()
        return lambda row: needle in WORDS["id"](row).lower()
    field, op, value = match["field"], match["op"], match["value"]
    if field not in NUMBERS and field not in WORDS:
        known = " ".join([*WORDS, *NUMBERS])
        raise BadInput(f"no field {field!r} in filter term {term!r}; fields are {known}")
    if not value:
        example = f"{field}>30" if field in NUMBERS else f"{field}:decode"
        raise BadInput(f"filter term {term!r} has no value; write it like {example}")
    return (
        _comparison(term, field, op, value) if field in NUMBERS else _match(term, field, op, value)
    )


def _comparison(term: str, field: str, op: str, value: str) -> Predicate:
    if op == ":":
        op = "="
    try:
        limit = float(value)
    except ValueError:
        raise BadInput(
            f"{value!r} in filter term {term!r} is not a number; write it like {field}>30"
        ) from None
    read, compare = NUMBERS[field], _COMPARISONS[op]

    def meets(row: RequestRow) -> bool:
        known = read(row)
        return known is not None and compare(known, limit)

    return meets


def _match(term: str, field: str, op: str, value: str) -> Predicate:
    if op not in (":", "=", "!="):
        raise BadInput(f"filter term {term!r} compares a word; write it like {field}:{value}")
    patterns = [pattern for pattern in value.lower().split(",") if pattern]
    for pattern in patterns if field == "state" else ():
        if not any(fnmatchcase(state, pattern) for state in STATE_MARKS):
            raise BadInput(f"no state is called {pattern!r}; states are {' '.join(STATE_MARKS)}")
    read = WORDS[field]

    def meets(row: RequestRow) -> bool:
        word = read(row).lower()
        return any(fnmatchcase(word, pattern) for pattern in patterns) is (op != "!=")

    return meets
