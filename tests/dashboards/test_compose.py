"""compose.yaml is what Compose takes, finds its files, fits together and opens nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from inferscope_prometheus.page import MOST_LABEL
from inferscope_prometheus.settings import read_settings

from inferscope.daemon.config import read_config
from inferscope.daemon.exporter_set import make_exporters
from inferscope.slo.objectives import read_objectives
from inferscope.slo.rules_routing import routing
from tests import debian
from tests.cli.running import inferscope
from tests.dashboards.compose_schema import Compose, Datasources, Providers, Service

FOLDER = Path(__file__).parents[2] / "dashboards"
LOCAL = "127.0.0.1"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compose() -> Compose:
    return msgspec.convert(read("compose.yaml"), Compose)


@pytest.fixture(scope="module")
def sources() -> Datasources:
    return msgspec.convert(read("provisioning/datasources/inferscope.yaml"), Datasources)


def mounts(service: Service) -> dict[str, str]:
    """Return what is where in a container: by its path there, a path here or a volume's name."""
    split = (each.split(":") for each in service.volumes)
    return {there: here for here, there, *_ in split}


def file_of(service: Service, path: str) -> Path:
    """Return the file here that a container has at a path."""
    for there, here in mounts(service).items():
        if path.startswith(f"{there}/") and here.startswith("./"):
            return FOLDER / here / path.removeprefix(f"{there}/")
    raise AssertionError(f"nothing is mounted at {path}")


def config_of(service: Service) -> Path:
    (path,) = (each.partition("=")[2] for each in service.command if "config.file=" in each)
    return file_of(service, path)


def test_unknown_field_is_rejected() -> None:
    document = read("compose.yaml")
    document["services"]["tempo"]["volume"] = []
    with pytest.raises(msgspec.ValidationError, match="volume"):
        msgspec.convert(document, Compose)


def test_images_are_pinned(compose: Compose) -> None:
    for service in compose.services.values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service.image)


def test_all_that_is_mounted_is_there(compose: Compose) -> None:
    named = set[str]()
    for service in compose.services.values():
        for volume in service.volumes:
            here, _, rest = volume.partition(":")
            if not here.startswith("./"):
                named.add(here)
                continue
            assert rest.endswith(":ro")
            assert (FOLDER / here).is_dir()
        assert set(service.depends_on) <= set(compose.services)
    assert named == set(compose.volumes)


def test_no_service_is_reachable_from_outside(compose: Compose) -> None:
    listening = set[str]()
    for service in compose.services.values():
        for argument in service.command:
            name, _, value = argument.partition("=")
            if name.endswith("listen-address") and value:
                listening.add(value)
    tempo = read("tempo/tempo.yaml")
    for protocol in ("http", "grpc"):
        server = tempo["server"]
        listening.add(f"{server[f'{protocol}_listen_address']}:{server[f'{protocol}_listen_port']}")
        listening.add(tempo["distributor"]["receivers"]["otlp"]["protocols"][protocol]["endpoint"])
    environment = compose.services["grafana"].environment
    listening.add(f"{environment['GF_SERVER_HTTP_ADDR']}:{environment['GF_SERVER_HTTP_PORT']}")
    prometheus = read("collect.yaml")["exporters"]["prometheus"]
    listening.add(f"{prometheus['host']}:{prometheus['port']}")
    assert len(listening) == 8
    assert {address.partition(":")[0] for address in listening} == {LOCAL}
    assert len({address.partition(":")[2] for address in listening}) == 8, "two want one port"


def test_grafana_has_no_account_with_a_default_password(compose: Compose) -> None:
    environment = compose.services["grafana"].environment
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not [name for name in environment if "ADMIN_PASSWORD" in name]


def test_they_ask_each_other_where_they_listen(compose: Compose, sources: Datasources) -> None:
    config = read_config(FOLDER / "collect.yaml", {})
    assert set(make_exporters(config.exporters)) == {"prometheus", "otlp"}
    prometheus = yaml.safe_load(config_of(compose.services["prometheus"]).read_text())
    (job,) = prometheus["scrape_configs"]
    settings = config.exporters["prometheus"]
    most = read_settings(settings).max_series
    assert most < job["sample_limit"] < 2 * most
    assert job["label_value_length_limit"] >= MOST_LABEL
    assert job["static_configs"] == [{"targets": [f"{settings['host']}:{settings['port']}"]}]
    # One file, on the host and in the container, whose user is in the group that may read it.
    shown = config_of(compose.services["prometheus"]).with_name(
        job["authorization"]["credentials_file"]
    )
    assert settings["token_file"] == str(shown)
    assert settings["engine_metrics"] == {"*": f"http://{LOCAL}:8000"}
    assert compose.services["prometheus"].group_add == ["${INFERSCOPE_GID:-1000}"]
    ((alertmanager,),) = (
        each["static_configs"] for each in prometheus["alerting"]["alertmanagers"]
    )
    by_type = {source.type: source for source in sources.datasources}
    assert [by_type["alertmanager"].url] == [f"http://{t}" for t in alertmanager["targets"]]
    flag = f"--web.listen-address={alertmanager['targets'][0]}"
    assert flag in compose.services["alertmanager"].command
    flag = f"--web.listen-address={by_type['prometheus'].url.removeprefix('http://')}"
    assert flag in compose.services["prometheus"].command
    tempo = yaml.safe_load(config_of(compose.services["tempo"]).read_text())
    assert by_type["tempo"].url == f"http://{LOCAL}:{tempo['server']['http_listen_port']}"
    received = tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert config.exporters["otlp"]["endpoint"] == f"http://{received}/v1/traces"


def test_what_is_promised_is_counted_and_has_alerts(compose: Compose, tmp_path: Path) -> None:
    objectives = read_config(FOLDER / "collect.yaml", {}).slo.objectives
    assert objectives is not None
    promised = {one.name for one in objectives.all}
    assert promised == {"ttft", "tbt", "availability", "goodput"}
    # As the head of compose.yaml says, from the repository's root.
    head = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    ((given, out, grafana),) = re.findall(
        r"inferscope slo rules (\S+) --out (\S+) --dashboards (\S+)", head
    )
    environment = compose.services["grafana"].environment
    assert grafana == "http://{GF_SERVER_HTTP_ADDR}:{GF_SERVER_HTTP_PORT}".format(**environment)
    file = FOLDER.parent / given
    assert read_objectives(file) == objectives
    prometheus = config_of(compose.services["prometheus"])
    (loaded,) = yaml.safe_load(prometheus.read_text(encoding="utf-8"))["rule_files"]
    assert FOLDER.parent / out == (prometheus.parent / loaded).parent
    done = inferscope("slo", "rules", str(file), "--out", str(tmp_path), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob(Path(loaded).name)
    groups = yaml.safe_load(written.read_text(encoding="utf-8"))["groups"]
    alerts = [rule["labels"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert {labels["slo"] for labels in alerts if "slo" in labels} == promised


def test_what_is_kept_is_enough_for_the_budgets(compose: Compose) -> None:
    (kept,) = (
        re.findall(r"retention\.time=(\d+)d", argument)[0]
        for argument in compose.services["prometheus"].command
        if "retention" in argument
    )
    objectives = read_config(FOLDER / "collect.yaml", {}).slo.objectives
    assert objectives is not None
    assert int(kept) * 86400 > max(one.window_ns / 1e9 for one in objectives.all)
    (window,) = (
        each
        for each in read("grafana/inferscope-slo.json")["templating"]["list"]
        if each["name"] == "window"
    )
    assert window["current"]["value"] == "30d"


def test_alerts_are_routed_and_held_back_as_the_rules_want_it(compose: Compose) -> None:
    shipped = yaml.safe_load(config_of(compose.services["alertmanager"]).read_text())
    wanted = routing()
    # The recipient of alerts is the one setting left to the user.
    wanted["receivers"] = [{"name": each["name"]} for each in wanted["receivers"]]
    assert shipped == wanted
    assert len(shipped["inhibit_rules"]) == 2


def test_an_exemplar_leads_to_its_trace(compose: Compose, sources: Datasources) -> None:
    by_type = {source.type: source for source in sources.datasources}
    (target,) = by_type["prometheus"].jsonData.exemplarTraceIdDestinations
    assert (target.name, target.datasourceUid) == ("trace_id", by_type["tempo"].uid)
    assert "--enable-feature=exemplar-storage" in compose.services["prometheus"].command


def test_grafana_finds_the_dashboards(compose: Compose) -> None:
    providers = msgspec.convert(read("provisioning/dashboards/inferscope.yaml"), Providers)
    (provider,) = providers.providers
    grafana = compose.services["grafana"]
    assert mounts(grafana)[provider.options.path] == "./grafana"
    assert mounts(grafana)["/etc/grafana/provisioning"] == "./provisioning"


def promtool_takes(file: Path) -> None:
    done = subprocess.run(
        [debian.program("promtool"), "check", "config", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_promtool_takes_the_configuration(compose: Compose, tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yaml"
    shutil.copy(config_of(compose.services["prometheus"]), file)
    (tmp_path / "token").write_text("0123456789abcdef", encoding="ascii")
    promtool_takes(file)


def test_promtool_takes_the_configuration_without_a_token_as_it_is_shipped() -> None:
    promtool_takes(FOLDER / "prometheus" / "prometheus.yaml")
    without, with_token = (read(f"prometheus/{name}.yaml") for name in ("prometheus", "with-token"))
    (job,) = with_token["scrape_configs"]
    assert job.pop("authorization") == {"credentials_file": "token"}
    assert without == with_token, "they differ in the token alone"


def test_promtool_takes_the_scrape_job_of_the_docs(tmp_path: Path) -> None:
    page = (FOLDER.parent / "docs" / "collect.md").read_text(encoding="utf-8")
    (block,) = (
        text
        for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "scrape_configs" in text
    )
    file = tmp_path / "prometheus.yaml"
    file.write_text(block, encoding="utf-8")
    promtool_takes(file)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    usual = make_exporters(read_config(None, {}).exporters)["prometheus"].describe()
    assert job["static_configs"][0]["targets"][0] in usual
    token = tmp_path / "token"
    token.write_text("0123456789abcdef", encoding="ascii")
    file.write_text(
        block.replace(
            "# authorization: {credentials_file: TOKEN}",
            f"authorization: {{credentials_file: {token}}}",
        )
    )
    assert "authorization" in yaml.safe_load(file.read_text())["scrape_configs"][0]
    promtool_takes(file)


def test_amtool_takes_the_configuration(compose: Compose) -> None:
    file = config_of(compose.services["alertmanager"])
    done = subprocess.run(
        [debian.program("amtool", package="prometheus-alertmanager"), "check-config", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
