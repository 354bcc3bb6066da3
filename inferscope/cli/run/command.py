"""Run a command with the probe switched on in it and in all processes that it starts.

vLLM and SGLang load the probe as a plug-in if inferscope is installed in their environment; other
Python programs load it through an import hook. The command keeps its arguments, output, signals and
exit code. If the command is not a Python program, or its Python has no inferscope, it does not
start, unless --unobserved is given.
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

from inferscope.cli.counters import add_counters_option, start_sampler
from inferscope.cli.run.companions import collecting, run_with_companion
from inferscope.cli.run.target import Target, Unobservable, find_target, hides_hook, shim_of
from inferscope.cli.status_line import write_status
from inferscope.errors import BadInput
from inferscope.probe import ENGINE_ID_VARIABLE
from inferscope.ring import file_name, ring_directory, sampler_rings

if TYPE_CHECKING:
    from inferscope.readers import RingSource

_WITH_PLUG_IN = ("vllm", "sglang")
"""Engines that load InferScope as a plug-in."""
_RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_PATIENCE_S = 7.0
"""Maximum wait for the last records: a killed process counts as lost after 5 s of silence."""
_POLL_S = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "inferscope run [options] -- CMD ..."
    parser.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="CMD", help="command to run, after --"
    )
    companions = parser.add_argument_group("recording and export")
    companions.add_argument(
        "--record", type=Path, metavar="FILE", help="record the command from start to end"
    )
    companions.add_argument(
        "--collect", action="store_true", help="run `inferscope collect` while the command runs"
    )
    add_counters_option(companions)
    how = parser.add_argument_group("observing")
    how.add_argument(
        "--unobserved", action="store_true", help="run the command even if it cannot be observed"
    )
    parser.epilog = """environment:
  INFERSCOPE_DIR        folder of the rings
  INFERSCOPE_RING_MB    size of each process's ring in MB (default: 64)
  INFERSCOPE_INJECT=0   disables the import hook in plain Python programs

examples:
  inferscope run -- vllm serve Qwen/Qwen3-8B
  inferscope run --record load-test.isr -- python -m sglang.launch_server --model-path MODEL
"""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    argv: list[str] = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise BadInput("there is no command to run. Give one: inferscope run -- vllm serve MODEL")
    target = find_target(argv, os.environ)
    engine_id = _new_engine_id(target)
    environment = {**os.environ, "INFERSCOPE": "1", ENGINE_ID_VARIABLE: engine_id}
    try:
        _prepare(target, argv, environment)
    except Unobservable as error:
        if not options.unobserved:
            raise
        write_status(f"not observed: {error.problem}. {error.fix}")
    else:
        write_status(f"engine ID {engine_id}; watch it with: inferscope attach {engine_id}")
    start_sampler(options.counters)
    if options.record is None and not options.collect:
        sys.stdout.flush()
        os.execve(target.program, argv, environment)
    with collecting() if options.collect else contextlib.nullcontext():
        if options.record is None:
            return run_with_companion(argv, environment, lambda: None)
        return _run_recorded(argv, environment, engine_id, options.record)


def _new_engine_id(target: Target) -> str:
    name = file_name(Path(target.program).name)
    return f"{name}-{os.getpid()}-{secrets.token_hex(2)}"


def _prepare(target: Target, argv: Sequence[str], environment: dict[str, str]) -> None:
    """Set the variables in the environment that make the command observed.

    Raises:
        Unobservable: the command cannot be observed.
    """
    if target.interpreter is None:
        raise Unobservable(
            f"{target.program} is not a Python program, so it cannot be observed",
            "Give the Python command that it starts.",
        )
    shim = shim_of(target, environment)
    engine = _engine(target, argv)
    _check_plug_ins(engine, environment)
    _check_ray(engine, argv, environment)
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


def _engine(target: Target, argv: Sequence[str]) -> str | None:
    """Return the engine with a plug-in group that a command runs; None for other commands."""
    names = [Path(target.program).name]
    if target.program == target.interpreter:
        names.append((target.module or "").split(".")[0])
    elif "-m" in argv[1:-1]:
        names.append(argv[argv.index("-m") + 1].split(".")[0])
    return next((name for name in names if name in _WITH_PLUG_IN), None)


def _check_plug_ins(engine: str | None, environment: Mapping[str, str]) -> None:
    """Check that an engine's list of plug-ins includes InferScope.

    Raises:
        Unobservable: the list does not, and the command runs that engine.
    """
    vllm, sglang = environment.get("VLLM_PLUGINS"), environment.get("SGLANG_PLUGINS")
    if vllm is not None:  # an empty list disables all plug-ins
        _check_list("VLLM_PLUGINS", vllm.split(","), of="vLLM", is_run=engine == "vllm")
    if sglang:  # an empty list counts as no list
        names = [name.strip() for name in sglang.split(",")]
        _check_list("SGLANG_PLUGINS", names, of="SGLang", is_run=engine == "sglang")


def _check_list(variable: str, names: list[str], *, of: str, is_run: bool) -> None:
    if "inferscope" in names:
        return
    what = f"{variable}={','.join(names)} leaves InferScope out of {of}"
    fix = f"Set {variable}={','.join([*filter(None, names), 'inferscope'])}"
    if is_run:
        raise Unobservable(what, fix)
    write_status(f"{what}. {fix}")


def _check_ray(engine: str | None, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print which variables Ray has to copy to vLLM's remote workers, if it does not copy them."""
    text = " ".join(argv)
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
        write_status(
            "Ray copies InferScope's variables to its workers only on request; without them the "
            f"workers are not observed. Set {_RAY_VARIABLE}={','.join(wanted)}"
        )


def _run_recorded(
    argv: Sequence[str], environment: Mapping[str, str], engine_id: str, file: Path
) -> int:
    """Run the command and record it up to its last record."""
    from inferscope.readers import RingSource
    from inferscope.ring import RecordingWriter

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
        code = run_with_companion(argv, environment, recording.advance)
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
        write_status(f"{file}: {totals.num_records} records, {totals.num_lost} lost")
    else:
        write_status(f"{file} is empty: no process of the command opened a ring")
    return code


class _Recording:
    """Recording of a running command; a failure ends the recording, never the command.

    Attributes:
        is_open: whether the recording is still written.
        has_failed: whether an error ended the recording early.
    """

    def __init__(self, source: RingSource) -> None:
        self._source = source
        self.is_open = True
        self.has_failed = False

    def advance(self) -> None:
        """Record the records written since the last call."""
        if not self.is_open:
            return
        try:
            # On every call: records written before a ring is found would arrive late.
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
            write_status(f"the recording ended early: {error} The command continues.")


def _further_models(home: Path) -> list[Path]:
    """Return the rings of the second and later models of an engine's process.

    They are separate engines, `ID-2` and so on, in folders next to the first one's, `home`.
    """
    siblings = home.parent.glob(f"{glob.escape(home.name)}-*/*.ring")
    start = len(home.name) + 1
    return sorted(path for path in siblings if path.parent.name[start:].isdecimal())
