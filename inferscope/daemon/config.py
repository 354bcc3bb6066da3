"""The configuration of a collector: one YAML file, overridden by environment variables.

    rings: /run/inferscope
    folder: /var/lib/inferscope
    exporters:
      prometheus: {host: 127.0.0.1, port: 9464}
    pins: {folder: /var/lib/inferscope/pins, max_mb: 1024, on: [breach, engine_lost, signal]}
    outlive_s: 30
    shard: 1/2
    max_engines: 256
    slo: {file: slo.yaml, state: /var/lib/inferscope/slo-state.json}
    counters: {sources: auto, interval: 100ms}
    headers: [tenant, priority]

Relative paths, also in exporters' settings, are relative to the file's directory, or to the
working directory if there is no file.

`pins: off` disables pins. `slo: slo.yaml` is short for `slo: {file: slo.yaml}`, and `counters:
auto` or `counters: off` for `counters: {sources: …}`. Each scalar has an environment variable:
INFERSCOPE_COLLECT_PINS_MAX_MB sets pins.max_mb, INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_PORT the
exporter's port.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from inferscope.daemon.shard import ALL, Shard, read_shard
from inferscope.document import Section, Setting, near, read_document, read_scalar
from inferscope.errors import BadInput
from inferscope.exporting import path_settings
from inferscope.probe import HASH, WORDS
from inferscope.ring import COLLECTOR, ring_directory
from inferscope.sampler import DCGM_URL, SOURCES
from inferscope.slo import Objectives, read_objectives

PREFIX = "INFERSCOPE_COLLECT_"
INCIDENTS = ("breach", "engine_lost", "stall", "signal")
"""Incidents that can be pinned: a request that missed an objective or threshold, an engine that
was lost, an engine with requests but no steps, SIGUSR1."""
STATE = "slo-state.json"
"""Default name of the budgets' file, in the collector's directory."""
PINS = "pins"
"""Default name of the pins' directory, in the collector's directory."""
_DEFAULT_EXPORTERS: Mapping[str, Mapping[str, object]] = {"prometheus": {}}
_SCALARS = {
    "RINGS": ("rings",),
    "FOLDER": ("folder",),
    "SHARD": ("shard",),
    "OUTLIVE_S": ("outlive_s",),
    "MAX_ENGINES": ("max_engines",),
    "PINS_FOLDER": ("pins", "folder"),
    "PINS_MAX_MB": ("pins", "max_mb"),
    "PINS_BEFORE_S": ("pins", "before_s"),
    "PINS_AFTER_S": ("pins", "after_s"),
    "HEADERS": ("headers",),
    "COUNTERS_SOURCES": ("counters", "sources"),
    "COUNTERS_INTERVAL": ("counters", "interval"),
    "COUNTERS_PM_INTERVAL": ("counters", "pm_interval"),
    "COUNTERS_DCGM_URL": ("counters", "dcgm_url"),
    "SLO_FILE": ("slo", "file"),
    "SLO_STATE": ("slo", "state"),
    "SLO_TTFT_MS": ("slo", "ttft_ms"),
    "SLO_TBT_MS": ("slo", "tbt_ms"),
}
_EXPORTERS = "EXPORTERS_"
_TEXTS = ("rings", "shard", "folder", "file", "state", "headers", "sources", "dcgm_url")
_SHORT = {"slo": "file", "counters": "sources"}
"""The setting that a scalar stands for, by section."""
_OFF = "off"
MOST_ENGINES = 256
"""Default maximum of tracked engines; each costs about 450 time series until 15 min after it ends.
"""
_LARGEST_MAX_ENGINES = 100_000


@dataclass(frozen=True)
class SloSettings:
    """Objectives, and thresholds that only trigger pins; None if unset."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    objectives: Objectives | None = None
    state: Path | None = None
    """Path of the budgets' file; None for the default in the collector's directory."""


@dataclass(frozen=True)
class CounterSettings:
    """Settings of the collector's sampler; None selects the default of `inferscope sampler`."""

    sources: tuple[str, ...] | None = None
    """`auto` or names of sources; empty for no sampler. None: auto if an NVIDIA driver is present.
    """
    interval_ns: int | None = None
    pm_interval_ns: int | None = None
    dcgm_url: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Command-line options of the sampler for all settings except the sources."""
        given = {
            "--interval": _microseconds(self.interval_ns),
            "--pm-interval": _microseconds(self.pm_interval_ns),
        }
        return tuple(word for name, value in given.items() if value for word in (name, value))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the sampler, for settings that can contain a password."""
        return {} if self.dcgm_url is None else {DCGM_URL: self.dcgm_url}


@dataclass(frozen=True)
class PinSettings:
    """Settings of incident pins."""

    folder: Path
    max_mb: float = 1024.0
    before_s: float = 30.0
    after_s: float = 30.0
    on: tuple[str, ...] = INCIDENTS

    @property
    def max_bytes(self) -> int:
        """Maximum size of all pins together in bytes."""
        return round(self.max_mb * 1e6)

    @property
    def before_ns(self) -> int:
        """Recorded time before an incident in nanoseconds."""
        return round(self.before_s * 1e9)

    @property
    def after_ns(self) -> int:
        """Recorded time after an incident in nanoseconds."""
        return round(self.after_s * 1e9)


@dataclass(frozen=True)
class Config:
    """Configuration of a collector."""

    rings: Path
    folder: Path
    """The collector's directory for lock, budgets and pins; not writable by other users."""
    exporters: Mapping[str, Mapping[str, object]]
    pins: PinSettings | None
    slo: SloSettings
    counters: CounterSettings = CounterSettings()
    headers: tuple[str, ...] | None = None
    """Header attributes that exporters receive; those with `:hash` are hashed. None for all."""
    outlive_s: float = 0.0
    """Seconds that the collector keeps serving after the last engine when it is asked to stop."""
    shard: Shard = ALL
    """Part of the host's engines that this collector follows."""
    max_engines: int = MOST_ENGINES
    """Maximum number of engines that this collector or shard tracks."""

    @property
    def state(self) -> Path:
        """Path of this shard's budgets' file."""
        return self.shard.file(self.slo.state or self.folder / STATE)

    @property
    def own_pins(self) -> PinSettings | None:
        """Pin settings of this shard: its own directory and its part of the size limit."""
        pins, shard = self.pins, self.shard
        if pins is None or shard.is_all:
            return pins
        return replace(pins, folder=pins.folder / shard.name, max_mb=pins.max_mb / shard.total)


def config_hash(config: Config) -> str:
    """Return a hash of twelve hexadecimal digits over the configuration, objectives included.

    The shard is excluded, so shards of one configuration have the same hash.
    """
    encoded = msgspec.json.encode(replace(config, shard=ALL), enc_hook=str, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:12]


def read_config(
    path: Path | None,
    environment: Mapping[str, str],
    *,
    slo: Path | None = None,
    shard: str | None = None,
) -> Config:
    """Read the configuration.

    Args:
        path: path of the YAML file; None for the defaults.
        environment: environment of the process, which overrides the file.
        slo: file of objectives, which overrides file and environment.
        shard: K/N, which overrides file and environment.

    Raises:
        BadInput: a setting is unknown or invalid; the message gives its place and a suggestion.
    """
    document = Section({}, path="") if path is None else read_document(path)
    for name in sorted(environment):
        if name.startswith(PREFIX):
            _override(document, name, environment[name])
    document.only(
        (
            *("rings", "folder", "outlive_s", "shard", "max_engines", "exporters", "pins", "slo"),
            *("counters", "headers"),
        )
    )
    beside = Path() if path is None else path.parent
    given, part_name = document.text("rings"), shard or document.text("shard")
    rings = beside / given if given else ring_directory()
    named = document.text("folder")
    folder = beside / named if named else rings / f"{COLLECTOR}-{os.geteuid()}"
    part = ALL if part_name is None else read_shard(part_name)
    return Config(
        rings,
        folder,
        _exporters(document.section("exporters"), beside),
        None if document.is_off("pins") else _pins(document.section("pins"), folder / PINS, beside),
        _slo(_section(document, "slo"), beside, slo),
        _counters(document),
        _headers(document),
        _outlive_s(document),
        part,
        _max_engines(document),
    )


def _outlive_s(document: Section) -> float:
    setting = document.settings.get("outlive_s")
    if setting is not None and setting.value == 0 and setting.value is not False:
        return 0.0  # the default, written out
    return document.number("outlive_s") or 0.0


def _max_engines(document: Section) -> int:
    num = document.number("max_engines")
    if num is None:
        return MOST_ENGINES
    if not (num.is_integer() and 1 <= num <= _LARGEST_MAX_ENGINES):
        raise document.wrong("max_engines", f"a whole number up to {_LARGEST_MAX_ENGINES}")
    return int(num)


def _override(document: Section, name: str, text: str) -> None:
    """Store the value of an environment variable at its path in the document."""
    key = name.removeprefix(PREFIX)
    if key.startswith(_EXPORTERS):
        exporter, _, setting = key.removeprefix(_EXPORTERS).partition("_")
        path: tuple[str, ...] = ("exporters", exporter.lower(), setting.lower())
    elif key in _SCALARS:
        path = _SCALARS[key]
    else:
        known = [PREFIX + each for each in (*_SCALARS, f"{_EXPORTERS}NAME_KEY")]
        raise BadInput(f"unknown setting {name}. {near(name, known)}")
    settings = document.settings
    for step in path[:-1]:
        found = settings.get(step)
        if found is None or found.value is None or (found.value is False and step in _SHORT):
            found = settings[step] = Setting({}, name)
        elif isinstance(found.value, str) and step in _SHORT:
            found = settings[step] = Setting({_SHORT[step]: found}, found.where)
        if not isinstance(found.value, dict):
            return  # the file's value is rejected later, whatever the variable holds
        settings = found.value
    settings[path[-1]] = Setting(text if path[-1] in _TEXTS else read_scalar(text), name)


def _exporters(section: Section | None, beside: Path) -> Mapping[str, Mapping[str, object]]:
    if section is None:
        return _DEFAULT_EXPORTERS
    found = {}
    for name in section.settings:
        given = section.section(name)
        found[name] = settings = {} if given is None else given.plain()
        for key in path_settings(name):
            value = settings.get(key)
            if isinstance(value, str) and value and "://" not in value:
                settings[key] = str(beside / value)
    return found


def _pins(section: Section | None, usual: Path, beside: Path) -> PinSettings:
    if section is None:
        return PinSettings(usual)
    section.only(("folder", "max_mb", "before_s", "after_s", "on"))
    named = section.text("folder")
    asked = PinSettings(usual if named is None else beside / named)
    return PinSettings(
        asked.folder,
        section.number("max_mb") or asked.max_mb,
        section.number("before_s") or asked.before_s,
        section.number("after_s") or asked.after_s,
        asked.on if (on := section.words("on", INCIDENTS)) is None else on,
    )


def _section(document: Section, name: str) -> Section | None:
    """Return a section that may be given as a scalar."""
    given = document.settings.get(name)
    if given is not None and isinstance(given.value, str):
        return Section({_SHORT[name]: given}, path=name, where=given.where)
    return document.section(name)


def _counters(document: Section) -> CounterSettings:
    if document.is_off("counters"):
        return CounterSettings(())
    section = _section(document, "counters")
    if section is None:
        return CounterSettings()
    section.only(("sources", "interval", "pm_interval", "dcgm_url"))
    return CounterSettings(
        _words(section, "sources", ("auto", *SOURCES)),
        section.duration_ns("interval"),
        section.duration_ns("pm_interval"),
        section.text("dcgm_url"),
    )


def _microseconds(span_ns: int | None) -> str | None:
    return None if span_ns is None else f"{max(1, span_ns // 1000)}us"


def _headers(document: Section) -> tuple[str, ...] | None:
    allowed = [f"{word}{how}" for word in WORDS for how in ("", f":{HASH}")]
    words = _words(document, "headers", tuple(allowed))
    names = [word.partition(":")[0] for word in words or ()]
    if len(names) > len(set(names)):
        raise document.wrong("headers", "each name once, as it is or with :hash")
    return words


def _words(section: Section, key: str, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return a list of words, comma-separated in environment variables; `off` is an empty list."""
    setting = section.settings.get(key)
    if setting is None or setting.value is None:
        return None
    if setting.value is False or setting.value == _OFF:
        return ()
    if isinstance(setting.value, str):
        words: list[object] = [word.strip() for word in setting.value.split(",")]
        section = Section({key: setting._replace(value=words)}, path=section.path)
    return section.words(key, allowed)


def _slo(section: Section | None, beside: Path, file: Path | None) -> SloSettings:
    if section is None:
        section = Section({}, path="slo")
    section.only(("file", "state", "ttft_ms", "tbt_ms"))
    named, state = section.text("file"), section.text("state")
    if file is None and named is not None:
        file = beside / named
    return SloSettings(
        section.number("ttft_ms"),
        section.number("tbt_ms"),
        None if file is None else read_objectives(file),
        None if state is None else beside / state,
    )
