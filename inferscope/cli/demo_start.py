"""Starts the demo's engine process: loads what it needs, or says what is missing."""

from __future__ import annotations

import sys

import msgspec

from inferscope.cli.demo_link import Refused


def main() -> int:
    """Run the engine's process; return its exit code."""
    try:
        from inferscope.cli import demo_host
    except ModuleNotFoundError as error:
        message = f'the demo needs {error.name}. Install it with: pip install "inferscope[engine]"'
        sys.stdout.buffer.write(msgspec.json.encode(Refused(message, 1)) + b"\n")
        return 1
    return demo_host.main()


if __name__ == "__main__":
    sys.exit(main())
