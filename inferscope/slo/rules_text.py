"""Rules and routing as the text of files."""

from __future__ import annotations

from typing import Any

import yaml

_RULES_HEAD = """\
# Written by `inferscope slo rules`; change the objectives and write it again.
# Load it by `rule_files` in prometheus.yml.
"""
_ROUTING_HEAD = """\
# An example by `inferscope slo rules`: replace the two addresses by what wakes people and by what
# keeps tickets, or take the routes and inhibitions into your own file.
"""


class _Dumper(yaml.SafeDumper):
    """Keeps expressions on their lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rules_text(rules: dict[str, Any]) -> str:
    """Return a rule file of Prometheus."""
    return _RULES_HEAD + _yaml(rules)


def routing_text(routing: dict[str, Any]) -> str:
    """Return a configuration of Alertmanager."""
    return _ROUTING_HEAD + _yaml(routing)


def _yaml(content: dict[str, Any]) -> str:
    # Never folded: within a line that is broken, a template would be hard to find again.
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True, indent=2
    )
