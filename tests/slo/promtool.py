"""Series given as pieces, and what promtool makes of the generated rules with them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from inferscope.slo.objectives import read_objectives
from inferscope.slo.rules import FAST_INTERVAL_S, RuleOptions, rule_file
from inferscope.slo.rules_notes import rules_text
from tests import debian

SCRAPE_S = 15
MINUTE = 60 // SCRAPE_S
"""Scrapes in a minute."""
_LONGEST = 2000
"""Scrapes in a test, at most."""
OBJECTIVES = """
slos:
  - {metric: ttft, threshold: 500ms, objective: 99%, window: 30d}
  - {metric: availability, objective: 99.9%, window: 30d}
  - {metric: ttft, threshold: 500ms, objective: 99%, window: 1d, model: daily}
"""


def counter(*pieces: tuple[float, float], start: float = 0.0) -> str:
    """Return a counter: of each piece, how many minutes, and how much per second."""
    words, value = [], start
    for minutes, rate_s in pieces:
        num, step = round(minutes * MINUTE), rate_s * SCRAPE_S
        words.append(f"{value:.6f}+{step:.6f}x{num - 1}")
        value += step * num
    return " ".join(words)


def gauge(*pieces: tuple[float, float]) -> str:
    """Return a gauge: of each piece, how many minutes, and its value."""
    return " ".join(f"{value:.6f}x{round(minutes * MINUTE) - 1}" for minutes, value in pieces)


def gone(minutes: float) -> str:
    """Return a series without values."""
    return f"stale _x{round(minutes * MINUTE) - 1}"


@dataclass
class Run:
    """Series, and questions about what the rules make of them."""

    scrape_s: int = SCRAPE_S
    """Between two values of all series; `counter` and `gauge` are for SCRAPE_S."""
    series: dict[str, str] = field(default_factory=dict)
    asks: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, metric: str, values: str, **labels: str) -> None:
        """Add a series of an engine, `a` at `host` by default."""
        of = {
            "job": "inferscope",
            "instance": "host",
            "model_name": "m",
            "engine": "builtin",
            "engine_id": "a",
            "dp_rank": "0",
            "role": "both",
            **labels,
        }
        self.series[metric + _braces(of)] = values
        if (
            metric == "inferscope_source_up"
        ):  # an observed engine is folded, unless a test sets otherwise
            folded = {name: value for name, value in of.items() if name != "source"}
            name = "inferscope_folded_timestamp_seconds" + _braces(folded)
            self.series.setdefault(name, f"0+{self.scrape_s}x{_LONGEST}")

    def requests(self, slo: str, *, good: str, bad: str, cause: str = "queue", **of: str) -> None:
        """Add the requests of an objective, the bad ones for one cause."""
        self.add("inferscope_slo_requests_total", good, slo=slo, result="good", **of)
        self.add("inferscope_slo_requests_total", bad, slo=slo, result="bad", **of)
        self.add("inferscope_slo_breaches_total", bad, slo=slo, cause=cause, **of)

    def healthy(self, minutes: float, *, steps_s: float = 20.0, **of: str) -> None:
        """Add an engine at work, well seen."""
        self.up(gauge((minutes, 1)), **of)
        self.add("inferscope_requests_running", gauge((minutes, 8)), **of)
        self.steps(counter((minutes, steps_s)), **of)

    def up(self, values: str, **of: str) -> None:
        """Add a target and the probe of its engine."""
        self.series[f'up{{instance="{of.get("instance", "host")}", job="inferscope"}}'] = values
        self.add("inferscope_source_up", values.replace("0.0", "1.0"), source="probe", **of)

    def steps(self, values: str, **of: str) -> None:
        """Add an engine's steps, all between 20 and 25 ms."""
        name = "inferscope_step_duration_seconds"
        self.add(f"{name}_count", values, phase="decode", **of)
        for bound in ("0.025", "+Inf"):
            self.add(f"{name}_bucket", values, phase="decode", le=bound, **of)

    def ask(self, minute: float, query: str, *samples: tuple[Mapping[str, str], float]) -> None:
        """Add a query with its expected answer."""
        expected = [{"labels": _braces(labels), "value": value} for labels, value in samples]
        self.asks.append({"expr": query, "eval_time": _at(minute), "exp_samples": expected})

    def fires(self, minute: float, *alerts: str) -> None:
        """Expect exactly these alerts to fire then, each as NAME[/MODEL[/SLO]]."""
        samples = []
        for alert in alerts:
            name, model, slo = (*alert.split("/"), "", "")[:3]
            of = {"alertname": name, "model": model or "m", "slo": slo}
            samples.append(({key: value for key, value in of.items() if value}, 1.0))
        firing = 'group by (alertname, model, slo) (ALERTS{alertstate="firing"})'
        self.ask(minute, firing, *samples)

    def never_fired(self, minute: float) -> None:
        """Expect no alert up to then."""
        self.ask(minute, f'count_over_time(ALERTS{{alertstate="firing"}}[{_at(minute)}])')

    def expect_alert(self, minute: float, alert: str, labels: Mapping[str, str], **of: str) -> None:
        """Expect these annotations of the only alert of its name."""
        expected = [{"exp_labels": dict(labels), "exp_annotations": of}]
        self.alerts.append({"alertname": alert, "eval_time": _at(minute), "exp_alerts": expected})

    def holds(
        self,
        folder: Path,
        *,
        kept: Sequence[str] = (),
        options: RuleOptions | None = None,
        every_s: float = FAST_INTERVAL_S,
    ) -> None:
        """Run promtool on all expectations.

        Args:
            folder: to write in.
            kept: annotations that are looked at; the others are left out.
            options: of the rules.
            every_s: between evaluations, of all groups alike.
        """
        slos = folder / "slo.yaml"
        slos.write_text(OBJECTIVES, encoding="utf-8")
        rules = rule_file(read_objectives(slos), options or RuleOptions())
        for group in rules["groups"]:
            for rule in group["rules"]:
                notes = rule.get("annotations", {})
                if notes:
                    rule["annotations"] = {key: notes[key] for key in kept if key in notes}
        (folder / "rules.yaml").write_text(rules_text(rules), encoding="utf-8")
        test = {
            "interval": f"{self.scrape_s}s",
            "input_series": [
                {"series": series, "values": values} for series, values in self.series.items()
            ],
            "promql_expr_test": self.asks,
            "alert_rule_test": self.alerts,
        }
        whole = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": f"{every_s:g}s",
            "tests": [test],
        }
        (folder / "test.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
        done = run_promtool("test", "rules", "test.yaml", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr


def run_promtool(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a folder."""
    return subprocess.run(
        [debian.program("promtool"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "GOGC": "400"},  # half of its time was looking for garbage
    )


def _braces(labels: Mapping[str, str]) -> str:
    inner: Iterable[str] = (f"{name}={json.dumps(value)}" for name, value in labels.items())
    return f"{{{', '.join(inner)}}}"


def _at(minute: float) -> str:
    return f"{round(minute * 60)}s"
