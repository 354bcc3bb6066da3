"""The GPU evidence kit: what only a GPU can answer, in one command of under ten minutes.

Every part is a process of its own with a time limit, so that one that fails or hangs loses nothing
of the others, nor the rows that it had before. No network, no installation: what is needed is in
README.md.

    python benchmarks/gpu/run.py --out evidence
    python benchmarks/gpu/run.py --out evidence --parts d,e --model random:llama-1b
    python benchmarks/gpu/run.py --out dry --dry-run              what of it runs without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Part(NamedTuple):
    """A part of the kit.

    Attributes:
        program: beside this one.
        seconds: that it is asked to take.
        limit_s: after which it is ended: loading and looking included.
    """

    program: str
    seconds: int
    limit_s: int


PARTS = {
    "a": Part("a_sampling.py", 50, 100),
    "b": Part("b_events.py", 20, 40),
    "c": Part("c_bytes.py", 40, 126),
    "d": Part("d_probe.py", 32, 48),
    "e": Part("e_engine.py", 25, 48),
    "f": Part("f_ablation.py", 36, 46),
    "g": Part("g_gpm.py", 18, 40),
    "h": Part("h_quantized.py", 20, 48),
}
WARM = Part("warm.py", 20, 40)
"""Before the parts: it reads what they will load."""
_DRY_LIMIT_S = 100
_DONE = ("measured", "dry", "unmet", "failed")
"""Results of a part that came to its end."""
PROFILERS = ("nv-hostengine", "dcgm-exporter", "ncu", "nsys", "nvidia-cuda-mps")
"""What `inferscope sampler --pm-despite` knows, which is not to be imported from here."""
_ENDING = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 2.0))
"""How a part is ended, and for how long that is waited for, in seconds."""


def main() -> int:
    """Run the parts, print a table, write JSON; 1 if any part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of a to h (%(default)s)")
    parser.add_argument("--model", default="random:llama-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--pm-despite", action="append", choices=PROFILERS, default=[], metavar="NAME",
        help="a program that holds no counters now, though PM sampling is refused because it could "
        f"({', '.join(PROFILERS)}); once per program",
    )  # fmt: skip
    options = parser.parse_args()
    names = options.parts.split(",")
    unknown = set(names) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: give some of a to h")
    options.out.mkdir(parents=True, exist_ok=True)
    results, table = dict[str, dict[str, Any]](), ""
    print(f"== {WARM.program}, kernel {platform.release()}", flush=True)
    warmed = warm()
    print(f"   {warmed['ended']}, {warmed['took_s']:.0f} s", flush=True)
    for name in names:
        print(f"== ({name}) {PARTS[name].program}", flush=True)
        results[name] = run(name, options)
        table = write(options.out, results, warmed)
        print(f"   {results[name]['status']}, {results[name].get('took_s', 0):.0f} s", flush=True)
    print(f"\n{table}", end="")
    return int(any(result["status"] == "failed" for result in results.values()))


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part to its end or its limit; return what it left."""
    part = PARTS[name]
    left = options.out / f"{part.program.removesuffix('.py')}.json"
    left.unlink(missing_ok=True)
    command = [
        sys.executable, str(HERE / part.program), "--out", str(left), "--model", options.model,
        "--seconds", str(part.seconds), "--device", "cpu" if options.dry_run else options.device,
    ]  # fmt: skip
    for despite in options.pm_despite:
        command += ["--pm-despite", despite]
    if options.dry_run:
        command.append("--dry-run")
    if not options.dry_run:
        return outcome(left, *ran(command, part.limit_s))
    # Threads of a tiny model spin for each other on a machine that has other work.
    return outcome(left, *ran(command, _DRY_LIMIT_S, OMP_NUM_THREADS="1"))


def warm() -> dict[str, Any]:
    """Read what the parts will load; return how that ended and how long it took."""
    ended, took_s = ran([sys.executable, str(HERE / WARM.program)], WARM.limit_s)
    return {"ended": ended, "took_s": round(took_s, 1)}


def ran(command: list[str], limit_s: float, **variables: str) -> tuple[str, float]:
    """Run a program to its end or its limit; return how it ended, and the seconds it took."""
    paths = [str(ROOT), str(ROOT / "exporters"), str(HERE), str(HERE.parent)]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(paths + ([inherited] if inherited else []))
    began_s = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **variables, "PYTHONPATH": path}, start_new_session=True
    )
    is_late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        end(process)
    ended = f"not done in {limit_s} s" if is_late else f"ended with {process.returncode}"
    return ended, time.monotonic() - began_s


def outcome(left: Path, ended: str, took_s: float) -> dict[str, Any]:
    """Take over what a part left: all of it, or the rows that it had when it ended."""
    try:
        result: dict[str, Any] = json.loads(left.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"status": "failed", "reason": f"{ended} and left no result", "took_s": took_s}
    finally:
        left.unlink(missing_ok=True)
    if result.get("status") in _DONE:
        return result
    reason = f"{ended}; the rows before that stand"
    return {**result, "status": "failed", "reason": reason, "took_s": took_s}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process group, gently first: what is left of it would hold the device."""
    for number, wait_s in _ENDING:
        until_s = time.monotonic() + wait_s
        is_there = reached(process.pid, number)
        while is_there and time.monotonic() < until_s:
            process.poll()
            time.sleep(0.05)
            is_there = reached(process.pid, 0)
        if not is_there:
            break
    process.wait()


def reached(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def write(folder: Path, results: dict[str, dict[str, Any]], warmed: dict[str, Any]) -> str:
    """Write what there is so far: a kit that is ended early leaves the parts before.

    Returns:
        the table.
    """
    content = {
        "real_s": int(time.time()),
        "python": sys.version.split()[0],
        "uname_r": platform.release(),
        "warm": warmed,
        "parts": results,
    }
    text = json.dumps(content, indent=1) + "\n"
    (folder / "evidence.json").write_text(text, encoding="utf-8")
    table = "\n".join(table_of(results)) + "\n"
    (folder / "evidence.txt").write_text(table, encoding="utf-8")
    return table


def table_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the results as lines."""
    lines = []
    for name, result in results.items():
        lines.append(f"({name}) {result['status']}: {result.get('reason', '')}".rstrip(": "))
        lines += [f"    {line}" for line in result.get("lines", ())]
    return lines


if __name__ == "__main__":
    sys.exit(main())
