"""Load generators' files, joined with the requests of a recording by their IDs."""

from inferscope.insight.clients.files import ClientFile, read_client_file
from inferscope.insight.clients.joining import (
    Joined,
    JoinedRequest,
    JoinSink,
    MetricPair,
    Unmatched,
    join,
)

__all__ = [
    "ClientFile",
    "JoinSink",
    "Joined",
    "JoinedRequest",
    "MetricPair",
    "Unmatched",
    "join",
    "read_client_file",
]
