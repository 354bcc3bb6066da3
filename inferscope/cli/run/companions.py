"""Run of a command with a recording or a collector; without these, `run` executes the command.

Signals sent to this process are forwarded to the command. Ctrl-C on a terminal reaches every
process of the foreground group directly, so signals from the kernel are not forwarded: the command
would be interrupted twice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_BY_KERNEL = 0x80
"""`SI_KERNEL`: the code of a signal sent by the terminal."""
_POLL_S = 0.05
_GRACE_S = 15.0
_SIGNALLED = 128


def run_with_companion(
    argv: Sequence[str], environment: Mapping[str, str], on_tick: Callable[[], object]
) -> int:
    """Run a command until it exits, call `on_tick` every 50 ms, and return the exit code."""
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    try:
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ours),
        )
        try:
            while child.poll() is None:
                received = signal.sigtimedwait(_FORWARDED | {signal.SIGCHLD}, _POLL_S)
                if (
                    received is not None
                    and received.si_signo != signal.SIGCHLD
                    and received.si_code != _BY_KERNEL
                ):
                    child.send_signal(received.si_signo)
                on_tick()
        except BaseException:
            # The command must not continue without its recording.
            _end(child)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
    code = child.returncode
    return code if code >= 0 else _SIGNALLED - code


@contextmanager
def collecting() -> Iterator[None]:
    """Run `inferscope collect` in a session of its own while the context lasts."""
    collector = subprocess.Popen(
        [sys.executable, "-m", "inferscope", "collect"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        _end(collector)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
