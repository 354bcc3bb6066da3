"""Readers of ring files and recordings: the records of a fold, in its order."""

from inferscope.readers.expansion import Expansion
from inferscope.readers.history import HistorySource, Open
from inferscope.readers.known_rings import File, KnownRings
from inferscope.readers.merge import Item
from inferscope.readers.request_index import (
    RequestRef,
    RingKey,
    key_of,
    matching,
    requests_in_recording,
    requests_in_rings,
)
from inferscope.readers.ring_follower import RingFollower, is_held
from inferscope.readers.source import (
    Listener,
    RecordingSource,
    RingSource,
    catch_up,
    final_books,
    open_replay,
    open_source,
    recorded,
)

__all__ = [
    "Expansion",
    "File",
    "HistorySource",
    "Item",
    "KnownRings",
    "Listener",
    "Open",
    "RecordingSource",
    "RequestRef",
    "RingFollower",
    "RingKey",
    "RingSource",
    "catch_up",
    "final_books",
    "is_held",
    "key_of",
    "matching",
    "open_replay",
    "open_source",
    "recorded",
    "requests_in_recording",
    "requests_in_rings",
]
