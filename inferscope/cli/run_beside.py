"""Running a command while something goes on beside it; where nothing does, `run` becomes it.

Signals meant for the command come to us and are passed on. Ctrl-C on a terminal reaches every
process of the foreground group by itself: the kernel's own signals are not passed on, else the
command would be interrupted twice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

_PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_BY_KERNEL = 0x80
"""`SI_KERNEL`, the code of a signal that the terminal sent."""
_TURN_S = 0.05
_GRACE_S = 15.0
_SIGNALLED = 128


def run_beside(
    words: Sequence[str], environment: Mapping[str, str], tend: Callable[[], object]
) -> int:
    """Run a command to its end, calling `tend` some twenty times a second; return its exit code."""
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        child = subprocess.Popen(
            words,
            env=dict(environment),
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ours),
        )
        try:
            while child.poll() is None:
                came = signal.sigtimedwait(_PASSED_ON | {signal.SIGCHLD}, _TURN_S)
                if (
                    came is not None
                    and came.si_signo != signal.SIGCHLD
                    and came.si_code != _BY_KERNEL
                ):
                    child.send_signal(came.si_signo)
                tend()
        except BaseException:
            # We cannot go on: the command must not go on unseen.
            _end(child)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
    code = child.returncode
    return code if code >= 0 else _SIGNALLED - code


@contextmanager
def collecting() -> Iterator[None]:
    """Run `inferscope collect` for as long as the context lasts, in a session of its own."""
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
