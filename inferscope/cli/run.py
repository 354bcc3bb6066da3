"""Run any command with the probe switched on in it and in all that it starts.

vLLM and SGLang need nothing more than inferscope installed in their environment; a plain Python
program is observed through an import hook. The command keeps its arguments, output, signals and
exit code. If its Python has no inferscope, or it is no Python program, it is not started, unless
--unobserved says that it may run without being seen.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferscope.cli.counters import add_counters_option, sample_beside
from inferscope.cli.run_beside import collecting, run_beside
from inferscope.cli.run_target import Target, Unobservable, find_target, hides_hook, shim_of
from inferscope.cli.saying import say
from inferscope.errors import BadInput
from inferscope.probe.identity import ENGINE_ID_VARIABLE
from inferscope.ring.discovery import file_name, ring_directory, sampler_rings

if TYPE_CHECKING:
    from inferscope.collector.source import RingSource

_WITH_PLUG_IN = ("vllm", "sglang")
"""Engines that load us by themselves."""
_RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_PATIENCE_S = 7.0
"""For the last records: a process that was killed is known to be gone by its silence, after 5 s."""
_POLL_S = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "inferscope run [options] -- CMD ..."
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CMD", help="what to run, after --"
    )
    beside = parser.add_argument_group("beside it")
    beside.add_argument("--record", type=Path, metavar="FILE", help="record it from start to end")
    beside.add_argument("--collect", action="store_true", help="export with `inferscope collect`")
    add_counters_option(beside)
    how = parser.add_argument_group("observing")
    how.add_argument(
        "--unobserved", action="store_true", help="run it even if it cannot be observed"
    )
    parser.epilog = """environment:
  INFERSCOPE_DIR        where rings are kept
  INFERSCOPE_RING_MB    size of each process's ring (64)
  INFERSCOPE_INJECT=0   no import hook in plain Python programs

examples:
  inferscope run -- vllm serve Qwen/Qwen3-8B
  inferscope run --record load-test.isr -- python -m sglang.launch_server --model-path MODEL
"""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    words: list[str] = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise BadInput("there is no command to run. Give one: inferscope run -- vllm serve MODEL")
    target = find_target(words, os.environ)
    engine_id = _new_engine_id(target)
    environment = {**os.environ, "INFERSCOPE": "1", ENGINE_ID_VARIABLE: engine_id}
    try:
        _prepare(target, words, environment)
    except Unobservable as error:
        if not options.unobserved:
            raise
        say(f"not observed: {error.what}. {error.fix}")
    else:
        say(f"this is engine {engine_id}; look with: inferscope attach {engine_id}")
    sample_beside(options.counters)
    if options.record is None and not options.collect:
        sys.stdout.flush()
        os.execve(target.program, words, environment)
    with collecting() if options.collect else contextlib.nullcontext():
        if options.record is None:
            return run_beside(words, environment, lambda: None)
        return _run_recorded(words, environment, engine_id, options.record)


def _new_engine_id(target: Target) -> str:
    name = file_name(Path(target.program).name)
    return f"{name}-{os.getpid()}-{secrets.token_hex(2)}"


def _prepare(target: Target, words: Sequence[str], environment: dict[str, str]) -> None:
    """Make the environment one in which the command is observed.

    Raises:
        Unobservable: It will not be.
    """
    if target.interpreter is None:
        raise Unobservable(
            f"{target.program} is not a Python program, so it cannot be observed",
            "Give the Python command that it starts.",
        )
    shim = shim_of(target, environment)
    engine = _engine(target, words)
    _check_plug_ins(engine, environment)
    _check_ray(engine, words, environment)
    if engine is None and environment.get("INFERSCOPE_INJECT") != "0":
        hidden = hides_hook(target.flags)
        if hidden is not None:
            flag, what = hidden
            raise Unobservable(
                f"with {flag} the command's Python {what}, so the import hook is not loaded",
                f"{target.without([flag])}, or set INFERSCOPE_INJECT=0 if the program itself calls "
                "inferscope.observe",
            )
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([shim, before] if before else [shim])


def _engine(target: Target, words: Sequence[str]) -> str | None:
    """Return the engine with a plug-in group that a command names."""
    names = [Path(target.program).name]
    if target.program == target.interpreter:
        names.append((target.module or "").split(".")[0])
    elif "-m" in words[1:-1]:
        names.append(words[words.index("-m") + 1].split(".")[0])
    return next((name for name in names if name in _WITH_PLUG_IN), None)


def _check_plug_ins(engine: str | None, environment: Mapping[str, str]) -> None:
    """See that a list of an engine's plug-ins does not leave ours out.

    Raises:
        Unobservable: It does, and the command is that engine's.
    """
    vllm, sglang = environment.get("VLLM_PLUGINS"), environment.get("SGLANG_PLUGINS")
    if vllm is not None:  # an empty one lists nothing
        _check_list("VLLM_PLUGINS", vllm.split(","), of="vLLM", is_run=engine == "vllm")
    if sglang:  # an empty one is none
        names = [name.strip() for name in sglang.split(",")]
        _check_list("SGLANG_PLUGINS", names, of="SGLang", is_run=engine == "sglang")


def _check_list(variable: str, names: list[str], *, of: str, is_run: bool) -> None:
    if "inferscope" in names:
        return
    what = f"{variable}={','.join(names)} leaves InferScope out of {of}"
    fix = f"Set {variable}={','.join([*filter(None, names), 'inferscope'])}"
    if is_run:
        raise Unobservable(what, fix)
    say(f"{what}. {fix}")


def _check_ray(engine: str | None, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Say which variables Ray must be told to hand to vLLM's remote workers."""
    text = " ".join(words)
    if engine != "vllm" or not (
        "--distributed-executor-backend ray" in text or "--distributed-executor-backend=ray" in text
    ):
        return
    prefixes = environment.get("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "").split(",")
    if any(prefix and "INFERSCOPE".startswith(prefix) for prefix in prefixes):
        return
    copied = [name for name in environment.get(_RAY_VARIABLE, "").split(",") if name]
    ours = [name for name in environment if name.startswith("INFERSCOPE")]
    wanted = copied + sorted(set(ours) - set(copied))
    if wanted != copied:
        say(
            "Ray hands our variables to its workers only if told to, and their steps are not seen "
            f"otherwise. Set {_RAY_VARIABLE}={','.join(wanted)}"
        )


def _run_recorded(
    words: Sequence[str], environment: Mapping[str, str], engine_id: str, file: Path
) -> int:
    """Run the command and record it, to its last record."""
    from inferscope.collector.source import RingSource
    from inferscope.ring.recording import RecordingWriter

    folder = ring_directory() / file_name(engine_id)
    source = RingSource(
        lambda: [
            *folder.glob("*.ring"),
            *_further_models(folder),
            *sampler_rings(folder.parent),
        ],
        name=engine_id,
        recording=RecordingWriter(file),
    )

    recording = _Recording(source)
    try:
        code = run_beside(words, environment, recording.advance)
        until = time.monotonic() + _PATIENCE_S
        recording.advance()
        while recording.is_open and folder.is_dir() and not source.has_ended:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
            recording.advance()
    finally:
        recording.close()
    totals = source.collector.totals()
    if recording.has_failed:
        return code
    if totals.num_records:
        say(f"{file}: {totals.num_records} records, {totals.num_lost} lost")
    else:
        say(f"{file} is empty: no process of the command opened a ring")
    return code


class _Recording:
    """The recording beside a command. A failure ends the recording, never the command.

    Attributes:
        is_open: it is still being written.
        has_failed: it was given up before its end.
    """

    def __init__(self, source: RingSource) -> None:
        self._source = source
        self.is_open = True
        self.has_failed = False

    def advance(self) -> None:
        """Record what has become due."""
        if not self.is_open:
            return
        try:
            # Every time: what a process says before its ring is found would be late.
            self._source.request_rescan()
            self._source.advance()
        except Exception as error:
            self._fail(error)
            self.close()

    def close(self) -> None:
        """Finish the file; safe to call twice."""
        self.is_open = False
        try:
            self._source.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.has_failed:
            self.has_failed = True
            say(f"the recording ended early: {error} The command goes on.")


def _further_models(home: Path) -> list[Path]:
    """Return the rings of the second and later models of an engine's process.

    They are engines of their own, `ID-2` and so on, beside the folder `home` of the first.
    """
    beside = home.parent.glob(f"{glob.escape(home.name)}-*/*.ring")
    start = len(home.name) + 1
    return sorted(path for path in beside if path.parent.name[start:].isdecimal())
