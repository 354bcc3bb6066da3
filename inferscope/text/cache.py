"""Use of the prefix cache as text and as JSON: waterfall, groups, differences, curve."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

import msgspec

from inferscope.fold import Curve, CurvePoint
from inferscope.insight import (
    CacheBy,
    CacheGroup,
    CacheReport,
    ClassUse,
    Divergence,
    EngineCache,
    in_order,
)
from inferscope.json_document import Document, json_line
from inferscope.records import CACHE_CLASS_BY_NAME
from inferscope.text.labels import SYNTHETIC
from inferscope.text.plots import (
    UNKNOWN,
    closed,
    duration,
    fit_name,
    milliseconds,
    offset_bar,
    plain,
    share,
    to_ascii,
)

_NAME, _NUMBER, _BAR, _LEAST_BAR = 12, 11, 30, 10
_MOST_ROWS, _MOST_DIVERGENCES = 20, 5
_NS_PER_TENTH_MS = 100_000
_UNNAMED = {
    "tenant": "(no tenant)",
    "part": "(no parts)",
    "conversation": "(no conversation)",
}
_PRICES = (
    "Counted: tokens by class. Apportioned: GPU time, each prefill's share of its steps, cut at the"
    " borders of the classes. Modelled: time before the first token, likewise from `prefill_own`."
)


class CacheClassRow(msgspec.Struct, frozen=True):
    """Prompt tokens of one class."""

    cache: str
    """Class: hit, off, cleared, evicted, pending, rounding, rule, namespace, changed, new or
    unknown."""
    prompt_tokens: int
    """Prompt tokens."""
    share: float | None
    """Share of all prompt tokens; null without tokens."""
    gpu_ns: int
    """Device time spent on them, as far as it is known."""
    ttft_ns: int
    """Time before first tokens spent on them, summed over requests."""


class CacheGroupRow(msgspec.Struct, frozen=True):
    """Requests with one tenant, prompt part or conversation."""

    name: str | None
    """Name; null where the records hold none."""
    num_requests: int
    """Number of requests."""
    hit_share: float | None
    """Share of their prompt tokens that came from the cache."""
    miss_gpu_ns: int
    """Device time spent on the other tokens."""
    classes: tuple[CacheClassRow, ...]
    """Their tokens by class."""


class DivergenceRow(msgspec.Struct, frozen=True):
    """Prompts that differ from an earlier one at about one position."""

    at_tokens: int
    """First position of a bin of 16 tokens."""
    part: str | None
    """Declared prompt part at the difference; null without parts."""
    num_requests: int
    """Number of requests that differ there."""
    changed_tokens: int
    """Tokens behind it that were seen before."""
    gpu_ns: int
    """Device time spent on these."""
    example: str
    """One of the requests."""


class CacheEngine(msgspec.Struct, frozen=True):
    """Use of one engine's prefix cache."""

    engine: str
    """Engine ID."""
    model: str
    """Name of the model."""
    num_requests: int
    """Requests whose use of the cache was recorded."""
    num_unknown: int
    """Finished requests whose use was not recorded."""
    num_unpriced: int
    """Requests without a price, since some chunk of their prefill was not observed."""
    prompt_tokens: int
    """Prompt tokens; the classes sum to them."""
    hit_share: float | None
    """Share of them that came from the cache."""
    block_tokens: int | None
    """Tokens of a KV block; null if unknown."""
    below_block_tokens: int
    """Tokens equal to an earlier prompt's that do not fill a block."""
    queue_evicted_ns: int
    """Time that requests queued while evicted tokens were recomputed."""
    classes: tuple[CacheClassRow, ...]
    """Tokens by class, from hit to new."""
    groups: tuple[CacheGroupRow, ...]
    """Groups of the kind `by`, the largest price first; empty by cause."""
    divergences: tuple[DivergenceRow, ...]
    """Positions of difference, the largest price first; at most 20."""
    curve: Curve | None
    """Hit ratio by size of the KV cache; null without samples."""
    curve_by_tenant: dict[str, Curve]
    """The same for the requests of each tenant, who share the cache."""
    synthetic: bool
    """Whether the records are marked as synthetic."""


class CacheDocument(Document, frozen=True, kw_only=True):
    """Use of the prefix cache (`inferscope cache --json`)."""

    by: str
    """Kind of the groups: cause, tenant, part or conversation."""
    engines: tuple[CacheEngine, ...]
    """Engines whose use of the cache was recorded."""


def cache_json(reports: Iterable[CacheReport], by: CacheBy) -> str:
    """Return the reports as the line that `--json` prints."""
    return json_line(CacheDocument(by=by, engines=tuple(_engine(each, by) for each in reports)))


def _engine(report: CacheReport, by: CacheBy) -> CacheEngine:
    use = report.use
    return CacheEngine(
        engine=report.engine_id,
        model=report.model,
        num_requests=use.whole.num_requests,
        num_unknown=use.num_unknown,
        num_unpriced=use.num_unpriced,
        prompt_tokens=use.whole.prompt_tokens,
        hit_share=use.whole.hit_share,
        block_tokens=use.block_tokens or None,
        below_block_tokens=use.below_block_tokens,
        queue_evicted_ns=use.queue_evicted_ns,
        classes=_class_rows(use.whole),
        groups=tuple(
            CacheGroupRow(
                group.name or None,
                group.num_requests,
                group.hit_share,
                group.miss_gpu_ns,
                _class_rows(group),
            )
            for group in use.largest(by)
        ),
        divergences=tuple(
            DivergenceRow(
                each.position,
                each.part or None,
                each.num_requests,
                each.changed_tokens,
                each.gpu_ns,
                each.example,
            )
            for each in use.worst_divergences(20)
        ),
        curve=report.curve,
        curve_by_tenant=dict(report.curves),
        synthetic=report.is_synthetic,
    )


def _class_rows(group: CacheGroup) -> tuple[CacheClassRow, ...]:
    whole = group.prompt_tokens
    return tuple(
        CacheClassRow(name, of.tokens, of.tokens / whole if whole else None, of.gpu_ns, of.ttft_ns)
        for name, of in in_order(group.by_class)
    )


def cache_lines(
    reports: Iterable[CacheReport], by: CacheBy, *, width: int = 100, ascii: bool = False
) -> str:
    """Return the reports as text, one engine after the other."""
    text = "\n".join("\n".join(_page(report, by, width)) + "\n" for report in reports)
    return to_ascii(text) if ascii else text


def _page(report: CacheReport, by: CacheBy, width: int) -> Iterator[str]:
    use = report.use
    title = f"{plain(report.model or 'Engine')} ({plain(report.engine_id)})"
    hit = share(use.whole.hit_share)
    yield from _wrapped(
        f"{title}: {hit} of {use.whole.prompt_tokens:,} prompt tokens in"
        f" {use.whole.num_requests:,} requests came from the prefix cache.",
        width,
    )
    yield ""
    yield from _body(report, by, width)
    yield ""
    for sentence in _caveats(report):
        yield from _wrapped(sentence, width)


def _body(report: CacheReport, by: CacheBy, width: int) -> Iterator[str]:
    use = report.use
    yield from waterfall(use, width)
    if by != "cause":
        yield ""
        yield from _groups(use, by)
    found = use.worst_divergences(_MOST_DIVERGENCES)
    if found:
        yield ""
        yield from _divergences(found)
    if report.curve is not None:
        yield ""
        yield from _wrapped(curve_sentence(report.curve), width)
        for tenant, of in report.curves.items():
            yield from _wrapped(f"{plain(tenant)}: {curve_sentence(of)}", width)


def waterfall(use: EngineCache, width: int) -> list[str]:
    """Return a row per class from hit to new: tokens, share, prices, and its place in the whole."""
    rows = in_order(use.whole.by_class)
    tokens = [of.tokens for _, of in rows]
    mills = closed(tokens, 1000)
    gpu_ns, ttft_ns = ([getattr(of, key) for _, of in rows] for key in ("gpu_ns", "ttft_ns"))
    gpu, ttft = (closed(ns, round(sum(ns) / _NS_PER_TENTH_MS)) for ns in (gpu_ns, ttft_ns))
    labels = [CACHE_CLASS_BY_NAME[name].label for name, _ in rows]
    room = min(_BAR, width - _NAME - 3 * _NUMBER - 8 - 2 - max(map(len, labels), default=0) - 1)
    lines = [
        f"{'class':{_NAME}}{'tokens':>{_NUMBER}}{'of all':>8}{'GPU ms':>{_NUMBER}}"
        f"{'TTFT ms':>{_NUMBER}}"
    ]
    done, whole = 0, max(1, sum(tokens))
    for at, (name, of) in enumerate(rows):
        drawn = ""
        if room >= _LEAST_BAR:
            drawn = offset_bar(done / whole, (done + of.tokens) / whole, room) + " "
        done += of.tokens
        lines.append(
            f"{name:{_NAME}}{of.tokens:>{_NUMBER},}{mills[at] / 10:>7.1f}%"
            f"{gpu[at] / 10:>{_NUMBER},.1f}{ttft[at] / 10:>{_NUMBER},.1f}  {drawn}{labels[at]}"
        )
    lines.append(
        f"{'prompts':{_NAME}}{sum(tokens):>{_NUMBER},}{sum(mills) / 10:>7.1f}%"
        f"{sum(gpu) / 10:>{_NUMBER},.1f}{sum(ttft) / 10:>{_NUMBER},.1f}"
    )
    return [line.rstrip() for line in lines]


def _groups(use: EngineCache, by: CacheBy) -> Iterator[str]:
    names = ("evicted", "pending", "namespace", "changed", "new")
    heads = "".join(f"{name:>{_NUMBER}}" for name in ("requests", "tokens", "hit", *names))
    yield f"{'by ' + by:24}{heads}{'GPU ms':>{_NUMBER}}"
    groups = use.largest(by)
    for group in groups[:_MOST_ROWS]:
        whole = group.prompt_tokens
        shares = [
            share(group.by_class.get(name, ClassUse()).tokens / whole if whole else None)
            for name in names
        ]
        cells = [f"{group.num_requests:,}", f"{whole:,}", share(group.hit_share), *shares]
        name = fit_name(plain(group.name) or _UNNAMED[by], 24)
        price = milliseconds(group.miss_gpu_ns, width=_NUMBER - 1)
        yield name + "".join(f"{cell:>{_NUMBER}}" for cell in (*cells, price))
    if len(groups) > _MOST_ROWS:
        yield f"… and {len(groups) - _MOST_ROWS} more; --json lists all"


def _divergences(found: list[Divergence]) -> Iterator[str]:
    yield "Where prompts differ from earlier ones, by the price of what is behind:"
    yield f"{'token':>8}  {'part':20}{'requests':>10}{'behind it':>{_NUMBER}}{'GPU ms':>{_NUMBER}}"
    for each in found:
        yield (
            f"{each.position:>8,}  {fit_name(plain(each.part) or UNKNOWN, 20)}"
            f"{each.num_requests:>10,}{each.changed_tokens:>{_NUMBER},}"
            f"{milliseconds(each.gpu_ns, width=_NUMBER - 1):>{_NUMBER}}"
            f"  such as {plain(each.example)}"
        )


def curve_sentence(curve: Curve) -> str:
    """Return the curve in one sentence: `KV now 60.2 %; 2×: 72.0 %; 4×: 82.1 %`."""
    shown = [point for point in curve.points if point.hit_share is not None]
    phrases = [_point(point) for point in sorted(shown, key=lambda point: point.size != 1)]
    sentence = "Hit ratio by size of the KV cache (modelled from a sample): "
    sentence += "; ".join(phrases) + "." if phrases else "unknown."
    withheld = [point for point in curve.points if point.withheld]
    if withheld:
        sizes = ", ".join(f"{point.size:g}×" for point in withheld)
        sentence += f" {sizes} withheld: {withheld[-1].withheld}."
    return sentence


def _point(point: CurvePoint) -> str:
    size = "KV now" if point.size == 1 else f"{point.size:g}×:"
    return f"{size} {share(point.hit_share)}"


def _caveats(report: CacheReport) -> Iterator[str]:
    use = report.use
    if report.is_synthetic:
        yield SYNTHETIC
    if use.queue_evicted_ns:
        yield (
            f"Requests queued {duration(use.queue_evicted_ns)} in all while evicted tokens"
            " were recomputed."
        )
    yield _PRICES
    if use.num_unpriced:
        yield f"{use.num_unpriced:,} requests have no price: their prefill was not all observed."
    if use.num_unknown:
        yield (
            f"{use.num_unknown:,} finished requests were not admitted, or have no record of the"
            " cache; they are left out."
        )


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
