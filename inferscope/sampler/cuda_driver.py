"""The CUDA driver library by ctypes: its presence and the devices it lists."""

from __future__ import annotations

import ctypes

from inferscope.sampler.source import Unavailable

LIBRARY = "libcuda.so.1"


def load_driver() -> ctypes.CDLL:
    """Load the driver library without calling it.

    Raises:
        Unavailable: this machine or container has none.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise Unavailable(f"no NVIDIA driver found ({LIBRARY}).") from None


class CudaDevices:
    """UUIDs of the devices in CUDA's order."""

    def __init__(self) -> None:
        """Initialise the driver without creating a context on any device.

        Raises:
            Unavailable: there is no driver, or it does not initialise.
        """
        self._library = load_driver()
        code = self._library.cuInit(0)
        if code:
            raise Unavailable(f"cuInit failed with error {code}.")

    def uuids(self) -> list[str]:
        """Return each device's UUID in NVML's format."""
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
    """Return a UUID of 16 bytes in NVML's format."""
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"
