"""Rules and routing as the text of files: Prometheus' own, or an object of its operator."""

from __future__ import annotations

from typing import Any

import yaml

from inferscope.errors import BadInput

_RULES_HEAD = """\
# Written by `inferscope slo rules`; change the objectives and write it again.
# Load it by `rule_files` in prometheus.yml.
"""
_OBJECT_HEAD = """\
# Written by `inferscope slo rules --kubernetes`; change the objectives and write it again.
# One of them is for all collectors that a Prometheus scrapes.
"""
_ROUTING_HEAD = """\
# An example by `inferscope slo rules`: replace the two addresses by what wakes people and by what
# keeps tickets, or take the routes and inhibitions into your own file.
"""


MOST_OBJECT_BYTES = 512 << 10
"""Maximum size: the operator stores rules in ConfigMaps and fills half of each."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that keeps expressions on their lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rules_text(rules: dict[str, Any]) -> str:
    """Return a Prometheus rule file."""
    return _RULES_HEAD + _yaml(rules)


def rules_object_text(rules: dict[str, Any]) -> str:
    """Return the rules as a PrometheusRule object of the Prometheus operator.

    Raises:
        BadInput: they exceed its maximum size.
    """
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "inferscope", "labels": {"app.kubernetes.io/name": "inferscope"}},
        "spec": rules,
    }
    text = _OBJECT_HEAD + _yaml(manifest)
    num_bytes = len(text.encode())
    if num_bytes > MOST_OBJECT_BYTES:
        raise BadInput(
            f"the rules are {num_bytes >> 10} KiB, and a PrometheusRule has "
            f"{MOST_OBJECT_BYTES >> 10} at most. Give fewer objectives, or one for all models in "
            "place of one for each."
        )
    return text


def routing_text(routing: dict[str, Any]) -> str:
    """Return an Alertmanager configuration."""
    return _ROUTING_HEAD + _yaml(routing)


def _yaml(content: dict[str, Any]) -> str:
    # Never folded: in a broken line, a template would be hard to find.
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True, indent=2
    )
