"""What a manifest may hold, after the API references of Kubernetes 1.32 and Prometheus' operator.

It is closed. Only fields that are used here; another one is refused until it is written down, with
its type. What has no default is required.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""An RFC 1123 label, as most objects, volumes and containers need."""
PortName = Annotated[
    str, msgspec.Meta(pattern=r"^(?=.*[a-z])[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=15)
]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Quantity = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)?([EPTGMk]i?|Ki|m)?$")]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=86400)]
VariableName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/(?!.*(^|/)\.\.(/|$))[^:]*$")]
FileMode = Annotated[int, msgspec.Meta(ge=0, le=0o777)]
UserId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Key = Annotated[
    str,
    msgspec.Meta(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"),
]
Value = Annotated[
    str, msgspec.Meta(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)
]
Labels = dict[Key, Value]
Span = Annotated[str, msgspec.Meta(pattern=r"^((\d+)d)?((\d+)h)?((\d+)m)?((\d+)s)?((\d+)ms)?$")]
"""A time as the operator's resource definition takes it."""


class Struct(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """An object of the API."""


class Metadata(Struct):
    name: Name
    namespace: Name | None = None
    labels: Labels = {}


class TemplateMetadata(Struct):
    labels: Labels


class Selector(Struct):
    match_labels: Labels


class FieldRef(Struct):
    field_path: Literal["metadata.name", "metadata.namespace", "spec.nodeName"]


class ValueFrom(Struct):
    field_ref: FieldRef


class Variable(Struct):
    name: VariableName
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(Struct):
    name: PortName
    container_port: Port


class TcpSocket(Struct):
    port: Port | PortName


class HttpGet(Struct):
    path: AbsolutePath
    port: Port | PortName


class Probe(Struct):
    tcp_socket: TcpSocket | None = None
    http_get: HttpGet | None = None
    initial_delay_seconds: Seconds = 0
    period_seconds: Seconds = 10


class Resources(Struct):
    requests: dict[Key, Quantity] = {}
    limits: dict[Key, Quantity] = {}


class Capabilities(Struct):
    drop: list[str] = []
    add: list[str] = []


class ContainerSecurity(Struct):
    allow_privilege_escalation: bool
    read_only_root_filesystem: bool
    capabilities: Capabilities
    run_as_non_root: bool | None = None
    run_as_user: UserId | None = None


class Mount(Struct):
    name: Name
    mount_path: AbsolutePath
    read_only: bool = False


class Container(Struct, kw_only=True):
    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    ports: list[ContainerPort] = []
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    resources: Resources
    restart_policy: Literal["Always"] | None = None
    security_context: ContainerSecurity
    volume_mounts: list[Mount] = []


class Seccomp(Struct):
    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]


class PodSecurity(Struct):
    run_as_non_root: bool
    run_as_user: UserId
    run_as_group: UserId
    seccomp_profile: Seccomp
    fs_group: UserId | None = None
    supplemental_groups: list[UserId] = []


class EmptyDir(Struct):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class HostPath(Struct):
    path: AbsolutePath
    type: Literal["Directory", "DirectoryOrCreate"]


class ConfigMapVolume(Struct):
    name: Name


class SecretVolume(Struct):
    secret_name: Name
    default_mode: FileMode = 0o644


class Claim(Struct):
    claim_name: Name


class Volume(Struct):
    name: Name
    empty_dir: EmptyDir | None = None
    host_path: HostPath | None = None
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: Claim | None = None


class Toleration(Struct):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"]


class PodSpec(Struct, kw_only=True):
    containers: list[Container]
    init_containers: list[Container] = []
    volumes: list[Volume]
    security_context: PodSecurity
    automount_service_account_token: bool
    termination_grace_period_seconds: Seconds
    node_selector: Labels = {}
    tolerations: list[Toleration] = []


class Template(Struct):
    metadata: TemplateMetadata
    spec: PodSpec


class DeploymentSpec(Struct):
    replicas: int
    selector: Selector
    template: Template


class Deployment(Struct, tag_field="kind", tag="Deployment"):
    api_version: Literal["apps/v1"]
    metadata: Metadata
    spec: DeploymentSpec


class DaemonSetSpec(Struct):
    selector: Selector
    template: Template


class DaemonSet(Struct, tag_field="kind", tag="DaemonSet"):
    api_version: Literal["apps/v1"]
    metadata: Metadata
    spec: DaemonSetSpec


class KeyOfSecret(Struct):
    name: Name
    key: str


class Authorization(Struct):
    credentials: KeyOfSecret
    type: str = "Bearer"


class PodMetricsEndpoint(Struct):
    port: PortName
    path: AbsolutePath
    interval: Span
    authorization: Authorization


class PodMonitorSpec(Struct):
    selector: Selector
    pod_metrics_endpoints: list[PodMetricsEndpoint]
    sample_limit: int
    label_value_length_limit: int


class PodMonitor(Struct, tag_field="kind", tag="PodMonitor"):
    api_version: Literal["monitoring.coreos.com/v1"]
    metadata: Metadata
    spec: PodMonitorSpec


class PolicyPort(Struct):
    port: Port


class Peer(Struct):
    namespace_selector: Selector


class IngressRule(Struct):
    ports: list[PolicyPort]
    from_: list[Peer] = msgspec.field(default_factory=list, name="from")


class NetworkPolicySpec(Struct):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]]
    ingress: list[IngressRule]


class NetworkPolicy(Struct, tag_field="kind", tag="NetworkPolicy"):
    api_version: Literal["networking.k8s.io/v1"]
    metadata: Metadata
    spec: NetworkPolicySpec


class Namespace(Struct, tag_field="kind", tag="Namespace"):
    api_version: Literal["v1"]
    metadata: Metadata


class Generated(Struct):
    name: str
    files: list[str]


class Image(Struct):
    name: str
    new_name: str
    new_tag: str


class Kustomization(Struct, tag_field="kind", tag="Kustomization"):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"]
    resources: list[str]
    config_map_generator: list[Generated]
    images: list[Image]
    namespace: str | None = None


class Rule(Struct, rename=None):
    """Either records or alerts; a mapping with keys of Prometheus' own style."""

    expr: str
    record: str | None = None
    alert: str | None = None
    for_: Span | None = msgspec.field(default=None, name="for")
    keep_firing_for: Span | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    def __post_init__(self) -> None:
        if (self.record is None) == (self.alert is None):
            raise ValueError("either record or alert")


class RuleGroup(Struct):
    name: str
    interval: Span
    rules: list[Rule]


class RuleSpec(Struct):
    groups: list[RuleGroup]


class PrometheusRule(Struct, tag_field="kind", tag="PrometheusRule"):
    api_version: Literal["monitoring.coreos.com/v1"]
    metadata: Metadata
    spec: RuleSpec


Manifest = Deployment | DaemonSet | PodMonitor | NetworkPolicy | Namespace | PrometheusRule


class PatchedContainer(Struct):
    name: Name
    env: list[Variable]
    volume_mounts: list[Mount]


class PatchedSecurity(Struct):
    supplemental_groups: list[UserId]


class PatchedPod(Struct):
    security_context: PatchedSecurity
    containers: list[PatchedContainer]
    volumes: list[Volume]


class PatchedTemplate(Struct):
    spec: PatchedPod


class PatchedWorkload(Struct):
    template: PatchedTemplate


class Patch(Struct):
    """A strategic merge patch: any part of what it patches."""

    spec: PatchedWorkload
