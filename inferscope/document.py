"""A YAML document whose values know their file and line, with checks that name the fault.

config.yaml:7: unknown setting pins.max_md. Did you mean max_mb?
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inferscope.errors import BadInput
from inferscope.foreign import without_secrets

if TYPE_CHECKING:
    import yaml

_MOST_BYTES = 1 << 20
_MOST_VALUES = 10_000
"""Largest number of values in a document, with every alias expanded."""
_LONGEST_SCALAR = 4096
"""Largest length in characters: parsing YAML 1.1's base-60 numbers takes quadratic time."""
_DEEPEST = 8
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*(us|µs|ms|s|min|m|h|d|w)")
_UNITS_NS = {
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
    "w": 7 * 86400 * 10**9,
}
_LONGEST_NS = 10**18


class Setting(NamedTuple):
    """A value with its location; a mapping's value is its settings by key."""

    value: object
    where: str
    """File and line, or the name of a variable."""


class Section:
    """A mapping of settings; its methods raise BadInput for invalid values."""

    def __init__(self, settings: Mapping[str, Setting], *, path: str, where: str = "") -> None:
        """Hold the settings of one mapping.

        Args:
            settings: the settings by key.
            path: name of the section in errors, empty for the whole file.
            where: file and line, for errors about missing settings.
        """
        self.settings = dict(settings)
        self.path = path
        self.where = where

    def only(self, known: Iterable[str]) -> None:
        """Raise BadInput for any other key, with the nearest known one."""
        known = list(known)
        for key, setting in self.settings.items():
            if key not in known:
                raise BadInput(
                    f"{setting.where}: unknown setting {self._name(key)}. {near(key, known)}"
                )

    def section(self, key: str) -> Section | None:
        """Return a section of this one, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        value = {} if setting.value is None else setting.value
        if not isinstance(value, dict):
            raise self._wrong(key, "a section: KEY: VALUE lines below it")
        return Section(value, path=self._name(key), where=setting.where)

    def sections(self, key: str) -> tuple[Section, ...]:
        """Return the sections in a list, none if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return ()
        wanted = "a list of sections: lines that begin with - KEY: VALUE"
        if not isinstance(setting.value, list):
            raise self._wrong(key, wanted)
        found = []
        for number, each in enumerate(setting.value, 1):
            if not isinstance(each, dict):
                raise self._wrong(key, wanted)
            first = next(iter(each.values()), setting)
            found.append(Section(each, path=f"{self._name(key)}[{number}]", where=first.where))
        return tuple(found)

    def is_off(self, key: str) -> bool:
        """Return whether a section's value is false, which disables it."""
        setting = self.settings.get(key)
        return setting is not None and setting.value is False

    def text(self, key: str) -> str | None:
        """Return a word or a path, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        if not isinstance(setting.value, str) or not setting.value:
            raise self._wrong(key, "text")
        return setting.value

    def number(self, key: str) -> float | None:
        """Return a number above 0, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        value = setting.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not 0 < value <= 1e9:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def duration_ns(self, key: str) -> int | None:
        """Return a time such as 500ms or 30d in nanoseconds, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        found = _DURATION.fullmatch(setting.value) if isinstance(setting.value, str) else None
        span_ns = round(float(found[1]) * _UNITS_NS[found[2]]) if found else 0
        if not 0 < span_ns <= _LONGEST_NS:
            raise self._wrong(key, "a time with its unit, such as 500ms, 2s, 1h or 30d")
        return span_ns

    def share(self, key: str) -> float | None:
        """Return a share between 0 and 1, also written as 99.9%; None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        value, part = setting.value, 1.0
        if isinstance(value, str) and value.endswith("%"):
            value, part = read_scalar(value[:-1].strip()), 100.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < part:
            raise self._wrong(key, "a share below 1, such as 0.99 or 99%")
        return value / part

    def word(self, key: str, allowed: Iterable[str]) -> str | None:
        """Return one of the allowed words, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        value = setting.value
        if not isinstance(value, str) or value not in (allowed := tuple(allowed)):
            hint = near(value if isinstance(value, str) else "", allowed)
            raise BadInput(f"{setting.where}: {self._name(key)} is {_shown(value)}. {hint}")
        return value

    def wrong(self, key: str, wanted: str) -> BadInput:
        """Return the error for an invalid or missing value.

        Args:
            key: key of the value.
            wanted: description of a valid value, after "Give".
        """
        if key in self.settings:
            return self._wrong(key, wanted)
        return BadInput(f"{self.where}: {self._name(key)} is missing. Give {wanted}.")

    def words(self, key: str, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return a list of allowed words, None if it is missing."""
        setting = self.settings.get(key)
        if setting is None:
            return None
        if not isinstance(setting.value, list):
            raise self._wrong(key, f"a list of: {', '.join(allowed)}")
        for word in setting.value:
            if word not in allowed:
                hint = near(word if isinstance(word, str) else "", allowed)
                raise BadInput(f"{setting.where}: {self._name(key)} has {_shown(word)}. {hint}")
        return tuple(setting.value)

    def plain(self) -> dict[str, object]:
        """Return the settings without locations, for another check."""
        return {key: _plain(setting.value) for key, setting in self.settings.items()}

    def _wrong(self, key: str, wanted: str) -> BadInput:
        setting = self.settings[key]
        return BadInput(
            f"{setting.where}: {self._name(key)} is {_shown(setting.value)}. Give {wanted}."
        )

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def near(word: str, known: Iterable[str]) -> str:
    """Return a question for the nearest known word, else the list of all known words."""
    known = list(known)
    found = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {found[0]}?" if found else f"There are: {', '.join(known)}."


def only(given: Iterable[object], known: Iterable[str]) -> None:
    """Raise BadInput for an unknown name, with the nearest known one.

    Raises:
        BadInput: a name is unknown; the first such name is reported.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise BadInput(f"unknown setting {name}. {near(str(name), known)}")


def read_document(path: Path) -> Section:
    """Read a YAML file.

    Raises:
        BadInput: the file cannot be read, or is not a mapping; the message gives the line.
    """
    import yaml  # takes 20 ms, which users of the types alone need not pay

    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}. Give another file.") from error
    if len(raw) > _MOST_BYTES:
        raise BadInput(f"{path} is larger than the limit for a configuration. Give another file.")
    try:
        loader = yaml.SafeLoader(raw)
        try:
            node = loader.get_single_node()
            value = None if node is None else _Values(loader, str(path)).of(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise BadInput(f"{path}: nested deeper than any setting.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise BadInput(f"{path}:{line}: not YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: not YAML: {str(error).splitlines()[0]}.") from error
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise BadInput(f"{path}:1: not a mapping. Give KEY: VALUE lines.")
    return Section(value, path="", where=f"{path}:1")


def read_scalar(text: str) -> object:
    """Parse the text of a variable like a value in the file."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float) else text


class _Values:
    """The values of a document, with every alias expanded."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._num_left = _MOST_VALUES

    def of(self, node: yaml.Node, depth: int = 0) -> object:
        """Return a node's value.

        Raises:
            BadInput: the value, or the document so far, exceeds the limits on size or depth.
        """
        import yaml

        where = f"{self._file}:{node.start_mark.line + 1}"
        self._num_left -= 1
        if self._num_left < 0:
            raise BadInput(
                f"{where}: more than {_MOST_VALUES} values, aliases written out. Use fewer aliases."
            )
        if depth > _DEEPEST:  # for example, an alias of itself
            raise BadInput(f"{where}: nested deeper than any setting.")
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, depth + 1) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            if len(node.value) > _LONGEST_SCALAR:
                raise BadInput(f"{where}: a value of more than {_LONGEST_SCALAR} characters.")
            return self._loader.construct_object(node)
        settings: dict[str, Setting] = {}
        for key_node, value_node in node.value:
            where = f"{self._file}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise BadInput(f"{where}: a key is a list or a section. Give a name.")
            key = str(key_node.value)
            if key in settings:
                raise BadInput(f"{where}: {key} is set twice.")
            settings[key] = Setting(self.of(value_node, depth + 1), where)
        return settings


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(setting.value) for key, setting in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    return repr(without_secrets(value) if isinstance(value, str) and "://" in value else value)
