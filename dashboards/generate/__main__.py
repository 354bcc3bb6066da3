"""Write the dashboards to the `grafana` directory for Grafana's provisioning."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.generate.gpus import gpus
from dashboards.generate.health import health
from dashboards.generate.models import models
from dashboards.generate.phases import phases
from dashboards.generate.scheduler import scheduler
from dashboards.generate.slo import verdict
from dashboards.generate.slow import slow

FOLDER = Path(__file__).parents[1] / "grafana"


def dashboards() -> dict[str, str]:
    """Return all dashboards as JSON by file name."""
    made = (verdict(), models(), phases(), gpus(), scheduler(), slow(), health())
    return {
        f"{each.uid}.json": json.dumps(each, cls=JSONEncoder, sort_keys=True, indent=1) + "\n"
        for each in made
    }


def main() -> None:
    """Write the dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
