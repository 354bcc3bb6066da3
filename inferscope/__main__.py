"""`python -m inferscope` is `inferscope`."""

import sys

from inferscope.cli.main import main

sys.exit(main())
