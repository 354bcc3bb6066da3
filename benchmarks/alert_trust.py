"""Alert evaluation: pages of random hours with and without incidents, against the log.

    python benchmarks/alert_trust.py [--num N] [--seed S] [--kind KIND] [--json FILE]

Each scenario of `alert_scenarios.py` becomes series as Prometheus would have scraped them, every
15 s at a moment of its own, one scrape in two hundred failing. promtool runs the rules that
`inferscope slo rules` writes for OBJECTIVES over them, every 30 s, for hours of its own clock.

What should page was fixed before anything was counted, and is found in the log of requests, which
no scrape and no recorded rate has rounded:

    burn     bad requests over 1h and over 5m are 14.4 times those allowed, or over 6h and 30m 6
             times; at least 10 over the long window; at least 0.2 requests/s over the short one
    stall    an engine has requests and has made no step for four scrapes (60 s)
    livelock an engine has queued requests, nothing is scarce, and it has admitted none for as long
    blind    the collector is more than 60 s behind, or away, for 2 minutes

A page is EXPECTED if that is so with a tenth to spare and for long enough: for a burn the minute of
patience (10 s and three scrapes), for all an evaluation and a scrape. It is ALLOWED where it is so
with a tenth missing, at whatever moment, or was up to ten minutes ago (recorded rates are over five
minutes, and end five later). What is allowed and not expected is counted apart, as close.

    missed     expected, and no page was sent
    false      a page was sent, and nothing allowed it
    repeated   paged again, more than five minutes after a page's end, for what was one incident

Alerts of severity `page` of the model make one page, as Alertmanager's example groups them, those
of budgets held back while InferScopeBlind fires. The clock runs from the injection, not from where
it is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from alert_scenarios import HOUR_S, KINDS, Engine, Kind, Scenario, Times, scenario
from numpy.typing import NDArray

from inferscope.slo.objectives import read_objectives
from inferscope.slo.rules import FAST_INTERVAL_S, RuleOptions, rule_file
from inferscope.slo.rules_burn import EXPLAINED_S
from inferscope.slo.rules_health import BLIND
from inferscope.slo.rules_notes import rules_text

OBJECTIVES = """
slos:
  - {metric: ttft, threshold: 500ms, objective: 99%, window: 30d}
  - {metric: availability, objective: 99.9%, window: 30d}
"""
BUDGETS = {"ttft": 0.01, "availability": 0.001}
SCRAPE_S, LOST_SHARE = 15.0, 0.005
GRID_S = 5.0
"""Seconds between two evaluations of the log."""
SLACK_S = SCRAPE_S + FAST_INTERVAL_S
PATIENCE_S = EXPLAINED_S + 3 * SCRAPE_S
SPARE = 0.1
PAIRS = ((14.4, HOUR_S, 300.0), (6.0, 6 * HOUR_S, HOUR_S / 2))
FLOOR, LEAST_RATE_S = 10, 0.2
STALL_S, BEHIND_S, BLIND_S = 4 * SCRAPE_S, 60.0, 120.0
AFTER_S, ONE_PAGE_S, ONE_INCIDENT_S = 600.0, 300.0, 900.0
"""Longest delay of an allowed page, gap within one page, and gap within one incident, in s."""

Flags = NDArray[np.bool_]
Span = tuple[float, float]
"""Start and end in seconds since the scenario's start."""


@dataclass(frozen=True)
class Score:
    """Result of one scenario; times since the injection, or since the start without one."""

    kind: Kind
    seed: int
    words: dict[str, float | str]
    hours: float
    num_owed: int
    num_missed: int
    num_pages: int
    num_false: int
    num_repeated: int
    num_close: int
    num_close_paged: int
    to_page_s: float | None
    pages: list[tuple[float, list[str]]] = field(default_factory=list)


# --- what should page -----------------------------------------------------------------------------


def expected_pages(it: Scenario) -> list[Span]:
    """Return the spans of expected pages, one for each incident."""
    more = 1 + SPARE
    spans = _lasting(_burning(it, more), PATIENCE_S + SLACK_S)
    spans += _lasting(_stalled_s(it) >= STALL_S * more, SLACK_S)
    spans += _lasting(_stuck_s(it) >= STALL_S * more, SLACK_S)
    spans += _lasting(_behind_s(it) > BEHIND_S * more, BLIND_S * more + SLACK_S)
    return _merged(spans, ONE_INCIDENT_S)


def allowed(it: Scenario) -> list[Span]:
    """Return the spans in which pages are allowed."""
    less = 1 - SPARE
    spans = _lasting(_burning(it, less), 0.0)
    # Four scrapes span three scrape intervals.
    spans += _lasting(_stalled_s(it) >= STALL_S - SCRAPE_S, 0.0)
    spans += _lasting(_stuck_s(it) >= STALL_S - SCRAPE_S, 0.0)
    spans += _lasting(_behind_s(it) > BEHIND_S * less, BLIND_S * less)
    return _merged(spans, ONE_INCIDENT_S)


def _grid(it: Scenario) -> Times:
    return np.arange(0.0, it.length_s, GRID_S)


def _burning(it: Scenario, by: float) -> Flags:
    """Return whether a budget burns fast, with all thresholds times a factor."""
    at_s = _grid(it)
    found = np.zeros(len(at_s), dtype=bool)
    for slo, budget in BUDGETS.items():
        bad_s, good_s = it.decided(slo, "bad"), it.decided(slo, "good")
        for factor, long_s, short_s in PAIRS:
            bad_share = factor * budget * by
            is_so = _num(bad_s, at_s, long_s) >= FLOOR * by
            for over_s in (long_s, short_s):
                num_bad = _num(bad_s, at_s, over_s)
                is_so &= num_bad > bad_share * (num_bad + _num(good_s, at_s, over_s))
            every = _num(bad_s, at_s, short_s) + _num(good_s, at_s, short_s)
            found |= is_so & (every >= LEAST_RATE_S * by * short_s)
    return found


def _num(times: Times, at_s: Times, over_s: float) -> NDArray[np.int64]:
    """Return the number of times within a window that ends at each moment."""
    return np.searchsorted(times, at_s, "right") - np.searchsorted(times, at_s - over_s, "right")


def _stalled_s(it: Scenario) -> Times:
    """Return the seconds that an engine has had requests without a step."""
    at_s = _grid(it)
    hung = [(engine, engine.hung_s) for engine in it.engines if engine.hung_s is not None]
    return _longest_s(
        at_s,
        [
            (at_s >= from_s) & (at_s < to_s) & (engine.num_running(at_s) > 0)
            for engine, (from_s, to_s) in hung
        ],
    )


def _stuck_s(it: Scenario) -> Times:
    """Return the seconds that an engine has admitted none of its admissible requests."""
    at_s = _grid(it)
    return _longest_s(at_s, [engine.num_admissible(at_s) > 0 for engine in it.engines])


def _longest_s(at_s: Times, flags: Iterable[Flags]) -> Times:
    """Return the seconds that any flag has been up; each goes up once."""
    longest_s = np.zeros(len(at_s))
    for is_up in flags:
        if is_up.any():
            longest_s = np.maximum(longest_s, np.where(is_up, at_s - at_s[is_up][0], 0.0))
    return longest_s


def _behind_s(it: Scenario) -> Times:
    """Return the collector's lag in seconds; infinite while it does not run."""
    at_s = _grid(it)
    seen_s = it.seen_s[at_s.astype(int)]
    return np.where(np.isnan(seen_s), np.inf, at_s - seen_s)


def _lasting(flags: Flags, least_s: float) -> list[Span]:
    """Return the spans in which a flag is up for at least `least_s`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    spans = [(start * GRID_S, (end - 1) * GRID_S) for start, end in edges.reshape(-1, 2).tolist()]
    return [span for span in spans if span[1] - span[0] >= least_s]


def _merged(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Merge spans with gaps of at most `gap_s`."""
    found: list[Span] = []
    for start_s, end_s in sorted(spans):
        if found and start_s - found[-1][1] <= gap_s:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


# --- what is scraped ------------------------------------------------------------------------------


def series(it: Scenario) -> dict[str, str]:
    """Return Prometheus's series of a scenario in promtool's notation."""
    draw = np.random.default_rng([KINDS.index(it.kind), it.seed, 1])
    found: dict[str, str] = {}
    hosts = {engine.name: engine.name.split("-")[0] for engine in it.engines}
    for host in dict.fromkeys(hosts.values()):
        phase_s = int(draw.integers(SCRAPE_S))
        at_s = np.arange(phase_s, it.length_s, SCRAPE_S)
        seen_s = it.seen_s[at_s.astype(int)]
        is_lost = (draw.random(len(at_s)) < LOST_SHARE) | np.isnan(seen_s)
        up = _samples(np.where(is_lost, 0, 1), np.ones(len(at_s), dtype=bool))
        values_of = {f'up{{job="inferscope", instance="{host}"}}': up}
        seen_s = np.where(np.isnan(seen_s), 0.0, seen_s)
        for engine in it.engines:
            if hosts[engine.name] == host:
                is_there = ~is_lost & (seen_s >= engine.born_s)
                values_of |= _of_engine(it, engine, host, seen_s, is_there)
        # promtool has a sample a second: none until the first scrape, and none between two.
        first, between = (f"_x{num} " if num else "" for num in (phase_s, round(SCRAPE_S) - 1))
        found |= {name: first + f" {between}".join(words) for name, words in values_of.items()}
    return found


def _of_engine(
    it: Scenario, engine: Engine, host: str, seen_s: Times, is_there: Flags
) -> Iterator[tuple[str, list[str]]]:
    labels = {
        "job": "inferscope", "instance": host, "model_name": "m", "engine": "builtin",
        "engine_id": engine.name, "dp_rank": "0", "role": "both",
    }  # fmt: skip

    def named(name: str, **more: str) -> str:
        inner = ", ".join(f'{key}="{value}"' for key, value in {**labels, **more}.items())
        return f"{name}{{{inner}}}"

    is_alive = seen_s < engine.dead_s + 5.0
    yield named("inferscope_source_up", source="probe"), _samples(is_alive * 1, is_there)
    running = engine.num_running(seen_s)
    yield named("inferscope_requests_running"), _samples(running, is_there & is_alive)
    admissible = engine.num_admissible(seen_s)
    yield named("inferscope_requests_admissible"), _samples(admissible, is_there & is_alive)
    yield named("inferscope_folded_timestamp_seconds"), _samples(seen_s, is_there)
    counted = {
        named("inferscope_admissions_total"): engine.num_admitted,
        named("inferscope_step_duration_seconds_count", phase="decode"): engine.num_steps,
    }
    for bound in ("0.025", "+Inf"):
        bucket = named("inferscope_step_duration_seconds_bucket", phase="decode", le=bound)
        counted[bucket] = engine.num_steps
    for (slo, result), times in engine.decided_s.items():

        def num(until_s: Times, times: Times = times) -> Times:
            return np.searchsorted(times, until_s, "right").astype(float)

        counted[named("inferscope_slo_requests_total", slo=slo, result=result)] = num
        if result == "bad":
            cause = "queue" if slo == "ttft" else "engine_lost"
            counted[named("inferscope_slo_breaches_total", slo=slo, cause=cause)] = num
    for name, count in counted.items():
        values_of = count(seen_s)
        if it.back_s is not None:  # a new collector counts from zero
            before = count(np.array([it.back_s]))[0]
            values_of = np.where(
                seen_s >= it.back_s - 2, np.maximum(values_of - before, 0), values_of
            )
        yield name, _samples(values_of, is_there)


def _samples(values: NDArray[np.generic], is_there: Flags) -> list[str]:
    """Return samples in promtool's notation; a series without its sample becomes stale."""
    words = [f"{value:.10g}" for value in values.tolist()]
    was_there = False
    for at, is_now in enumerate(is_there.tolist()):
        if not is_now:
            words[at] = "stale" if was_there else "_"
        was_there = is_now
    return words


# --- what the rules make of it --------------------------------------------------------------------


def write_rules(folder: Path) -> None:
    """Write the paging rules, without annotations and ticket-only recording rules."""
    file = folder / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    rules = rule_file(read_objectives(file), RuleOptions(scrape_s=SCRAPE_S))
    groups = {group["name"]: group for group in rules["groups"]}
    del groups["inferscope-budgets-long"]
    rules["groups"] = list(groups.values())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "rules.yaml").write_text(rules_text(rules), encoding="utf-8")


def firing(it: Scenario, folder: Path) -> dict[float, list[str]]:
    """Return the firing page alerts by evaluation time."""
    asked = 'group by (alertname, slo) (ALERTS{alertstate="firing", severity="page"})'
    times = np.arange(0.0, it.length_s, FAST_INTERVAL_S)
    test = {
        "interval": "1s",
        "input_series": [{"series": k, "values": v} for k, v in series(it).items()],
        # With nothing expected, promtool reports all samples.
        "promql_expr_test": [
            {"expr": asked, "eval_time": f"{at_s:.0f}s", "exp_samples": []} for at_s in times
        ],
    }
    whole = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": f"{FAST_INTERVAL_S:g}s",
        "tests": [test],
    }
    (folder / "test.json").write_text(json.dumps(whole), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "test.json"],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "GOGC": "400", "GOMAXPROCS": "1"},
    )  # fmt: skip
    return parse_report(done.stdout + done.stderr)


def parse_report(text: str) -> dict[float, list[str]]:
    """Parse promtool's report of unexpected samples.

    Raises:
        SystemExit: the report has another form.
    """
    found: dict[float, list[str]] = {}
    complaint = re.compile(r"time: (\S+),\s+exp: ?nil\s+got: ?(.*)")
    for when, got in complaint.findall(text):
        alerts = []
        for labels in re.findall(r"\{([^}]*)\}", got):
            values_of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            alerts.append("/".join(filter(None, (values_of["alertname"], values_of.get("slo")))))
        found[_seconds(when)] = sorted(alerts)
    if len(found) != text.count("expr:") or (not found and "SUCCESS" not in text):
        raise SystemExit(f"cannot parse promtool's report. Check its version:\n{text[:2000]}")
    return found


def _seconds(span: str) -> float:
    units_s = {"h": 3600, "m": 60, "s": 1}
    return float(sum(int(n) * units_s[unit] for n, unit in re.findall(r"(\d+)([hms])", span)))


def pages(fires: dict[float, list[str]]) -> list[tuple[Span, list[str]]]:
    """Return the spans of pages, each with the alerts at its start."""
    spans = []
    for at_s, alerts in sorted(fires.items()):
        is_blind = BLIND in alerts
        fired = [each for each in alerts if not (is_blind and "/" in each)]
        if fired:
            spans.append(((at_s, at_s), fired))
    merged = _merged((span for span, _ in spans), ONE_PAGE_S)
    first = {span[0]: fired for span, fired in spans}
    return [(span, first[span[0]]) for span in merged]


def score(it: Scenario, woken: Sequence[tuple[Span, list[str]]]) -> Score:
    """Compare the pages with those expected and allowed."""
    must, may = expected_pages(it), allowed(it)

    def answers(page: Span, span: Span) -> bool:
        return page[0] <= span[1] + AFTER_S and page[1] >= span[0]

    paged = {span: [page for page, _ in woken if answers(page, span)] for span in may}
    close = [span for span in may if not any(answers(one, span) for one in must)]
    allowed_at = [any(span[0] <= page[0] <= span[1] + AFTER_S for span in may) for page, _ in woken]
    start_s = it.incident_s[0] if it.incident_s else 0.0
    answered = [page for page, _ in woken if any(answers(page, span) for span in must)]
    after_s = [page[0] - start_s for page in answered if page[0] >= start_s]
    return Score(
        kind=it.kind,
        seed=it.seed,
        words=it.words,
        hours=it.length_s / HOUR_S,
        num_owed=len(must),
        num_missed=sum(not any(answers(page, span) for page, _ in woken) for span in must),
        num_pages=len(woken),
        num_false=allowed_at.count(False),
        num_repeated=sum(max(0, len(found) - 1) for found in paged.values()),
        num_close=len(close),
        num_close_paged=sum(bool(paged[span]) for span in close),
        to_page_s=min(after_s, default=None),
        pages=[(page[0] - start_s, heard) for page, heard in woken],
    )


def tried(kind: Kind, seed: int) -> Score:
    """Draw a scenario, evaluate the rules in promtool, and score it."""
    it = scenario(kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        write_rules(Path(folder))
        return score(it, pages(firing(it, Path(folder))))


# --- the report -----------------------------------------------------------------------------------


def summary(scores: Sequence[Score]) -> dict[str, float | int | None]:
    """Return the totals of some scenarios, and the delays until a page."""
    took_s = sorted(each.to_page_s for each in scores if each.to_page_s is not None)
    num: dict[str, float | int | None] = {
        name: sum(getattr(each, f"num_{name}") for each in scores)
        for name in ("owed", "missed", "pages", "false", "repeated", "close", "close_paged")
    }
    return {
        "scenarios": len(scores),
        "hours": round(sum(each.hours for each in scores), 1),
        **num,
        "to_page_median_s": statistics.median(took_s) if took_s else None,
        "to_page_p95_s": took_s[max(0, -(-95 * len(took_s) // 100) - 1)] if took_s else None,
    }


def main() -> None:
    """Draw scenarios, evaluate them and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--num", type=int, default=40, help="number of scenarios of each kind")
    parser.add_argument("--seed", type=int, default=1, help="seed of each kind's first scenario")
    parser.add_argument("--kind", choices=KINDS, help="kind to run (default: all)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began_s = time.process_time()
    seeds = range(options.seed, options.seed + options.num)
    kinds = (options.kind,) if options.kind else KINDS
    drawn = [(kind, seed) for kind in kinds for seed in seeds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scores = list(pool.map(tried, *zip(*drawn, strict=True)))
    table = {kind: summary([s for s in scores if s.kind == kind]) for kind in KINDS}
    table = {kind: row for kind, row in table.items() if row["scenarios"]}
    table["all"] = summary(scores)
    headings = list(table["all"])
    print(" ".join(f"{word:>16}" for word in ("kind", *headings)))
    for kind, row in table.items():
        cells = ("-" if row[word] is None else f"{row[word]:g}" for word in headings)
        print(" ".join(f"{word:>16}" for word in (kind, *cells)))
    wrong = [each for each in scores if each.num_missed or each.num_false or each.num_repeated]
    for each in wrong:
        print(json.dumps(asdict(each)))
    if options.json is not None:
        spent = os.times()
        found = {
            "by_kind": table,
            "seeds": [seeds.start, seeds.stop - 1],
            "cpu_s": round(time.process_time() - began_s + spent.children_user, 1),
            "wrong": [asdict(each) for each in wrong],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
