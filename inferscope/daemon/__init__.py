"""The `collect` service: one collector per host or shard, live exporters, incident pins."""

from inferscope.daemon.config import Config, read_config
from inferscope.daemon.exporter_set import ExporterSet, check_exporters, make_exporters
from inferscope.daemon.lock import LOCK_NAME, only_collector
from inferscope.daemon.memory import configure_trim
from inferscope.daemon.service import Service

__all__ = [
    "LOCK_NAME",
    "Config",
    "ExporterSet",
    "Service",
    "check_exporters",
    "configure_trim",
    "make_exporters",
    "only_collector",
    "read_config",
]
