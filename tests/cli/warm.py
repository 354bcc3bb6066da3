"""An interpreter that has imported the commands, and runs each in a fork of itself.

A third of a second of imports is half of what a command on a recording takes. A fork is a process
as any other: its arguments, environment, output, signals and exit code are its own.

A line of JSON on standard input asks for a command; its exit code is the answer, a line too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

from inferscope.cli.main import main

PRELOADED = (
    *(
        f"inferscope.cli.{command}"
        for command in (
            *("attach.command", "attach.page", "collect", "doctor.command", "export", "findings"),
            *("load.command", "replay", "run.command", "sampler", "shares", "slo.command"),
            *("slo.check", "slo.rules", "switch", "why", "help", "version"),
        )
    ),
    "inferscope.text.once",
    "inferscope.text.page.lines",
    "inferscope_jsonl",
)


def become(asked: dict[str, Any]) -> None:
    """Make a fork the process that is asked for."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    for number, path in ((1, asked["out"]), (2, asked["err"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv[1:] = asked["words"]


def run() -> int:
    """Run the command, and return its exit code with all said that is to be said.

    A fork that takes down all that it has not loaded itself takes longer than most commands.
    """
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve() -> int:
    """Serve until standard input ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a fork copies no page of theirs to look through it
    for line in sys.stdin:
        asked = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy has threads, which a fork need not have
            pid = os.fork()
        if not pid:
            become(asked)
            os._exit(run())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    return 0


sys.exit(serve())
