"""The manifests are what Kubernetes takes, fit together, and run what we have."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from inferscope_otlp.finished import EngineResource
from inferscope_otlp.resource import resource
from inferscope_prometheus.page import MOST_LABEL
from inferscope_prometheus.settings import read_settings

from inferscope.cli.main import build_parser
from inferscope.daemon.config import Config, read_config
from inferscope.daemon.exporter_set import FLUSH_S, make_exporters
from inferscope.daemon.lock import LOCK_NAME
from inferscope.probe.identity import engine_id
from inferscope.slo.objectives import read_objectives
from tests.dashboards.kubernetes_schema import (
    Container,
    DaemonSet,
    Deployment,
    Kustomization,
    Manifest,
    Namespace,
    NetworkPolicy,
    Patch,
    PodMonitor,
    PodSpec,
    Template,
    Variable,
)

FOLDER = Path(__file__).parents[2] / "dashboards" / "kubernetes"
WAYS = ("sidecar", "daemonset")


class Way:
    """One way to run a collector, as its folder has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = FOLDER / name
        self.kustomization = msgspec.convert(self._one("kustomization.yaml"), Kustomization)
        self.manifests: list[Manifest] = [
            msgspec.convert(self._one(file), Manifest) for file in self.kustomization.resources
        ]
        self.config = read_config(self.folder / "collect.yaml", {})

    def _one(self, name: str) -> object:
        return yaml.safe_load((self.folder / name).read_text(encoding="utf-8"))

    def only(self, kind: type[Manifest]) -> Manifest:
        """Return the only manifest of a kind."""
        (found,) = (each for each in self.manifests if isinstance(each, kind))
        return found

    @property
    def workload(self) -> Deployment | DaemonSet:
        """Return what makes the pods."""
        (found,) = (each for each in self.manifests if isinstance(each, Deployment | DaemonSet))
        return found

    @property
    def template(self) -> Template:
        return self.workload.spec.template

    @property
    def pod(self) -> PodSpec:
        return self.template.spec

    def containers(self) -> Iterator[Container]:
        yield from self.pod.init_containers
        yield from self.pod.containers

    @property
    def collector(self) -> Container:
        (found,) = (each for each in self.containers() if each.command[:2] == COLLECT)
        return found


COLLECT = ["inferscope", "collect"]
FIELDS = {
    "metadata.name": "vllm-0",
    "metadata.namespace": "team-a",
    "spec.nodeName": "node-1",
}
"""UID of an arbitrary pod."""


def environment(variables: list[Variable], pod: dict[str, str]) -> dict[str, str]:
    """Return a container's environment as the kubelet builds it: $(NAME) is an earlier one."""
    values: dict[str, str] = {}
    for each in variables:
        if each.value_from is not None:
            values[each.name] = pod[each.value_from.field_ref.field_path]
            continue
        assert each.value is not None
        asked = re.findall(r"\$\((\w+)\)", each.value)
        assert set(asked) <= values.keys(), "left as it stands"
        values[each.name] = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each.value)
    return values


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


def test_nothing_lies_about_that_is_not_used(way: Way) -> None:
    (generated,) = way.kustomization.config_map_generator
    used = {"kustomization.yaml", *generated.files, *way.kustomization.resources}
    used |= {"engine-patch.yaml"} if way.name == "daemonset" else set()
    assert {path.name for path in way.folder.iterdir()} == used
    assert generated.files == ["collect.yaml", "slo.yaml"]


def test_unknown_field_is_rejected() -> None:
    manifest = yaml.safe_load((FOLDER / "daemonset" / "daemonset.yaml").read_text(encoding="utf-8"))
    manifest["spec"]["template"]["spec"]["containers"][0]["privilegd"] = True
    with pytest.raises(msgspec.ValidationError, match="privilegd"):
        msgspec.convert(manifest, Manifest)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("memory: 1GiB", "memory: 1Gi"),
        ("memory: -1Gi", "memory: 1Gi"),
        ("cpu: half", "cpu: 500m"),
        ("containerPort: 94640", "containerPort: 9464"),
        ("- name: inferscope-metrics-page\n", "- name: inferscope\n"),
        ("- name: Rings\n", "- name: rings\n"),
        ("- name: NODE NAME", "- name: NODE_NAME"),
        ("mountPath: run/inferscope", "mountPath: /run/inferscope"),
        ("path: /run/../etc", "path: /run/inferscope"),
        ("defaultMode: 1440", "defaultMode: 0440"),
        ("runAsUser: -1", "runAsUser: 10001"),
        ("periodSeconds: 20s", "periodSeconds: 20"),
        ('app.kubernetes.io/name: "a b"', "app.kubernetes.io/name: inferscope"),
    ],
)
def test_a_value_that_kubernetes_refuses_is_refused(wrong: str, right: str) -> None:
    text = (FOLDER / "daemonset" / "daemonset.yaml").read_text(encoding="utf-8")
    assert right in text
    msgspec.convert(yaml.safe_load(text), Manifest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(yaml.safe_load(text.replace(right, wrong)), Manifest)


@pytest.mark.parametrize("release", ["1.30", "1.32", "1.36"])
def test_the_schemas_of_kubernetes_take_them(way: Way, release: str) -> None:
    """Those of its own OpenAPI, with no field beyond them; PodMonitor is not of Kubernetes."""
    checker = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate (100 MB of schemas) is not installed"
    )
    checked = set()
    for name in way.kustomization.resources:
        manifest = yaml.safe_load((way.folder / name).read_text(encoding="utf-8"))
        if manifest["kind"] != "PodMonitor":
            checker.validate(manifest, release, strict=True)
            checked.add(manifest["kind"])
    assert {type(way.workload).__name__, "NetworkPolicy"} <= checked


def test_selectors_match_these_pods(way: Way) -> None:
    labels = way.template.metadata.labels.items()
    monitor, policy = way.only(PodMonitor), way.only(NetworkPolicy)
    assert isinstance(monitor, PodMonitor)
    assert isinstance(policy, NetworkPolicy)
    for selector in (way.workload.spec.selector, monitor.spec.selector, policy.spec.pod_selector):
        assert selector.match_labels
        assert selector.match_labels.items() <= labels


def test_what_is_scraped_is_where_the_collector_serves(way: Way) -> None:
    monitor, policy = way.only(PodMonitor), way.only(NetworkPolicy)
    assert isinstance(monitor, PodMonitor)
    assert isinstance(policy, NetworkPolicy)
    (endpoint,) = monitor.spec.pod_metrics_endpoints
    (port,) = way.collector.ports
    assert (endpoint.port, endpoint.path) == (port.name, "/metrics")
    prometheus = way.config.exporters["prometheus"]
    assert prometheus["host"] == "0.0.0.0"
    assert prometheus["port"] == port.container_port
    # The scraper is in one namespace and sends the token.
    (rule,) = (r for r in policy.spec.ingress if r.ports[0].port == port.container_port)
    assert [peer.namespace_selector.match_labels for peer in rule.from_] == [
        {"kubernetes.io/metadata.name": "monitoring"}
    ]
    open_to_all = {p.port for r in policy.spec.ingress if not r.from_ for p in r.ports}
    ports = {each.container_port for c in way.pod.containers for each in c.ports}
    assert open_to_all == ports - {port.container_port}


def test_a_scrape_takes_what_a_page_may_have_and_not_much_more(way: Way) -> None:
    monitor = way.only(PodMonitor)
    assert isinstance(monitor, PodMonitor)
    most = read_settings(way.config.exporters["prometheus"]).max_series
    assert most < monitor.spec.sample_limit < 2 * most
    assert monitor.spec.label_value_length_limit >= MOST_LABEL


def test_scraper_sends_the_token_that_the_collector_reads(way: Way) -> None:
    monitor = way.only(PodMonitor)
    assert isinstance(monitor, PodMonitor)
    (endpoint,) = monitor.spec.pod_metrics_endpoints
    shown = endpoint.authorization.credentials
    assert endpoint.authorization.type == "Bearer"
    (volume,) = (volume for volume in way.pod.volumes if volume.secret is not None)
    assert volume.secret is not None
    assert volume.secret.secret_name == shown.name
    (mount,) = (m for m in way.collector.volume_mounts if m.name == volume.name)
    assert mount.read_only
    token_file = way.config.exporters["prometheus"]["token_file"]
    assert token_file == f"{mount.mount_path}/{shown.key}"
    others = {m.name for c in way.containers() if c is not way.collector for m in c.volume_mounts}
    assert volume.name not in others
    # The kubelet gives the file to root and this group; `read_token` refuses what is open to all.
    assert way.pod.security_context.fs_group == way.pod.security_context.run_as_group
    assert volume.secret.default_mode == 0o440


def test_ports_and_volumes_are_named_where_they_are_used(way: Way) -> None:
    volumes = {volume.name for volume in way.pod.volumes}
    mounted = {mount.name for each in way.containers() for mount in each.volume_mounts}
    assert mounted == volumes
    for each in way.containers():
        names = {port.name for port in each.ports}
        for probe in filter(None, (each.liveness_probe, each.readiness_probe)):
            asked = probe.tcp_socket or probe.http_get
            assert asked is not None
            assert asked.port in names
    (mapped,) = (v.config_map.name for v in way.pod.volumes if v.config_map is not None)
    assert mapped == way.kustomization.config_map_generator[0].name
    assert {c.image for c in way.containers()} == {i.name for i in way.kustomization.images}


def test_containers_are_restricted(way: Way) -> None:
    assert way.pod.security_context.run_as_non_root
    assert way.pod.security_context.run_as_user > 0
    assert way.pod.security_context.seccomp_profile.type == "RuntimeDefault"
    assert not way.pod.automount_service_account_token
    for each in way.containers():
        security = each.security_context
        assert not security.allow_privilege_escalation
        assert security.read_only_root_filesystem
        assert security.capabilities.drop == ["ALL"]
        assert each.resources.limits, "unbounded"
        if each.name != "folders":  # which makes the host's folders, and ends
            assert (security.run_as_non_root, security.run_as_user) == (None, None)
            assert security.capabilities.add == []


def test_the_collector_writes_only_where_it_may(way: Way) -> None:
    written = {mount.mount_path for mount in way.collector.volume_mounts if not mount.read_only}
    assert way.config.rings == Path("/run/inferscope")
    assert written == {"/run/inferscope", "/var/lib/inferscope"}
    kept = [way.config.pins.folder] if way.config.pins is not None else []
    kept += [way.config.state, way.config.folder / LOCK_NAME]
    parquet = way.config.exporters.get("parquet", {}).get("folder")
    kept += [Path(parquet)] if isinstance(parquet, str) else []
    assert all(Path("/var/lib/inferscope") in folder.parents for folder in kept)


def test_what_is_promised_is_counted_and_is_the_same_everywhere(way: Way) -> None:
    objectives = way.config.slo.objectives
    assert objectives is not None
    assert objectives == read_objectives(FOLDER.parent / "slo.yaml")
    (mount,) = (m for m in way.collector.volume_mounts if m.name == "collect")
    assert mount.mount_path == "/etc/inferscope", "where slo.yaml is beside collect.yaml"


def test_what_is_seen_is_held_against_the_engines_own_count(way: Way) -> None:
    pages = way.config.exporters["prometheus"].get("engine_metrics")
    if way.name == "daemonset":  # its engines are at addresses of their own
        assert pages is None
        return
    (engine,) = way.pod.containers
    (port,) = engine.ports
    assert pages == {"*": f"http://127.0.0.1:{port.container_port}"}


def test_what_an_engine_did_last_is_scraped(way: Way) -> None:
    monitor = way.only(PodMonitor)
    assert isinstance(monitor, PodMonitor)
    (endpoint,) = monitor.spec.pod_metrics_endpoints
    interval_s = int(endpoint.interval.removesuffix("s"))
    if way.name == "sidecar":
        assert way.config.outlive_s == 2 * interval_s
    else:
        # Engines of other pods do not go with it: it would wait a minute for them.
        assert way.config.outlive_s == 0
    # An engine's last answers, then these, then what is left to send.
    engine_s = 120 if way.name == "sidecar" else 0
    least_s = engine_s + way.config.outlive_s + FLUSH_S
    assert way.pod.termination_grace_period_seconds >= least_s


def test_collector_accepts_its_configuration(way: Way, tmp_path: Path) -> None:
    arguments = way.collector.command[1:]
    options = build_parser(arguments[:1]).parse_args(arguments)
    (config,) = (m for m in way.collector.volume_mounts if m.name == "collect")
    assert options.config == Path(config.mount_path) / "collect.yaml"
    assert set(make_exporters(way.config.exporters)) == set(way.config.exporters)
    # The environment overrides by names that are checked as well.
    values = environment(way.collector.env, FIELDS)
    overridden: Config = read_config(way.folder / "collect.yaml", values)
    make_exporters(overridden.exporters)
    if way.name == "daemonset":
        assert overridden.exporters["parquet"]["host"] == "node-1"


def test_traces_are_sent_once_the_comment_is_none(way: Way, tmp_path: Path) -> None:
    text = (way.folder / "collect.yaml").read_text(encoding="utf-8")
    switched_on = re.sub(r"(?m)^  # (otlp:|  \w+:)", r"  \1", text)
    assert switched_on != text
    (tmp_path / "slo.yaml").write_bytes((way.folder / "slo.yaml").read_bytes())
    file = tmp_path / "collect.yaml"
    file.write_text(switched_on, encoding="utf-8")
    exporters = make_exporters(read_config(file, {}).exporters)
    assert exporters.keys() == way.config.exporters.keys() | {"otlp"}
    assert "/v1/traces" in exporters["otlp"].describe()


def test_engine_and_collector_share_rings_and_a_user(way: Way) -> None:
    if way.name == "sidecar":
        (engine,) = way.pod.containers
        assert way.collector.restart_policy == "Always", "it starts before and ends after"
        values = environment(engine.env, FIELDS)
        rings = {m.name: m.mount_path for m in engine.volume_mounts}["rings"]
    else:
        patch = msgspec.convert(way._one("engine-patch.yaml"), Patch)
        pod = patch.spec.template.spec
        (patched,) = pod.containers
        values = environment(patched.env, FIELDS)
        (mount,) = patched.volume_mounts
        (volume,) = pod.volumes
        assert mount.name == volume.name
        rings = mount.mount_path
        assert volume.host_path is not None
        assert volume.host_path.path in {v.host_path.path for v in way.pod.volumes if v.host_path}
        (group,) = pod.security_context.supplemental_groups
        assert values["INFERSCOPE_GROUP"] == str(group)
        assert group in way.pod.security_context.supplemental_groups
    assert values["INFERSCOPE"] == "1"
    assert values["INFERSCOPE_DIR"] == rings == str(way.config.rings)


def test_an_engine_is_named_after_its_pod_and_namespace(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.name == "sidecar":
        (engine,) = way.pod.containers
        variables = engine.env
    else:
        patch = msgspec.convert(way._one("engine-patch.yaml"), Patch)
        (patched,) = patch.spec.template.spec.containers
        variables = patched.env
    found = set()
    # Those of StatefulSets are called alike in every namespace, and names may be this long.
    for namespace in ("team-a", "team-b", "n" * 63):
        for name in ("vllm-0", "v" * 253):
            pod = {**FIELDS, "metadata.namespace": namespace, "metadata.name": name}
            named = environment(variables, pod)["INFERSCOPE_ENGINE_ID"]
            assert named == f"{namespace}.{name}"
            monkeypatch.setenv("INFERSCOPE_ENGINE_ID", named)
            found.add(engine_id())
    assert len(found) == 6
    assert {"team-a.vllm-0", "team-b.vllm-0"} <= found, "no other name than the folder's"
    assert all(len(each) < 128 for each in found)


def test_traces_state_which_pod_and_node_they_are_of(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(way.collector.env, FIELDS).items():
        monkeypatch.setenv(name, value)
    attributes_of = resource(EngineResource("team-a.vllm-0", "vllm", "m"), service_name=None)
    assert attributes_of["k8s.node.name"] == "node-1"
    if way.name == "sidecar":
        assert (attributes_of["k8s.namespace.name"], attributes_of["k8s.pod.name"]) == (
            "team-a",
            "vllm-0",
        )
    else:  # the collector's pod is not the engine's, and its host is the node
        assert attributes_of["host.name"] == "node-1"
        assert "k8s.pod.name" not in attributes_of


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_manifests(way: Way) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(way.folder)], capture_output=True, text=True, check=True
    )
    documents = {each["kind"]: each for each in yaml.safe_load_all(built.stdout)}
    assert len(documents) == len(way.manifests) + 1
    (generated,) = way.kustomization.config_map_generator
    texts = {file: (way.folder / file).read_text(encoding="utf-8") for file in generated.files}
    assert documents["ConfigMap"]["data"] == texts
    name = documents["ConfigMap"]["metadata"]["name"]
    kind = type(way.workload).__name__
    assert f"name: {name}" in yaml.safe_dump(documents[kind])
    images = {f"{image.new_name}:{image.new_tag}" for image in way.kustomization.images}
    assert all(f"image: {image}" in yaml.safe_dump(documents[kind]) for image in images)
    for each in documents.values():
        if not isinstance(way.manifests[0], Namespace) or each["kind"] == "Namespace":
            continue
        assert each["metadata"]["namespace"] == "inferscope"
