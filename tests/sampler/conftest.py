from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from tests.sampler.recorded_nvml import H200, RecordedLibrary, Recording

Play = Callable[..., Recording]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Put a recording where the binding keeps the driver's library."""

    def begin(recording: Recording | None = None) -> Recording:
        recording = recording or Recording.of(H200)
        monkeypatch.setattr(pynvml, "nvmlLib", RecordedLibrary(recording))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return recording

    return begin
