"""What compose.yaml may hold, after the Compose Specification: closed, only fields used here."""

from __future__ import annotations

from typing import Literal

import msgspec


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping of the specification."""


class Service(Struct, kw_only=True):
    image: str
    network_mode: Literal["host", "none", "bridge"]
    group_add: list[str] = []
    command: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[str]
    depends_on: list[str] = []
    restart: Literal["no", "always", "on-failure", "unless-stopped"]


class Nothing(Struct):
    """Defaults of a volume."""


class Compose(Struct):
    name: str
    services: dict[str, Service]
    volumes: dict[str, Nothing]


class Target(Struct):
    """Link target of an exemplar's label."""

    name: str
    datasourceUid: str


class JsonData(Struct):
    httpMethod: Literal["GET", "POST"] | None = None
    timeInterval: str | None = None
    exemplarTraceIdDestinations: list[Target] = []
    implementation: Literal["prometheus", "mimir", "cortex"] | None = None


class Datasource(Struct):
    """After Grafana's page on provisioning data sources."""

    name: str
    uid: str
    type: Literal["prometheus", "alertmanager", "tempo"]
    access: Literal["proxy"]
    url: str
    isDefault: bool = False
    jsonData: JsonData = msgspec.field(default_factory=JsonData)


class Datasources(Struct):
    apiVersion: Literal[1]
    datasources: list[Datasource]


class ProviderOptions(Struct):
    path: str


class Provider(Struct):
    """After Grafana's page on provisioning dashboards."""

    name: str
    folder: str
    type: Literal["file"]
    disableDeletion: bool
    allowUiUpdates: bool
    options: ProviderOptions


class Providers(Struct):
    apiVersion: Literal[1]
    providers: list[Provider]
