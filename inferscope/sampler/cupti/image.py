"""The counter data image of a session, which is blank again after each decode.

It holds two seconds of windows, and a decode writes to a small part of it. Copying the blank image
back would move all of it. So the image is a private mapping of a file in memory that holds the
blank image: dropping the pages that were written restores them from the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable


class CounterDataImage:
    """An image of a fixed size at a fixed address.

    Attributes:
        size: size in bytes.
        at: address.
    """

    def __init__(self, size: int, initialize: Callable[[int], None]) -> None:
        """Map the image.

        Args:
            size: size in bytes.
            initialize: function that writes the blank image to an address.
        """
        self.size = size
        with os.fdopen(os.memfd_create("counter-data"), "r+b") as file:
            file.truncate(size)
            self._pages = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
            self.at = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
            initialize(self.at)
            file.write(self._pages)
        self.blank()

    def blank(self) -> None:
        """Restore the blank image."""
        self._pages.madvise(mmap.MADV_DONTNEED)
