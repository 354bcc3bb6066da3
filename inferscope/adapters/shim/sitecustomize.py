"""The shim: all that `inferscope run` puts on a program's PYTHONPATH.

Python imports `sitecustomize` before the program begins. This one runs the one that it hides, if
there is one, and then has inferscope wait for the engines that it knows. A program whose
environment has no inferscope runs as if none of this were here.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    """Run the `sitecustomize` that would have been found without us; its errors are its own."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is None or spec.loader is None:
        return
    module = sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(module)


try:
    _run_the_next()
finally:
    if os.environ.get("INFERSCOPE") == "1" and os.environ.get("INFERSCOPE_INJECT") != "0":
        try:
            from inferscope.adapters import inject
        except ImportError:
            pass
        else:
            inject.install()
