"""What the panels of phases show of an engine whose ranks are on several hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import debian
from tests.dashboards.reading import dashboards, queries
from tests.dashboards.test_queries import filled

CORE, ELSEWHERE, OTHER = ("one", "wide"), ("two", "wide"), ("two", "small")
"""Instance and engine."""
_PEAK_FLOPS = 100


def series(name: str, of: tuple[str, str], by_second: int, **more: str) -> dict[str, str]:
    """Return a counter that grows by `rate` a second."""
    instance, engine = of
    labels = {"job": "j", "instance": instance, "engine_id": engine, "model_name": "m", **more}
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{text}}}", "values": f"0+{by_second * 5}x12"}


@pytest.mark.parametrize(
    ("panel", "figure"),
    [("Share of the compute roofline", 60 / 200), ("Operations while in a phase", 60 / 2)],
)
def test_the_seconds_of_ranks_on_other_hosts_count_and_no_uncounted_engine_s(
    tmp_path: Path, panel: str, figure: float
) -> None:
    """The core's host tells the FLOPs of the whole engine, every host its own ranks' seconds."""
    phase = {"phase": "prefill"}
    input_series = [series("inferscope_flops_total", CORE, 60, **phase)]
    for of in (CORE, ELSEWHERE, OTHER):
        input_series.append(series("inferscope_gpu_phase_seconds_total", of, 1, **phase))
        peak = series("inferscope_gpu_peak_flops_per_second", of, 0, source="spec")
        input_series.append({**peak, "values": f"{_PEAK_FLOPS}x12"})
    (query,) = [
        query for each in dashboards().values() for query in queries(each) if query.panel == panel
    ]
    labels = '{model_name="m", phase="prefill"}'
    asked = {
        "expr": filled(query.expr),
        "eval_time": "50s",
        "exp_samples": [{"labels": labels, "value": figure}],
    }
    test = {"interval": "5s", "input_series": input_series, "promql_expr_test": [asked]}
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"evaluation_interval": "5s", "tests": [test]}), encoding="utf-8")
    done = subprocess.run(
        [debian.program("promtool"), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
