"""Entry point of the demo's engine process: imports its modules, or reports a missing one."""

from __future__ import annotations

import sys

from inferscope.engine import imports_that_stay
from inferscope.engine.server import Failed, send_to_parent


def main() -> int:
    """Run the engine's process and return its exit code."""
    try:
        with imports_that_stay():
            from inferscope.cli.demo import host as demo_host
    except ModuleNotFoundError as error:
        message = (
            f'the demo needs {error.name}. Install it with: pip install "inferscope-llm[engine]"'
        )
        send_to_parent(Failed(message, 1))
        return 1
    return demo_host.main()


if __name__ == "__main__":
    sys.exit(main())
