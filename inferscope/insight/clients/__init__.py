"""Load generators' files, joined with the requests of a recording by their IDs."""

from inferscope.insight.clients.files import ClientFile, read_client_file
from inferscope.insight.clients.joining import (
    Joined,
    JoinSink,
    MetricPair,
    join,
)

__all__ = [
    "ClientFile",
    "JoinSink",
    "Joined",
    "MetricPair",
    "join",
    "read_client_file",
]
