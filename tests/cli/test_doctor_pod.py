"""Inside a pod `doctor` prints the lines that its manifest lacks, and they are what ours have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from inferscope.cli.doctor.pod import IN_A_POD, pod
from tests.cli.running import inferscope
from tests.dashboards.test_kubernetes import Way

_ROOT = "1 0 0:1 / / rw - overlay overlay rw\n"
_SHARED = "2 1 0:2 /x /run/inferscope rw - tmpfs tmpfs rw\n"


def looked(folder: Path, mounts: str, *, has_engine: bool = True, **env: str) -> dict[str, str]:
    """Return what is missing, by name, with the lines that would help."""
    file = folder / "mountinfo"
    file.write_text(mounts, encoding="utf-8")
    found = pod({IN_A_POD: "10.0.0.1", **env}, has_engine=has_engine, mounts=file)
    return {each.name: each.fix for each in found if not each.is_fine}


def lines(fix: str) -> dict[str, Any]:
    """Return the lines of a fix as YAML has them; the first states where they belong."""
    manifest: dict[str, Any] = yaml.safe_load(fix.partition("\n")[2])
    return manifest


def test_a_bare_pod_gets_every_line_that_the_sidecars_manifest_has(tmp_path: Path) -> None:
    missing = looked(tmp_path, _ROOT)
    assert list(missing) == ["pod: rings", "pod: volume", "pod: engine", "pod: name"]
    way = Way("sidecar")
    (engine,) = way.pod.containers
    env = {each.name: each for each in engine.env}
    for name in ("pod: rings", "pod: engine", "pod: name"):
        for lines_added in lines(missing[name])["env"]:
            ours = env[lines_added["name"]]
            assert lines_added.get("value") == ours.value
            if ours.value_from is not None:
                path = lines_added["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == ours.value_from.field_ref.field_path
    lines_added = lines(missing["pod: volume"])
    assert lines_added["volumeMounts"] == [{"name": "rings", "mountPath": "/run/inferscope"}]
    (rings,) = (volume for volume in way.pod.volumes if volume.name == "rings")
    assert rings.empty_dir is not None
    empty = {"medium": rings.empty_dir.medium, "sizeLimit": rings.empty_dir.size_limit}
    assert lines_added["volumes"] == [{"name": "rings", "emptyDir": empty}]


def test_a_pod_that_has_them_gets_no_advice(tmp_path: Path) -> None:
    env = {"INFERSCOPE_DIR": "/run/inferscope", "INFERSCOPE": "1", "INFERSCOPE_ENGINE_ID": "pod"}
    assert looked(tmp_path, _ROOT + _SHARED, **env) == {}
    assert list(looked(tmp_path, _ROOT, **env)) == ["pod: volume"]
    collector = {"INFERSCOPE_DIR": "/run/inferscope/of-mine"}
    assert looked(tmp_path, _ROOT + _SHARED, has_engine=False, **collector) == {}
    assert list(looked(tmp_path, _ROOT + _SHARED, has_engine=False)) == ["pod: rings"]


@pytest.mark.thorough
def test_outside_a_pod_nothing_is_reported(tmp_path: Path) -> None:
    assert list(pod({}, has_engine=True)) == []
    inside = inferscope("doctor", rings=tmp_path, **{IN_A_POD: "10.0.0.1"})
    assert (inside.returncode, inside.stderr) == (0, "")
    assert "pod: " in inside.stdout
    assert "pod: " not in inferscope("doctor", rings=tmp_path, **{IN_A_POD: ""}).stdout
