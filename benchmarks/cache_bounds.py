"""Bounds of the prefix cache's forensics under a day of traffic: memory, bytes in rings, time.

    python benchmarks/cache_bounds.py [--hours N] [--rate N] [--out FILE]

Requests arrive in simulated time; nothing sleeps. Each prompt is compared with earlier ones as in a
front end, and looked up in a simulated pool of blocks with an engine's 32-byte hashes, whose
evictions and lookups go through `CacheWatch`. The records are written to rings and counted there.

    mixed    next turns of 400 conversations, documents behind 40 system prompts, edited tokens,
             inserted headers, repeated prompts, prompts of other salts
    short    12 tokens each: many prompts in little memory

Memory is the growth of this process's private memory since before the first request; pages of rings
are shared. `own_mb` is without that of the traffic and the simulated pool, which is measured with
the forensics switched off.
Times are processor time of this process: median and tenth percentile of each simulated hour, the
latter for busy machines. Flat means that the last hour costs what the second does: the tables are
filled within the first.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from inferscope.prefix import VARIABLE, Mode
from inferscope.probe import CacheWatch, EngineInfo, Probe
from inferscope.records import CacheLookup, CacheSample, PromptLikeness
from inferscope.ring import RingReader
from inferscope.ring.layout import frame_bytes

WIDTH = 16
POOL_BLOCKS = 6000
_TOKEN_BYTES = 4
_RECORDS = (CacheLookup, PromptLikeness, CacheSample)
_NUM_PENDING = 8
_READ_EVERY = 256
_HOURS_WITHOUT = 3
"""Simulated hours without forensics: the traffic's own memory is full within the first."""


class SimulatedClock:
    """Clock of simulated time, in which a request takes no time."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        """Return the simulated time since its beginning."""
        return self.now_ns

    def real_ns(self) -> int:
        """Return the simulated wall time."""
        return self.now_ns


class Asked(NamedTuple):
    """A prompt and the salt of its request."""

    tokens: array[int]
    salt: str = ""


# --- the traffic ------------------------------------------------------------------------------


def mixed(key: random.Random) -> Iterator[Asked]:
    """Yield prompts of chats, documents and repeated calls without end."""
    systems = [_text(key, 300) for _ in range(40)]
    chats: deque[array[int]] = deque(maxlen=400)
    lately: deque[Asked] = deque(maxlen=200)
    while True:
        kind = key.random()
        if kind < 0.4 and chats:
            chat = chats[key.randrange(len(chats))]
            if len(chat) > 6000:
                del chat[:]
                chat.extend(key.choice(systems))
            chat.extend(_text(key, key.randrange(20, 200)))
            asked = Asked(chat[:])
        elif kind < 0.6 or not lately:
            asked = Asked(key.choice(systems) + _text(key, key.randrange(50, 1500)))
            chats.append(asked.tokens[:])
        else:
            asked = lately[key.randrange(len(lately))]
            tokens, at = asked.tokens[:], key.randrange(len(asked.tokens))
            if kind < 0.7:
                tokens[at] ^= 1
            elif kind < 0.8:
                tokens = _text(key, 12) + tokens
            elif kind < 0.9:
                asked = asked._replace(salt=f"client-{key.randrange(1000)}")
            asked = asked._replace(tokens=tokens)
        lately.append(asked)
        yield asked


def short(key: random.Random) -> Iterator[Asked]:
    """Yield prompts of 12 tokens without end, a third of them known."""
    lately: deque[Asked] = deque(maxlen=5000)
    while True:
        is_known = lately and key.random() < 1 / 3
        asked = key.choice(lately) if is_known else Asked(_text(key, 12))
        lately.append(asked)
        yield asked


def _text(key: random.Random, num_tokens: int) -> array[int]:
    tokens = array("I")
    tokens.frombytes(key.randbytes(num_tokens * _TOKEN_BYTES))
    return tokens


TRAFFIC: dict[str, Callable[[random.Random], Iterator[Asked]]] = {"mixed": mixed, "short": short}


# --- the engine -------------------------------------------------------------------------------


class Pool:
    """Blocks of a prefix cache by hash; the least recently used is evicted."""

    def __init__(self, watch: CacheWatch | None) -> None:
        self._watch = watch
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, keys: list[bytes]) -> int:
        """Return the number of blocks that are in the cache, from the first on."""
        num = 0
        for key in keys:
            if key not in self._blocks:
                break
            num += 1
        return num

    def put(self, index: int, keys: list[bytes]) -> None:
        """Put a prompt's blocks into the cache, the last one as its oldest."""
        blocks, watch = self._blocks, self._watch
        if watch is not None:
            watch.make_room_for(index)
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        num_evicted = max(0, len(blocks) - POOL_BLOCKS)
        evicted = [blocks.popitem(last=False)[0] for _ in range(num_evicted)]
        if watch is not None:
            watch.evicted_blocks(evicted)


def hashes(asked: Asked) -> list[bytes]:
    """Return an engine's hashes of a prompt's whole blocks."""
    found, last = [], asked.salt.encode()
    raw = asked.tokens.tobytes()
    size = WIDTH * _TOKEN_BYTES
    for end in range(size, len(raw) + 1, size):
        last = hashlib.sha256(last + raw[end - size : end]).digest()
        found.append(last)
    return found


# --- the measurement --------------------------------------------------------------------------


class Counted:
    """Bytes of forensic records in a ring, read while it is written."""

    def __init__(self, path: Path) -> None:
        self._reader = RingReader(path)
        self.bytes_by_kind: Counter[str] = Counter()
        self._kinds = {kind.CODE: kind.__name__ for kind in _RECORDS}

    def read(self) -> None:
        """Add what was written since.

        Raises:
            SystemExit: records were overwritten before they were read.
        """
        while frames := self._reader.read():
            for frame in frames:
                payload = getattr(frame, "payload", None)
                if payload is None:
                    raise SystemExit("the ring is too small: records were lost")
                if frame.code in self._kinds:  # type: ignore[union-attr]
                    name = self._kinds[frame.code]  # type: ignore[union-attr]
                    self.bytes_by_kind[name] += frame_bytes(len(payload))


def quantiles_us(times_ns: array[int]) -> dict[str, float]:
    """Return median and tenth percentile of times."""
    tenth, *_, median, _, _, _, _ = statistics.quantiles(times_ns, n=10)
    return {"median": round(median / 1000, 1), "p10": round(tenth / 1000, 1)}


def private_bytes() -> int:
    """Return this process's private memory."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    return int(line.split()[1]) * 1024


def day(kind: str, *, hours: int, rate: float, seed: int) -> dict[str, Any]:
    """Serve simulated hours of requests; return memory, bytes and times."""
    clock = SimulatedClock()
    core = Probe.open(EngineInfo(0, "core"), clock=clock, engine_id=f"bounds-{kind}")
    front = Probe.open(
        EngineInfo(0, "front"), role="frontend", clock=clock, engine_id=f"bounds-{kind}"
    )
    watch = CacheWatch.open(core, block_tokens=WIDTH, num_blocks=POOL_BLOCKS)
    assert core.path is not None
    assert front.path is not None
    rings = [Counted(core.path), Counted(front.path)]
    pool = Pool(watch)
    pending: deque[tuple[int, list[bytes]]] = deque(maxlen=_NUM_PENDING)
    running: deque[tuple[int, int]] = deque()
    traffic = TRAFFIC[kind](random.Random(seed))
    num_each, gap_ns = int(3600 * rate), int(1e9 / rate)
    gc.collect()
    before = peak = private_bytes()
    by_hour: list[dict[str, Any]] = []
    num_tokens = 0
    for _ in range(hours):
        core_ns, front_ns = array("q"), array("q")
        for number in range(num_each):
            clock.now_ns += gap_ns
            asked = next(traffic)
            num_tokens += len(asked.tokens)
            keys = hashes(asked)
            index = front.received("r")
            core_index = core.queued("r", prompt_tokens=len(asked.tokens))
            start_ns = time.process_time_ns()
            front.compare_prompt(index, asked.tokens, salt=asked.salt or None)
            between_ns = time.process_time_ns()
            num_reusable = (len(asked.tokens) - 1) // WIDTH
            hit = pool.hit(keys[:num_reusable]) * WIDTH
            if watch is not None:
                watch.admitted(
                    core_index,
                    num_tokens=len(asked.tokens),
                    hit=hit,
                    keys=keys,
                    raw_keys=b"".join(keys),
                    pending=pending,
                )
            pool.put(core_index, keys)
            core_ns.append(time.process_time_ns() - between_ns)
            front_ns.append(between_ns - start_ns)
            running.append((index, core_index))
            if len(running) > _NUM_PENDING:
                ended, ended_core = running.popleft()
                core.finished(ended_core, "stop")
                front.last_byte(ended)
            pending.append((core_index, keys))
            if number % _READ_EVERY == 0:
                for ring in rings:
                    ring.read()
                peak = max(peak, private_bytes())
        by_hour.append(
            {
                "peak_mb": round((peak - before) / 1e6, 1),
                "front_us": quantiles_us(front_ns),
                "core_us": quantiles_us(core_ns),
            }
        )
    for ring in rings:
        ring.read()
    assert watch is None or watch.history is not None, "the forensics have ended"
    num_requests = hours * num_each
    bytes_by_kind: Counter[str] = Counter()
    for ring in rings:
        bytes_by_kind += ring.bytes_by_kind
    core.close()
    front.close()
    return {
        "requests": num_requests,
        "mean_prompt_tokens": round(num_tokens / num_requests, 1),
        "peak_mb": by_hour[-1]["peak_mb"],
        "ring_bytes_per_request": {
            name: round(num / num_requests, 1) for name, num in sorted(bytes_by_kind.items())
        },
        "ring_bytes_per_request_all": round(bytes_by_kind.total() / num_requests, 1),
        "ghosts": 0 if watch is None or watch.history is None else watch.history.num_ghosts,
        "by_hour": by_hour,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=int, default=24, help="simulated hours (default: 24)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: 1)")
    parser.add_argument("--kind", choices=sorted(TRAFFIC), help="one kind (default: all)")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    kinds = [args.kind] if args.kind else sorted(TRAFFIC)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "hours": args.hours,
        "rate": args.rate,
        "seed": args.seed,
    }
    for kind in kinds:
        found = apart(kind, args, hours=args.hours, mode="tokens")
        without = apart(kind, args, hours=min(args.hours, _HOURS_WITHOUT), mode="off")
        own_mb = round(found["peak_mb"] - without["peak_mb"], 1)
        result[kind] = {"own_mb": own_mb, "without_mb": without["peak_mb"], **found}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def apart(kind: str, args: argparse.Namespace, *, hours: int, mode: Mode) -> dict[str, Any]:
    """Serve one kind of traffic in a process of its own, whose memory is that kind's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_serve, kind, mode, hours, args.rate, args.seed).result()


def _serve(kind: str, mode: Mode, hours: int, rate: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        os.environ[VARIABLE] = mode
        return day(kind, hours=hours, rate=rate, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
