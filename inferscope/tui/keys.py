"""Keys of the screens: texts of the footer and the help."""

from __future__ import annotations

from inferscope.text import Line, Span, fit_line

Key = tuple[str, str]
Section = tuple[str, tuple[Key, ...]]
"""Title and keys of a part of the help."""

OVERVIEW_KEYS: tuple[Key, ...] = (
    ("Enter", "detail"),
    ("/", "filter"),
    ("s", "sort"),
    ("Space", "freeze"),
    ("w", "window"),
    ("u", "unit"),
    ("z", "zoom"),
    ("e", "export"),
    (":", "palette"),
)
FROZEN_KEYS: tuple[Key, ...] = (("[ ]", "step"), ("End", "live"))
"""Keys that come first while the screen is frozen."""
ZOOM_KEYS: tuple[Key, ...] = (("z", "all panels"), ("Tab", "next panel"), ("w", "window"))
DETAIL_KEYS: tuple[Key, ...] = (
    ("Esc", "back"),
    ("← →", "prev/next request"),
    ("Enter", "step of the gap"),
    ("b", "request waited for"),
    ("x", "compare"),
    ("z", "gaps"),
    ("Space", "freeze"),
    ("y", "copy JSON"),
    ("e", "export"),
)
TIMELINE_KEYS: tuple[Key, ...] = (
    ("← →", "pan"),
    ("+ -", "zoom"),
    ("↑ ↓", "step"),
    ("Enter", "its requests"),
    ("s", "sort"),
    ("g", "go to step"),
    ("z", "lanes"),
    ("Space", "freeze"),
    ("Home", "newest"),
    ("e", "export"),
)
PAGE_KEYS: tuple[Key, ...] = (
    ("Space", "freeze"),
    ("[ ]", "step"),
    ("End", "live"),
    ("w", "window"),
    ("e", "export"),
    ("t", "theme"),
)
SLO_KEYS: tuple[Key, ...] = (
    ("Enter", "ledger of the request"),
    ("o", "change objectives"),
    ("W", "write them"),
    ("w", "window"),
    ("Space", "freeze"),
    ("e", "export"),
    (":", "palette"),
)
ENGINE_KEYS: tuple[Key, ...] = (
    ("d", "device and configuration"),
    ("w", "window"),
    ("Space", "freeze"),
    ("n", "next engine"),
    ("e", "export"),
    (":", "palette"),
)
FLEET_KEYS: tuple[Key, ...] = (
    ("Enter", "open engine"),
    ("w", "window"),
    ("Space", "freeze"),
    ("e", "export"),
    (":", "palette"),
)
GROUP_SCREEN_KEYS: tuple[Key, ...] = (
    ("Enter", "these requests"),
    ("b", "tenant, adapter, finish, model"),
    ("Esc", "back"),
    ("Space", "freeze"),
    ("e", "export"),
)
PAIR_KEYS: tuple[Key, ...] = (
    ("Esc", "back"),
    ("Space", "freeze"),
    ("e", "export"),
)
LAST_KEYS: tuple[Key, ...] = (("?", "help"), ("q", "quit"))

COMMON_HELP: tuple[Section, ...] = (
    (
        "Screens",
        (
            ("1 to 6  0", "the screens by number, 0 for all engines; or click one"),
            ("Esc", "back; ends a zoom or a filter first"),
            ("n  t", "next engine, if there are several; dark or light"),
        ),
    ),
    (
        "Time",
        (
            ("Space", "freeze the display; collection continues"),
            ("[ ]  End", "step through earlier snapshots; live again"),
            ("+ -", "repaint rate: 1, 2, 4, 10 Hz"),
        ),
    ),
    (
        "Take away",
        (
            ("e", "this screen as SVG and its snapshot as JSON, here"),
            ("m", "method and source of the numbers on this screen"),
            ("p p", "profile the engine for 3 s: its kernels by phase"),
            (": ctrl+p", "every command by name"),
            ("q ctrl+q", "quit; the server is unaffected"),
        ),
    ),
)
"""Keys of every screen."""
HELP: tuple[Section, ...] = (
    (
        "Requests",
        (
            ("↑ ↓  j k", "previous or next request; PgUp PgDn, g G for the ends"),
            ("Enter", "its latency ledger, then the step of its longest gap; , . another gap"),
            ("/", "filter: state:decode p99>30 id:rag* ttft>200 out>=10"),
            ("s S", "sort by the next column, reverse; or click a heading"),
            ("b", "requests by tenant, adapter, finish or model"),
            ("b  Tab", "in the ledger: the request it waited for; Tab selects another"),
            ("x  f", "mark a request, x on another compares them; pin one to the top"),
            ("y", "the request as JSON, to the clipboard"),
        ),
    ),
    (
        "Look",
        (
            ("w", "window of all numbers: 10 s, 60 s, 5 min"),
            ("u", "the other unit: % or ms"),
            ("z  Tab", "the focused panel alone, the next; in the detail: gaps of tokens"),
        ),
    ),
    *COMMON_HELP,
)
TIMELINE_HELP: tuple[Section, ...] = (
    (
        "Timeline",
        (
            ("← →  h l", "earlier or later; the display freezes first"),
            ("+ -", "shorter or longer time, 10 ms to 10 s"),
            ("↑ ↓  j k", "another step; PgUp PgDn, Home for the newest"),
            ("g", "go to a step by its number, or to the newest one of a request by its name"),
            ("Enter", "the requests of the step, then the ledger of one"),
            ("s", "sort by time, device ms, gap ms or slowness"),
            ("z", "the lanes alone, with more requests"),
        ),
    ),
    *COMMON_HELP,
)

SLO_HELP: tuple[Section, ...] = (
    (
        "Service levels",
        (
            ("↑ ↓  j k", "previous or next of the worst requests; g G for the ends"),
            ("Enter", "latency ledger of this request; Esc returns"),
            ("o", "other objectives: what the finished requests would have been under them"),
            ("W", "write the objectives in force to inferscope-slo.yaml, here"),
            ("w", "window of the distributions: 10 s, 60 s, 5 min"),
        ),
    ),
    *COMMON_HELP,
)
SLO_METHODS: tuple[str, ...] = (
    "good, bad    one verdict per request and objective, as inferscope slo check",
    "burn         bad share over the allowed share; 1x spends the budget by its end",
    "budget left  of what was observed here; a collector keeps the whole window",
    "causes       from the ledger: what exceeds good requests of like length the most",
)
FLEET_HELP: tuple[Section, ...] = (
    (
        "Fleet",
        (
            ("↑ ↓  j k", "previous or next engine; the other screens show the selected one"),
            ("Enter", "overview of this engine; 0 returns"),
        ),
    ),
    *COMMON_HELP,
)
FLEET_METHODS: tuple[str, ...] = (
    "▲            over twice the median of the other engines of the model, from 20 requests on",
    "burn         the fastest of the engine's objectives, over 5 minutes",
    "skew         busy time of the busiest rank over the mean of the ranks",
)
ENGINE_HELP: tuple[Section, ...] = (
    (
        "Engine",
        (
            ("d", "where it is narrow: device, configuration and probe, or the charts"),
            ("w", "window of the charts: 10 s, 60 s, 5 min"),
        ),
    ),
    *COMMON_HELP,
)
ENGINE_METHODS: tuple[str, ...] = (
    "pool, queue  the scheduler's plans; the last of each second, waiting as a mean",
    "drafts       tokens that the steps verified; the engine reports the accepted ones",
    "device       the newest sample of each counter; - without a source",
)

PAGE_HELP: tuple[Section, ...] = (
    (
        "A server's /metrics",
        (
            ("w", "window of the rates and latencies: 10 s, 60 s, 5 min"),
            ("Space", "freeze the display; polling continues, once a second"),
            ("[ ]  End", "step through the readings of the last hour; live again"),
            ("e", "this screen as SVG, its view as JSON, all views as JSON Lines, here"),
            ("t", "dark or light"),
            ("? m", "this help"),
            ("q ctrl+q", "quit; the server is unaffected"),
        ),
    ),
)
"""Keys of the metrics-page screen."""
PAGE_METHODS: tuple[str, ...] = (
    "rates        difference of the page's counters over the window",
    "latencies    within the bounds of the server's histograms: <150ms is in the first",
    "findings     rules that totals can decide; inferscope findings URL lists the others",
    "ledgers      none: start the server with inferscope run to have them",
)

ROOFLINE_KEYS: tuple[Key, ...] = (
    ("w", "window"),
    ("c", "clear trail"),
    ("z", "chart"),
    ("Space", "freeze"),
    ("e", "export"),
    (":", "palette"),
)
ROOFLINE_HELP: tuple[Section, ...] = (
    (
        "Roofline",
        (
            ("w", "window of the points: 10 s, 60 s, 5 min"),
            ("c", "the trail from now on"),
            ("z", "the chart alone"),
        ),
    ),
    *COMMON_HELP,
)
ROOFLINE_METHODS: tuple[str, ...] = (
    "measured     time of warm steps; peaks by inferscope calibrate, or spec by the maker",
    "modelled     FLOPs and bytes, computed from the model's shape; caches are not seen",
    "modelled     what would move it: from these and the ceilings, at the same context",
)
TIMELINE_METHODS: tuple[str, ...] = (
    "measured     step, gap, scheduler, KV, ranks: timed or counted; a cell is a mean of its time",
    "apportioned  prefill, decode and requests: parts of a step's measured time, which they sum to",
    "modelled     FLOP/s and B/s: work computed from the model's shape, over the measured time",
)
METHODS: tuple[str, ...] = (
    "measured     TTFT, TBT, E2E, queue, steps, tokens, KV: counted or timed",
    "apportioned  prefill and decode time: a request's share of its steps",
    "modelled     co-batched and interference: what a step takes without them",
)


def footer(keys: tuple[Key, ...], width: int) -> Line:
    """Return the footer with as many keys as fit; help and quit always do."""
    last = _spans(LAST_KEYS)
    room = width - _width(last) - 1
    spans: list[Span] = [(" ", "body")]
    for key in keys:
        more = _spans((key,))
        if _width(more) > room:
            break
        spans += more
        room -= _width(more)
    return fit_line((*spans, *last), width)


def _spans(keys: tuple[Key, ...]) -> list[Span]:
    spans: list[Span] = []
    for key, meaning in keys:
        spans += [(key, "key"), (f" {meaning}  ", "dim")]
    return spans


def _width(spans: list[Span]) -> int:
    return sum(len(text) for text, _ in spans)
