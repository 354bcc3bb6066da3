"""Write the tables of `metrics.md` from the exporter's table of metrics and the dashboards.

python -m docs.metrics_reference
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from inferscope_prometheus.metric_table import SECTIONS, MetricRow

from docs.json_reference import rows

PAGE = Path(__file__).with_name("metrics.md")
_HEADS = ("name", "type", "labels", "is", "[method](numbers.md)", "[dashboards](dashboards.md)")
_DASHBOARDS = sorted(Path(__file__).parents[1].glob("dashboards/grafana/*.json"))


def page() -> str:
    """Return the page, each section's table renewed."""
    text = PAGE.read_text(encoding="utf-8")
    shown = {
        json.loads(each)["title"].removeprefix("InferScope ")[0]: each
        for each in (path.read_text(encoding="utf-8") for path in _DASHBOARDS)
    }
    for title, metrics in SECTIONS.items():
        table = "\n".join(rows(_HEADS, (_cells(metric, shown) for metric in metrics)))
        before, heading, after = text.partition(f"\n## {title}\n")
        assert heading, f"{PAGE} has no section {title}"
        after = re.sub(
            r"^\|.*(\n\|.*)*", lambda _, new=table: new, after, count=1, flags=re.MULTILINE
        )
        text = before + heading + after
    return text


def _cells(metric: MetricRow, shown: dict[str, str]) -> tuple[str, ...]:
    name = re.compile(rf"\b{metric.full_name}(_bucket|_count|_sum)?\b")
    labels = ", ".join(f"`{label}`" for label in metric.own_labels.split())
    where = ", ".join(sorted(number for number, text in shown.items() if name.search(text)))
    definition = f"{metric.help} {metric.note}".strip()
    return f"`{metric.full_name}`", metric.kind, labels, definition, metric.method, where


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
