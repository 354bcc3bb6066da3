"""Entry point of `python -m inferscope`, the same as the command `inferscope`."""

import sys

from inferscope.cli.main import main

sys.exit(main())
