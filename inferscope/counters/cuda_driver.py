"""The CUDA driver's library by ctypes: whether it is there, and which devices it shows."""

from __future__ import annotations

import ctypes

from inferscope.counters.source import Unavailable

LIBRARY = "libcuda.so.1"


def load_driver() -> ctypes.CDLL:
    """Load the driver's library, without a call into it.

    Raises:
        Unavailable: this machine or container has none.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise Unavailable(f"no NVIDIA driver is here ({LIBRARY}).") from None


class CudaDevices:
    """The devices as CUDA numbers them, by uuid."""

    def __init__(self) -> None:
        """Initialise the driver; no context is made on any device.

        Raises:
            Unavailable: there is no driver, or it refuses.
        """
        self._library = load_driver()
        code = self._library.cuInit(0)
        if code:
            raise Unavailable(f"CUDA does not begin: error {code} of cuInit.")

    def uuids(self) -> list[str]:
        """Return each device's uuid, as NVML writes it."""
        number = ctypes.c_int()
        self._library.cuDeviceGetCount(ctypes.byref(number))
        found = []
        for ordinal in range(number.value):
            device, raw = ctypes.c_int(), (ctypes.c_uint8 * 16)()
            self._library.cuDeviceGet(ctypes.byref(device), ordinal)
            self._library.cuDeviceGetUuid(ctypes.byref(raw), device)
            found.append(uuid_text(bytes(raw)))
        return found


def uuid_text(raw: bytes) -> str:
    """Return 16 bytes as NVML writes them."""
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"
