"""What can be configured, and the errors for what cannot."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import inferscope_otlp.settings as otlp
import inferscope_parquet.settings as parquet
import inferscope_prometheus.settings as prometheus
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from inferscope.cli import sampler
from inferscope.daemon.config import (
    INCIDENTS,
    CounterSettings,
    PinSettings,
    SloSettings,
    config_hash,
    read_config,
)
from inferscope.daemon.exporter_set import make_exporters
from inferscope.errors import BadInput
from inferscope.exporting import path_settings

_WHOLE = """
rings: /run/rings
exporters:
  prometheus:
    host: 0.0.0.0
    port: 9999
pins:
  folder: /var/pins
  max_mb: 10
  before_s: 5
  after_s: 6
  on: [breach, signal]
slo: {ttft_ms: 2000, tbt_ms: 200.5}
counters: {sources: [auto, pm], interval: 50ms, pm_interval: 1ms}
headers: [tenant, "priority:hash"]
outlive_s: 30
"""
_SLO = "slos: [{metric: ttft, threshold: 1s, objective: 99%, window: 30d}]"


def configured(folder: Path, text: str) -> Path:
    file = folder / "collect.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_whole_configuration_is_read(tmp_path: Path) -> None:
    config = read_config(configured(tmp_path, _WHOLE), {})
    assert config.rings == Path("/run/rings")
    assert config.exporters == {"prometheus": {"host": "0.0.0.0", "port": 9999}}
    assert config.pins == PinSettings(Path("/var/pins"), 10, 5, 6, ("breach", "signal"))
    assert config.slo == SloSettings(2000, 200.5)
    assert config.outlive_s == 30
    assert config.counters == CounterSettings(("auto", "pm"), 50_000_000, 1_000_000)
    assert config.counters.options == ("--interval", "50000us", "--pm-interval", "1000us")
    assert config.headers == ("tenant", "priority:hash")


def test_objectives_come_from_a_file_beside_the_configuration_or_from_the_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "slo.yaml").write_text(_SLO, encoding="utf-8")
    other = tmp_path / "other.yaml"
    other.write_text(_SLO.replace("1s", "2s"), encoding="utf-8")
    short = configured(tmp_path, "slo: slo.yaml")
    whole = {"INFERSCOPE_COLLECT_SLO_STATE": "/var/state.json"}
    for config in (
        read_config(short, {}),
        read_config(configured(tmp_path, "slo: {file: slo.yaml, ttft_ms: 5}"), whole),
        read_config(None, {"INFERSCOPE_COLLECT_SLO_FILE": str(tmp_path / "slo.yaml")}),
    ):
        assert config.slo.objectives is not None
        assert [one.threshold_ns for one in config.slo.objectives.all] == [1_000_000_000]
    slo = read_config(short, whole, slo=other).slo
    assert slo.objectives is not None
    assert [one.threshold_ns for one in slo.objectives.all] == [2_000_000_000]
    assert slo.state == Path("/var/state.json")
    assert read_config(None, {}).slo == SloSettings()
    with pytest.raises(BadInput, match=r"cannot read .*none\.yaml"):
        read_config(None, {}, slo=tmp_path / "none.yaml")


_RELATIVE = """
rings: rings
exporters:
  prometheus: {token_file: token, tls_cert: /etc/tls.pem}
  otlp: {certificate: ca.pem}
  parquet: {folder: kept}
pins: {folder: pins}
slo: {state: state.json}
"""


def test_a_relative_path_is_beside_the_configuration_wherever_the_collector_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder in (beside, elsewhere):
        folder.mkdir()
    file = configured(beside, _RELATIVE)
    monkeypatch.chdir(elsewhere)
    config = read_config(file, {"INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_TLS_KEY": "key.pem"})
    assert config.rings == beside / "rings"
    assert config.exporters == {
        "prometheus": {
            "token_file": f"{beside}/token",
            "tls_cert": "/etc/tls.pem",
            "tls_key": f"{beside}/key.pem",
        },
        "otlp": {"certificate": f"{beside}/ca.pem"},
        "parquet": {"folder": f"{beside}/kept"},
    }
    assert config.pins is not None
    assert config.pins.folder == beside / "pins"
    assert config.state == beside / "state.json"
    # Options are of the command line, and so is what they name.
    (elsewhere / "slo.yaml").write_text(_SLO, encoding="utf-8")
    assert read_config(file, {}, slo=Path("slo.yaml")).slo.objectives is not None
    # A file that is named by a relative path itself.
    monkeypatch.chdir(tmp_path)
    token_file = read_config(Path("beside") / file.name, {}).exporters["prometheus"]["token_file"]
    assert token_file == "beside/token"
    # The exporter refuses a value that is not a path, unchanged.
    store = {"INFERSCOPE_COLLECT_EXPORTERS_PARQUET_FOLDER": "s3://bucket/x"}
    assert read_config(file, store).exporters["parquet"] == {"folder": "s3://bucket/x"}
    # Without a file, there is but one folder that can be meant.
    alone = {"INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_TOKEN_FILE": "token"}
    assert read_config(None, alone).exporters == {"prometheus": {"token_file": "token"}}


@pytest.mark.parametrize("name", ["prometheus", "otlp", "parquet"])
def test_paths_are_settings_that_there_are(name: str) -> None:
    assert set(path_settings(name)) <= {each.name for each in fields(_SETTINGS[name])}
    assert path_settings(name)
    assert path_settings("unknown") == ()


@pytest.mark.parametrize("text", ["", "# nothing\n", "exporters:\n  prometheus:\n"])
def test_prometheus_is_served_without_a_word(tmp_path: Path, text: str) -> None:
    config = read_config(configured(tmp_path, text), {})
    assert config.exporters == {"prometheus": {}}
    assert config.pins == PinSettings(config.folder / "pins", on=INCIDENTS)
    assert read_config(None, {}).exporters == {"prometheus": {}}


def test_the_environment_has_the_last_word(tmp_path: Path) -> None:
    environment = {
        "INFERSCOPE_COLLECT_PINS_FOLDER": "/elsewhere",
        "INFERSCOPE_COLLECT_SLO_TTFT_MS": "100",
        "INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_PORT": "0",
        "INFERSCOPE_DIR": "/not/ours",
    }
    config = read_config(configured(tmp_path, _WHOLE), environment)
    assert config.pins is not None
    assert config.pins.folder == Path("/elsewhere")
    assert config.slo == SloSettings(100, 200.5)
    assert config.exporters["prometheus"] == {"host": "0.0.0.0", "port": 0}
    alone = read_config(None, environment)
    assert alone.pins == PinSettings(Path("/elsewhere"), on=INCIDENTS)
    assert alone.exporters == {"prometheus": {"port": 0}}


@pytest.mark.parametrize(("text", "outlive_s"), [("0", 0), ("0.0", 0), ("0.5", 0.5)])
def test_outlive_s_of_zero_means_exit_at_once(tmp_path: Path, text: str, outlive_s: float) -> None:
    assert read_config(configured(tmp_path, f"outlive_s: {text}"), {}).outlive_s == outlive_s


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("outlive_s: -1", 1, "outlive_s is -1. Give a number above 0"),
        ("outlive_s: false", 1, "outlive_s is False. Give a number."),
        ("outlive_s: ''", 1, "outlive_s is ''. Give a number."),
        ("pin: {}", 1, "unknown setting pin. Did you mean pins?"),
        (
            "\npins:\n  folder: x\n  max_md: 3",
            4,
            "unknown setting pins.max_md. Did you mean max_mb?",
        ),
        ("pins: {folder: x, zzz: 3}", 1, "There are: folder, max_mb"),
        ("pins: true", 1, "pins is True. Give a section"),
        ("pins: {folder: x, max_mb: lots}", 1, "pins.max_mb is 'lots'. Give a number."),
        ("pins: {folder: x, max_mb: true}", 1, "pins.max_mb is True. Give a number."),
        ("pins: {folder: x, max_mb: -1}", 1, "Give a number above 0"),
        ("pins: {folder: x, max_mb: .nan}", 1, "Give a number above 0"),
        ("pins: {folder: [x]}", 1, "pins.folder is a list. Give text."),
        ("pins: {folder: [{x: y}]}", 1, "pins.folder is a list. Give text."),
        ("pins: {on: [{breach: x}]}", 1, "pins.on has a section. There are: breach"),
        ("pins: {on: [[breach]]}", 1, "pins.on has a list. There are: breach"),
        ("\n? [a, b]\n: c", 2, "a key is a list or a section. Give a name."),
        ("{{a: b}: c}", 1, "a key is a list or a section. Give a name."),
        ("pins: {folder: x, on: [breech]}", 1, "Did you mean breach?"),
        ("pins: {folder: x, on: breach}", 1, "Give a list of"),
        ("slo: 3", 1, "slo is 3. Give a section"),
        ("slo:\n  ttft_ms: 1\n  ttft_ms: 2", 3, "ttft_ms is set twice"),
        ("- a list", 1, "not a mapping"),
        ("counters: 3", 1, "counters is 3. Give a section"),
        ("counters: nvlm", 1, "counters.sources has 'nvlm'. Did you mean nvml?"),
        ("counters: {sources: 3}", 1, "counters.sources is 3. Give a list of: auto, nvml"),
        ("counters: {interval: 100}", 1, "counters.interval is 100. Give a time with its unit"),
        ("counters: {every: 1s}", 1, "unknown setting counters.every. There are: sources"),
        ("headers: [cookie]", 1, "headers has 'cookie'. There are: tenant, tenant:hash"),
        (
            "headers: tenant, tenant:hash",
            1,
            "headers is 'tenant, tenant:hash'. Give each",
        ),
        ("headers: {tenant: x}", 1, "headers is a section. Give a list of: tenant"),
        ("a: [", 1, "not YAML"),
        ("rings: &x {y: *x}", 1, "nested deeper"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    file = configured(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        read_config(file, {})
    words = str(caught.value)
    assert words.startswith(f"{file}:{line}: ")
    assert message in words
    assert "\n" not in words


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["[" * 5_000, "{a: " * 5_000, "- " * 5_000])
def test_what_is_nested_without_end_is_one_line(tmp_path: Path, text: str) -> None:
    file = configured(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        read_config(file, {})
    assert str(caught.value) == f"{file}: nested deeper than any setting."


def test_aliases_that_expand_without_bound_are_refused(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, 5)]
    file = configured(tmp_path, "\n".join(levels))
    with pytest.raises(BadInput, match="more than 10000 values, aliases written out"):
        read_config(file, {})


def test_a_few_aliases_are_what_they_stand_for(tmp_path: Path) -> None:
    text = "exporters: {x: &same {of: [1, 2]}, y: *same}"
    config = read_config(configured(tmp_path, text), {})
    assert config.exporters == {"x": {"of": [1, 2]}, "y": {"of": [1, 2]}}


def test_a_number_that_takes_long_to_read_is_refused(tmp_path: Path) -> None:
    file = configured(tmp_path, f"outlive_s: 1{':1' * 5_000}")
    with pytest.raises(BadInput, match="a value of more than 4096 characters"):
        read_config(file, {})


@pytest.mark.parametrize(
    "url",
    [
        "http://reader:pass-key@node:9400/metrics",
        "http://reader:pass/key@node:9400/metrics",
        "https://node:9400/metrics?token=pass-key",
    ],
)
def test_credentials_are_on_no_command_line_and_in_no_error(tmp_path: Path, url: str) -> None:
    counters = read_config(configured(tmp_path, f"counters: {{dcgm_url: '{url}'}}"), {}).counters
    assert counters.options == ()
    assert counters.environment == {"INFERSCOPE_DCGM_URL": url}
    with pytest.raises(BadInput) as caught:
        read_config(configured(tmp_path, f"counters: {{interval: '{url}'}}"), {})
    assert "-key" not in str(caught.value)
    assert "/key" not in str(caught.value)
    assert "node:9400/metrics" in str(caught.value)


def test_no_incident_is_not_all_of_them(tmp_path: Path) -> None:
    pins = read_config(configured(tmp_path, "pins: {on: []}"), {}).pins
    assert pins is not None
    assert pins.on == ()


def test_what_is_in_a_list_comes_to_the_exporter_as_it_is(tmp_path: Path) -> None:
    config = read_config(configured(tmp_path, "exporters: {x: {of: [1, {a: [b]}]}}"), {})
    assert config.exporters == {"x": {"of": [1, {"a": ["b"]}]}}


def test_a_variable_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Did you mean INFERSCOPE_COLLECT_PINS_MAX_MB"):
        read_config(None, {"INFERSCOPE_COLLECT_PIN_MAX_MB": "3"})
    with pytest.raises(BadInput, match=r"^INFERSCOPE_COLLECT_SLO_TBT_MS: slo\.tbt_ms is 'soon'"):
        read_config(None, {"INFERSCOPE_COLLECT_SLO_TBT_MS": "soon"})


@pytest.mark.parametrize(
    ("text", "environment", "sources"),
    [
        ("", {}, None),
        ("counters: off", {}, ()),
        ("counters: {sources: off}", {}, ()),
        ("counters: auto", {}, ("auto",)),
        ("counters: nvml, host", {}, ("nvml", "host")),
        ("counters:", {}, None),
        ("counters: off", {"SOURCES": "host"}, ("host",)),
        ("counters: auto", {"SOURCES": "off"}, ()),
        ("counters: auto", {"INTERVAL": "1s"}, ("auto",)),
        ("", {"SOURCES": "auto,dcgm", "DCGM_URL": "http://node:9400/metrics"}, ("auto", "dcgm")),
    ],
)
def test_counters_are_those_of_the_sampler(
    tmp_path: Path, text: str, environment: dict[str, str], sources: tuple[str, ...] | None
) -> None:
    named = {f"INFERSCOPE_COLLECT_COUNTERS_{key}": value for key, value in environment.items()}
    counters = read_config(configured(tmp_path, text), named).counters
    assert counters.sources == sources
    assert counters.interval_ns == (10**9 if "INTERVAL" in environment else None)
    assert counters.dcgm_url == environment.get("DCGM_URL")
    parser = argparse.ArgumentParser(exit_on_error=False)
    sampler.configure(parser)  # which receives them this way
    words = ["--counters", ",".join(sources or ("auto",)), *counters.options]
    options = parser.parse_args(words)
    assert options.interval == (counters.interval_ns or 100_000_000)


@pytest.mark.parametrize(
    ("text", "variable", "headers"),
    [
        ("", None, None),
        ("headers: off", None, ()),
        ("headers: []", None, ()),
        ("headers: [tenant:hash]", None, ("tenant:hash",)),
        ("headers: [tenant]", "adapter, priority:hash", ("adapter", "priority:hash")),
        ("headers: [tenant]", "off", ()),
    ],
)
def test_headers_are_a_list_which_a_variable_has_with_commas(
    tmp_path: Path, text: str, variable: str | None, headers: tuple[str, ...] | None
) -> None:
    environment = {} if variable is None else {"INFERSCOPE_COLLECT_HEADERS": variable}
    assert read_config(configured(tmp_path, text), environment).headers == headers


def test_a_variable_adds_to_objectives_in_their_short_form(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(_SLO, encoding="utf-8")
    short = configured(tmp_path, "slo: slo.yaml")
    slo = read_config(short, {"INFERSCOPE_COLLECT_SLO_STATE": "/var/state.json"}).slo
    assert slo.objectives is not None
    assert slo.state == Path("/var/state.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.yaml: No such file"):
        read_config(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"prometheuss": {}}, "no exporter is called 'prometheuss'. Did you mean prometheus?"),
        ({"statsd": {}}, "no exporter is called 'statsd'. There are: otlp, parquet, prometheus."),
        ({"jsonl": {}}, "jsonl writes files"),
        (
            {"prometheus": {"prot": 1}},
            "exporters.prometheus: unknown setting prot. Did you mean port",
        ),
        ({"prometheus": {"port": "x"}}, "exporters.prometheus: port is 'x'"),
        ({"prometheus": {"port": 65536}}, "port is 65536"),
        ({"prometheus": {"host": 1}}, "host is 1"),
        (
            {"parquet": {"folder": "s3://bucket/x"}},
            "folder is 's3://bucket/x'. Give a local path",
        ),
    ],
)
def test_what_an_exporter_cannot_use_is_named(
    sections: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        make_exporters(sections)


def test_pins_can_be_switched_off(tmp_path: Path) -> None:
    file = tmp_path / "collect.yaml"
    file.write_text("pins: off\n", encoding="utf-8")
    assert read_config(file, {}).pins is None


_WORDS = st.sampled_from(
    [
        *("rings", "exporters", "pins", "slo", "prometheus", "parquet", "otlp", "on"),
        *("counters", "headers", "sources", "off", "tenant"),
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=9,
)


@given(st.binary(max_size=200) | _VALUES.map(lambda value: yaml.safe_dump(value).encode()))
def test_whatever_is_in_the_file_it_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    file = tmp_path_factory.mktemp("config") / "collect.yaml"
    file.write_bytes(raw)
    message = ""
    try:
        found_hash = config_hash(read_config(file, {}))
    except BadInput as error:
        found_hash, message = "", str(error)
    assert len(found_hash) == (0 if message else 12)
    assert len(message.splitlines()) <= 1


_SETTINGS: dict[str, type] = {
    "prometheus": prometheus.PrometheusSettings,
    "parquet": parquet.ParquetSettings,
    "otlp": otlp.OtlpSettings,
}


@pytest.mark.parametrize("name", _SETTINGS)
@given(data=st.data())
def test_whatever_is_in_a_section_it_is_taken_or_named(name: str, data: st.DataObject) -> None:
    keys = [each.name for each in fields(_SETTINGS[name])]
    section = data.draw(st.dictionaries(st.sampled_from(keys) | st.text(max_size=5), _VALUES))
    with suppress(BadInput):
        make_exporters({name: section})


def test_the_hash_distinguishes_configurations(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(_SLO, encoding="utf-8")
    file = configured(tmp_path, _WHOLE.replace("slo: {", "slo: {file: slo.yaml, "))
    whole = config_hash(read_config(file, {}))
    file.write_text(f"# a comment\n{file.read_text(encoding='utf-8')}", encoding="utf-8")
    assert config_hash(read_config(file, {})) == whole
    changed = {config_hash(read_config(file, {"INFERSCOPE_COLLECT_PINS_MAX_MB": "11"}))}
    (tmp_path / "slo.yaml").write_text(_SLO.replace("1s", "2s"), encoding="utf-8")
    changed.add(config_hash(read_config(file, {})))
    assert len(changed | {whole}) == 3
