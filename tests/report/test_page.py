"""Laws of a page: it holds what it was given, escaped, and loads and runs nothing."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure as Canvas

from inferscope.report import (
    Bar,
    Block,
    Code,
    Column,
    Details,
    Figure,
    Number,
    Page,
    Prose,
    Section,
    Table,
    draw,
    render,
)
from inferscope.report.blocks import Marked, prose
from inferscope.report.plots import ALARM, DECODE, PREFILL
from tests.report.html import parse

HOSTILE = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "]]><svg onload=alert(1)>",
    "&lt;b&gt;&amp;",
    "$\\frac{1}{0}$",
)
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "nav", "a"),
    *("main", "section", "div", "table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td"),
    *("data", "code", "span", "figure", "figcaption", "details", "summary", "footer"),
}


def page_of(*blocks: Block, title: str = "Title") -> str:
    return render(Page(title, "subtitle", (Section("one", "One", blocks),)))


def every_block(text: str) -> list[Block]:
    return [
        Prose((text, Code(text), Marked(text, "alarm"), Number(text, 1, text))),
        Table(
            (Column(text, title=text), Column(text, "number"), Column(text, "bar")),
            ((text, Number(f"{text}2", None, "-"), Bar(0.25, 0.5, "decode")),),
            caption=text,
            total=((text, Code(text)), text, text),
            method=text,
        ),
        Details((text,), (prose(text),)),
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_shown_and_never_markup(text: str) -> None:
    parsed = parse(page_of(*every_block(text), title=text))
    assert {tag for tag, _ in parsed.tags} <= ALLOWED
    assert not [name for _, found in parsed.tags for name in found if name.startswith("on")]
    assert text.replace("`", "") in parsed.texts
    assert text in parsed.printed.values()


def test_characters_without_a_glyph_cannot_disguise_a_name() -> None:
    parsed = parse(page_of(Prose((Code("a\u202eb\x00c\x1b[31m\u200bd\ud800"), "名前"))))
    assert "a\ufffdb\ufffdc\ufffd[31m\ufffdd\ufffd" in parsed.texts
    assert "名前" in parsed.texts


def test_a_text_has_a_bounded_length() -> None:
    assert len(page_of(prose("x" * 10_000_000))) < len(page_of()) + 3_000


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    picture = draw((4, 2), lambda canvas: None, label="empty")
    html = page_of(Figure(picture, "caption"), *every_block("text"))
    assert "default-src 'none'" in html
    assert "<script" not in html
    assert not re.search(r"""(?:src|href)=["'](?!#)""", html)
    assert not re.search(r"@import|url\((?!#)", html)


def test_an_unknown_number_prints_a_dash_and_has_no_value() -> None:
    makers = (Number.ms, Number.duration, Number.share, Number.count, Number.rate)
    parsed = parse(page_of(Prose(tuple(make(f"{at}", None) for at, make in enumerate(makers)))))
    assert set(parsed.printed.values()) == {"-"}
    assert set(parsed.values.values()) == {None}


def test_a_plot_has_the_colours_of_the_page_and_its_own_ids() -> None:
    def plot(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.bar([1], [1], color=PREFILL, hatch="//", edgecolor=ALARM, gid="bars")
        axes.plot([1, 2], [2, 1], color=DECODE, gid="line")
        axes.set_title("$1 < $2 & <b>")

    tooltips = {"line": "<script>"}
    one = draw((4, 2), plot, label="<&>", tooltips=tooltips)
    html = page_of(Figure(one, "a"), Figure(one, "b"))
    assert "var(--prefill)" in one
    assert not re.search(r"#[0-9a-fA-F]{6}", one), "a colour that does not follow the page's"
    parsed = parse(html)
    ids = [found["id"] for _, found in parsed.tags if found.get("id")]
    assert len(set(ids)) == len(ids)
    used = re.findall(r"(?:href=\"#|url\(#)([^\")]+)", html)
    assert set(used) <= set(ids)
    assert "$1 < $2 & <b>" in parsed.texts, "a title is text, not shapes"
    assert parsed.texts.count("<script>") == 2


def test_the_same_plot_has_the_same_bytes() -> None:
    def plot(canvas: Canvas) -> None:
        canvas.subplots().plot([1, 2, 3], [1, 3, 2], color=DECODE)

    assert draw((4, 2), plot, label="") == draw((4, 2), plot, label="")
