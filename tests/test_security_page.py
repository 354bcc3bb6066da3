"""The limits that docs/security.md states are those of the code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from inferscope_otlp.exporter import _MAX_RESOURCES
from inferscope_otlp.settings import OtlpSettings
from inferscope_prometheus.exporter import _SILENT_NS
from inferscope_prometheus.page import MOST_LABEL
from inferscope_prometheus.server import ConnectionLimits
from inferscope_prometheus.settings import PrometheusSettings

from inferscope import document, foreign
from inferscope.cli import serve
from inferscope.daemon import config, engines, slo_state
from inferscope.daemon.exporter_set import FLUSH_S
from inferscope.engine.request import MOST_LOGPROBS
from inferscope.engine.server import bodies, connection, exchange, protocol
from inferscope.fold.retention import Retention
from inferscope.metrics_page import fetching as fetch
from inferscope.metrics_page import reading
from inferscope.probe.opening import DEFAULT_RING_MB
from inferscope.probe.part_labels import MOST_RECORDED_PARTS
from inferscope.sampler import dcgm

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)$(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
WITHOUT_A_CONSTANT = {
    "bodies above 20,000 bytes parsed at a time",  # compared as a sentence
    "an engine ID",
    "samplers for an engine",
    "queued requests",
    "| redirects",
}

_parser = argparse.ArgumentParser()
serve.configure(_parser)
_served = _parser.parse_args(["builtin"])
_page = ConnectionLimits()
_minutes = engines.FORGET_NS // 60_000_000_000


def mib(num_bytes: int) -> str:
    assert not num_bytes % (1 << 20)
    return f"{num_bytes >> 20} MiB"


def kib(num_bytes: int) -> str:
    assert not num_bytes % (1 << 10)
    return f"{num_bytes >> 10} KiB"


ROWS = {
    "Limits of serve": {
        "time for a request's head, and for its body": f"{_served.client_timeout:g} s each, plus"
        f" {_served.client_timeout:g} s per MiB received",
        "time without progress in reading a response": f"{_served.client_timeout:g} s",
        "connections": f"{_served.max_connections}",
        "request line and headers": kib(connection._MOST_HEAD_BYTES),
        "body": mib(bodies.MOST_BODY_BYTES),
        "lists and objects of a body; members of its objects": f"{protocol.MOST_CONTAINERS:,};"
        f" {protocol.MOST_MEMBERS:,}",
        "the same of all arguments of tool calls in a chat": f"{protocol.MOST_CONTAINERS:,};"
        f" {protocol.MOST_MEMBERS:,}",
        f"bodies held at a time, without the first {kib(bodies.SMALL_BODY_BYTES)} of each": mib(
            bodies.MOST_BODIES_BYTES
        ),
        "messages of a chat": f"{protocol.MOST_MESSAGES:,}",
        "recorded parts of a prompt": f"{MOST_RECORDED_PARTS}",
        "characters of a text, also for `/tokenize`": f"{exchange._MOST_TOKEN_CHARS} per token",
        "IDs for `/detokenize`": f"{protocol.MOST_DETOKENIZED:,}",
        "texts of a request (prompts × `n`)": f"{protocol.MOST_CHOICES}",
        "likeliest tokens with log probabilities, per output token": f"{MOST_LOGPROBS}",
        "log probabilities of a request (texts × `max_tokens` × (1 + likeliest tokens))": (
            f"{protocol.MOST_LOGPROB_ENTRIES:,}"
        ),
        "stop strings; their length": f"{protocol._MOST_STOPS}; {protocol._MOST_STOP_CHARS:,}",
    },
    "Limits of collect": {
        "TLS handshake and first request together": f"{_page.request_s:g} s",
        "time between requests of a connection": f"{_page.idle_s:g} s",
        "size of a request": kib(_page.head_bytes),
        "connections of one address; of all": f"{_page.per_peer}; {_page.connections}",
        "time to read a response while all places are taken": f"{_page.answer_s:g} s",
        "unfinished requests of an engine": f"{engines._KEPT.in_flight:,} of about 3 KB;"
        f" {Retention().in_flight:,} when",
        "engines": f"`max_engines` ({config.MOST_ENGINES})",
        "rings of one other user": f"{engines._MOST_RINGS:,}",
        "series of the page": f"`max_series` ({PrometheusSettings.max_series:,};",
        "label value": f"{MOST_LABEL} characters",
        "log lines about rings": f"{engines._MOST_NOTES:,}",
        "budget file (`slo.state`)": f"{mib(slo_state._MOST_BYTES)}, of which"
        f" {mib(slo_state._MOST_ENGINES_BYTES)} about engines",
    },
    "Pages and files that are read": {
        "a metrics page (`attach URL`, `engine_metrics`, `dcgm_url`)": f"{fetch.TIMEOUT_S:g} s from"
        f" connecting to the last byte (dcgm-exporter: {dcgm._TIMEOUT_S:g} s)",
        "| 16 MiB": f"{mib(fetch._MOST_BYTES)}; {fetch.PARSE_S:g} s to parse",
        "| 16 KiB": f"{kib(fetch._LONGEST_LINE)} per line",
        "its numbers": f"`NaN`, infinite, negative, above {reading._LARGEST:g}".replace("+", ""),
        "its texts": f"{foreign._LONGEST_NAME} characters; {reading._MOST_MODELS} model names",
        "YAML (configuration, objectives)": f"{mib(document._MOST_BYTES)},"
        f" {document._MOST_VALUES:,} values with aliases expanded,"
        f" {document._LONGEST_SCALAR:,} characters each, {document._DEEPEST} levels",
    },
}
TEXTS = {
    "Limits of serve": [f"bodies above {exchange.LONG_PROMPT_CHARS:,} bytes parsed at a time"],
    "Limits of collect": [
        f"503 after {_SILENT_NS / 1e9:.0f} s without a published snapshot",
        f"{_minutes} minutes after its end",
        f"{DEFAULT_RING_MB} MiB per engine process",
        f"{OtlpSettings.client_traces_per_s:g} traces per second",
        f"{_MAX_RESOURCES:,} sets of metrics",
        f"exits within {FLUSH_S:g} s in any case",
    ],
}


def rows(section: str) -> dict[str, str]:
    """Return the second cells of a section's tables by the first, or by `| SECOND` without one."""
    found = {}
    for line in SECTIONS[section].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and set(cells[0]) != {"-"} and cells[0] not in ("limit", "what"):
            found[cells[0] or f"| {cells[1]}"] = cells[1]
    return found


def is_named(row: str, name: str) -> bool:
    """Return whether a row of a table has this name, or begins with it if it has no first cell."""
    return row.startswith(name) if name.startswith("|") else row == name


@pytest.mark.parametrize("section", ROWS)
def test_limits_in_tables_are_those_of_the_code(section: str) -> None:
    stated = rows(section)
    for name, limit in ROWS[section].items():
        (value,) = [value for row, value in stated.items() if is_named(row, name)]
        assert value.startswith(limit), name


@pytest.mark.parametrize("section", ROWS)
def test_every_row_of_limits_is_compared(section: str) -> None:
    known = (*ROWS[section], *WITHOUT_A_CONSTANT)
    for row in rows(section):
        assert any(is_named(row, name) for name in known), row


@pytest.mark.parametrize(("section", "text"), [(k, text) for k, v in TEXTS.items() for text in v])
def test_limits_in_sentences_are_those_of_the_code(section: str, text: str) -> None:
    assert text in " ".join(SECTIONS[section].split())
