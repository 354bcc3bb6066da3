"""A KeyboardInterrupt at each line of some functions, one at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Interrupts:
    """Interrupts calls, each at the next line where none was interrupted before.

    Attributes:
        places: the lines so far, by file and number, in order.
    """

    def __init__(self, is_ours: Callable[[CodeType], bool]) -> None:
        """Interrupt only in the functions of which `is_ours` holds."""
        self.places: dict[tuple[str, int], None] = {}
        self._is_ours = is_ours

    def stop(self, call: Callable[[], object]) -> bool:
        """Make a call, and return whether it was interrupted: not once no line is left."""
        before = sys.gettrace()  # that of a coverage run
        sys.settrace(self._calls)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _calls(self, frame: FrameType, *_: Any) -> Any:
        return self._lines if self._is_ours(frame.f_code) else None

    def _lines(self, frame: FrameType, event: str, _: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in self.places:
            self.places[place] = None
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._lines
