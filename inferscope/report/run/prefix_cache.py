"""What the prefix cache did for prompts, what misses cost, and what a larger cache would give."""

from __future__ import annotations

from inferscope.insight import CacheReport
from inferscope.insight.run import EngineFacts
from inferscope.records import CACHE_CLASS_BY_NAME, CACHE_CLASSES
from inferscope.report.blocks import Bar, Block, Cell, Column, Number, Section, Table, prose
from inferscope.text.plots import UNKNOWN


def prefix_cache(engine: EngineFacts) -> Section | None:
    """Return the prompts' tokens by their fate in the cache; None where it was not recorded."""
    report = engine.cache
    if report is None:
        return None
    use = report.use
    blocks: list[Block] = [
        prose(
            "{} of {} prompt tokens in {} requests came from the prefix cache.",
            Number.share("hit_share", use.whole.hit_share),
            Number.count("prompt_tokens", use.whole.prompt_tokens),
            Number.count("requests", use.whole.num_requests),
        ),
        _classes(report),
    ]
    if report.curve is not None:
        blocks.append(_curve(report))
    return Section("prefix-cache", "Prefix cache", tuple(blocks))


def _classes(report: CacheReport) -> Table:
    by_class = report.use.whole.by_class
    found = [(name, by_class[name]) for name in CACHE_CLASSES if name in by_class]
    whole = report.use.whole.prompt_tokens
    done, rows = 0, list[tuple[Cell, ...]]()
    for name, of in found:
        share = of.tokens / whole if whole else 0.0
        rows.append(
            (
                name,
                CACHE_CLASS_BY_NAME[name].label,
                Number.count(f"{name}.tokens", of.tokens),
                Number.share(f"{name}.share", share),
                Bar(done / whole if whole else 0.0, share),
                Number.ms(f"{name}.gpu_ns", of.gpu_ns),
                Number.ms(f"{name}.ttft_ns", of.ttft_ns),
            )
        )
        done += of.tokens
    return Table(
        (
            Column("class"),
            Column("meaning"),
            Column("tokens", "number"),
            Column("share", "number"),
            Column("", "bar"),
            Column("device ms", "number"),
            Column("TTFT ms", "number", "time before first tokens, summed over requests"),
        ),
        tuple(rows),
        total=(
            "prompts",
            "",
            Number.count("sum.tokens", done),
            "100.0%" if done else UNKNOWN,
            "",
            Number.ms("sum.gpu_ns", sum(of.gpu_ns for _, of in found)),
            Number.ms("sum.ttft_ns", sum(of.ttft_ns for _, of in found)),
        ),
        method=(
            "Counted: tokens by class. Apportioned: device time, each prefill's share of its steps,"
            " cut at the borders of the classes. Modelled: time before the first token, likewise."
        ),
    )


def _curve(report: CacheReport) -> Table:
    assert report.curve is not None
    points = [
        (
            f"{point.size:g}×" if point.size != 1 else "1× (now)",
            Number.count(f"curve.{point.size:g}.blocks", point.blocks),
            Number.share(f"curve.{point.size:g}.hit_share", point.hit_share),
            "" if point.hit_share is None else Bar(0, point.hit_share),
            point.withheld,
        )
        for point in report.curve.points
    ]
    return Table(
        (
            Column("size of the KV cache"),
            Column("blocks", "number"),
            Column("hit share", "number"),
            Column("", "bar"),
            Column("withheld because"),
        ),
        tuple(points),
        caption="The same requests with a KV cache of another size",
        method="Modelled from a sample of the blocks' accesses.",
    )
