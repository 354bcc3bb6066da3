"""Write the golden ring and recording in the current format: run once per format version, by hand.

python -m tests.golden.write_golden
"""

from __future__ import annotations

from pathlib import Path

from inferscope.records import (
    FORMAT_VERSION,
    CacheLookup,
    CacheSample,
    Clock,
    CostTable,
    CounterSample,
    Emitted,
    EngineInfo,
    ExpertLoad,
    Keyframe,
    Live,
    Missed,
    ProbeHealth,
    PromptLikeness,
    Record,
    RequestEvent,
    RingOpened,
    Shape,
    StepPlan,
    StepSame,
    StepSlices,
    StepSpan,
    Tick,
    Transfer,
    encode,
)
from inferscope.ring import layout
from inferscope.ring.layout import MIN_CAPACITY, Identity
from inferscope.ring.recording import RecordedFrame, RecordingWriter
from inferscope.ring.writer import RingWriter

HERE = Path(__file__).parent
ME = Identity("golden", "core", 0, 41, "host", "boot", 1000, 2000, synthetic=True)
SHAPE = Shape(2, 64, 4, 2, 16, 128, 1024, 16, 16, 16, True, 8, 2, 1, 4096, (32, 16))


ADDED: dict[int, tuple[type[Record], ...]] = {
    2: (StepSame,),
    3: (CacheLookup, PromptLikeness, CacheSample, ExpertLoad),
}
"""Record types by the first format version whose golden files hold them.

A type that older readers can skip needs no new version: it is ahead of `FORMAT_VERSION` here.
"""


def written(version: int = FORMAT_VERSION) -> list[Record]:
    """Return one of each record of a format version, no field at its default."""
    later = tuple(kind for at, kinds in ADDED.items() if at > version for kind in kinds)
    return [record for record in every_record() if not isinstance(record, later)]


def every_record() -> list[Record]:
    """Return one of each record type, no field at its default."""
    ids, ones, words = b"\1\0\0\0\2\0\0\0", b"\1\1", b"\5\0\6\0"
    big = (1 << 64) - 3
    return [
        Keyframe(10, 1, -1),
        EngineInfo(
            11, "e", "1", "m", "s", "r", SHAPE, "d", "u", "g", (1, 2, 3, 4), (5, 6, 7, 8),
            "prefill", 9, 10, 11, 12, "h", 13,
        ),
        Live(12, ids, ones, ids, ids, bytes(16), ("a", "b")),
        Clock(13, 14, 15, 16, 17),
        StepPlan(18, 19, 20, 21, 22, 23, 24, 25, 26, ids, "blocks"),
        StepSlices(27, 19, big, ids, ones, ids, ids, ones, words, words, words),
        StepSpan(28, 19, big, 29, 30, 31, 32, 33, (34, 35), "graph", 36, True, True, True),
        Emitted(37, ids, ids, 19),
        RequestEvent(
            38, 39, 40, 41, "id", "ext", 42, 43, "why", "parent", "trace", {"k": "v"},
            (("system", 44),), 45, "lora",
        ),
        ProbeHealth(46, 3, 47, 48, 49, 50, 51, "over budget"),
        CounterSample(52, "u", 53, 54, "gpm", {"sm": 0.5}),
        Transfer(55, 56, 57, 58, 59, "peer"),
        Tick(60, 61),
        CostTable(62, "fit", "graph", "calibration", {"ns_per_flop": 0.25}),
        RingOpened(63, 1, "golden", "core", 0, 41, "host", "boot", 1000, 2000, True),
        Missed(64, 1, 65, "lapped"),
        StepSame(66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 3, 1, 76),
        CacheLookup(77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, True, "off", (86, 87)),
        PromptLikeness(91, 92, 93, 94, 95, -96, ((97, 98), (99, 100)), 5),
        CacheSample(101, 102, 16, 103, 0.5, bytes(range(16))),
        ExpertLoad(104, 105, 106, 2, ids, ids, words, 3),
    ]  # fmt: skip


def main() -> None:
    """Write both files."""
    ring_path = HERE / f"format-{FORMAT_VERSION}.ring"
    ring_path.unlink(missing_ok=True)
    ring = RingWriter(ring_path, ME, capacity=MIN_CAPACITY)
    recording = RecordingWriter(HERE / f"format-{FORMAT_VERSION}.isr")
    for record in written():
        flags = layout.STARTS_KEYFRAME if isinstance(record, Keyframe) else 0
        ring.write(record.CODE, encode(record), flags=flags)
        frame = RecordedFrame(1, record.CODE, ring.sequence, record.t_ns * 10**8, encode(record))
        recording.write(frame)
    recording.close()
    ring.close()


if __name__ == "__main__":
    main()
