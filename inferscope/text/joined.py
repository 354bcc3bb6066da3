"""A client's latencies beside the server's as lines of text, and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter

from inferscope.insight.clients import Joined, MetricPair
from inferscope.json_document import Document, json_line
from inferscope.text.plots import UNKNOWN, duration, fit_name, milliseconds, plain, share, to_ascii

_MAX_ROWS = 10
_MAX_REASONS = 5
_NAME, _CELL = 30, 10


class JoinDocument(Document, frozen=True, kw_only=True):
    """A client's file beside a recording (`inferscope join --json`)."""

    source: str
    """Recording or engine."""
    file: str
    """Client's file."""
    joined: Joined
    """Sums, parts, matched and unmatched requests."""


def join_json(joined: Joined, *, source: str, file: str) -> str:
    """Return a join as the line that `--json` prints."""
    return json_line(JoinDocument(source=source, file=file, joined=joined))


def join_text(joined: Joined, *, width: int = 100, ascii: bool = False) -> str:
    """Return a join as text: sums, explanation, the largest differences, unmatched requests."""
    lines = [
        f"{joined.num_matched} of {joined.num_client} requests of {joined.client} are among the "
        f"{joined.num_server} finished ones of the server",
        *_failed(joined, width),
    ]
    pairs = {"TTFT": joined.ttft, "ITL": joined.itl, "E2E": joined.e2e}
    if any(pairs.values()):
        lines += ["", _head("ms", "client", "server", "client", "server", "client", "server")]
        lines.append(_head("", "mean", "mean", "p50", "p50", "p99", "p99"))
        lines += [_metric(name, pair) for name, pair in pairs.items()]
        lines += ["", *textwrap.wrap(" ".join(_explained(joined)), width)]
        lines += ["", *_requests(joined)]
    for each in joined.unmatched:
        examples = ", ".join(each.examples)
        names = f": {examples}{', …' if each.num > len(each.examples) else ''}" if examples else ""
        lines += textwrap.wrap(
            f"unmatched at the {each.side}: {each.num}, {plain(each.reason)}{plain(names)}",
            width,
            subsequent_indent="  ",
        )
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def _failed(joined: Joined, width: int) -> list[str]:
    """Return how many matched requests did not finish at the client, by reason."""
    nums = Counter(row.error for row in joined.requests if row.error)
    if not nums:
        return []
    reasons = ", ".join(f"{num} {plain(reason)}" for reason, num in nums.most_common(_MAX_REASONS))
    more = ", …" if len(nums) > _MAX_REASONS else ""
    return textwrap.wrap(
        f"{nums.total()} of them did not finish at the client: {reasons}{more}",
        width,
        subsequent_indent="  ",
    )


def _explained(joined: Joined) -> list[str]:
    ttft = joined.ttft
    if ttft is None:
        return ["No matched request has a time to first token at both ends."]
    part = ttft.server_mean_ns / ttft.client_mean_ns if ttft.client_mean_ns else None
    sentences = [
        f"Of the client's mean TTFT, {share(part)} is the server's; the client measured "
        f"{duration(abs(ttft.difference_mean_ns))} "
        f"{'more' if ttft.difference_mean_ns >= 0 else 'less'}."
    ]
    if joined.before_mean_ns is not None and joined.after_mean_ns is not None:
        sentences.append(
            f"{_signed(joined.before_mean_ns)} passed before the request arrived (connection, "
            f"network, the client's sending) and {_signed(joined.after_mean_ns)} after its first "
            "token left (network, the client's reading)."
        )
    elif joined.no_parts:
        sentences.append(f"Its parts are unknown: {joined.no_parts}.")
    if joined.arrived_at == "engine":
        sentences.append("The server's time begins at its engine: its front end is in the rest.")
    elif joined.frontend_mean_ns is not None:
        sentences.append(
            f"The server's front end took {duration(joined.frontend_mean_ns)} of its own time."
        )
    return sentences


def _requests(joined: Joined) -> list[str]:
    """Return the requests whose TTFT differs most."""
    known = [
        (row.client_ttft_ns - row.server_ttft_ns, row)
        for row in joined.requests
        if row.client_ttft_ns is not None and row.server_ttft_ns is not None
    ]
    known.sort(key=lambda each: -abs(each[0]))
    lines = ["Largest differences of TTFT"]
    lines.append(_head("ms", "client", "server", "before", "after", "ITL", "server"))
    for _, row in known[:_MAX_ROWS]:
        lines.append(
            _line(
                row.id,
                *(row.client_ttft_ns, row.server_ttft_ns, row.before_ns, row.after_ns),
                *(row.client_itl_ns, row.server_itl_ns),
            )
        )
    return lines


def _metric(name: str, pair: MetricPair | None) -> str:
    if pair is None:
        return _line(name, *[None] * 6)
    return _line(
        name,
        *(pair.client_mean_ns, pair.server_mean_ns, pair.client_p50_ns, pair.server_p50_ns),
        *(pair.client_p99_ns, pair.server_p99_ns),
    )


def _line(name: str, *values_ns: int | None) -> str:
    cells = (UNKNOWN if ns is None else milliseconds(ns) for ns in values_ns)
    return fit_name(plain(name), _NAME) + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _head(name: str, *words: str) -> str:
    return f"{name:<{_NAME}}" + "".join(f"{word:>{_CELL}}" for word in words)


def _signed(value_ns: int) -> str:
    return duration(value_ns) if value_ns >= 0 else f"-{duration(-value_ns)}"
