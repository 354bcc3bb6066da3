"""Our structures against NVIDIA's own headers, of every release that is on this machine."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from inferscope.sampler.cupti import layout
from tests.sampler.cupti_releases import Release, compile_with, each_release

ENUMS = {
    "PROFILER_TYPE_PM_SAMPLING": "CUPTI_PROFILER_TYPE_PM_SAMPLING",
    "TRIGGER_SYSCLK": "CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_SYSCLK_INTERVAL",
    "TRIGGER_TIME": "CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL",
    "KEEP_LATEST": "CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_LATEST",
    "STOPPED_FULL": "CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL",
    "SUCCESS": "CUPTI_SUCCESS",
    "ERROR_INVALID_PARAMETER": "CUPTI_ERROR_INVALID_PARAMETER",
    "ERROR_INVALID_OPERATION": "CUPTI_ERROR_INVALID_OPERATION",
    "ERROR_OUT_OF_MEMORY": "CUPTI_ERROR_OUT_OF_MEMORY",
    "ERROR_HARDWARE": "CUPTI_ERROR_HARDWARE",
    "ERROR_MAX_LIMIT_REACHED": "CUPTI_ERROR_MAX_LIMIT_REACHED",
    "ERROR_NOT_READY": "CUPTI_ERROR_NOT_READY",
    "ERROR_HARDWARE_BUSY": "CUPTI_ERROR_HARDWARE_BUSY",
    "ERROR_NOT_SUPPORTED": "CUPTI_ERROR_NOT_SUPPORTED",
    "ERROR_VIRTUALIZED_NOT_SUPPORTED": "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED",
    "ERROR_INSUFFICIENT_PRIVILEGES": "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
    "ERROR_MULTIPLE_SUBSCRIBERS": "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    "ERROR_VIRTUALIZED_PRIVILEGES": "CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES",
    "ERROR_CONFIDENTIAL_COMPUTING": "CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED",
    "ERROR_MIG_NOT_SUPPORTED": "CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED",
    "ERROR_WSL_NOT_SUPPORTED": "CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED",
    "ERROR_UNKNOWN": "CUPTI_ERROR_UNKNOWN",
}
HEADERS = (
    "cuda", "cupti_result", "cupti_target", "cupti_profiler_target", "cupti_profiler_host",
)  # fmt: skip
SINGLE_PASS_SETS = 130_200
"""The release that brought them, and with them a longer structure."""


def kinds(version: int) -> list[type[layout.Params]]:
    """Return the structures that are used with a release."""
    host = layout.host_initialize(has_single_pass_sets=version >= SINGLE_PASS_SETS)
    found = [
        kind
        for kind in vars(layout).values()
        if isinstance(kind, type) and issubclass(kind, layout.Params) and kind is not layout.Params
    ]
    return [kind for kind in found if kind.C_NAME != host.C_NAME or kind is host]


def program(version: int) -> str:
    """Return C++ that prints sizes, fields and values as the headers have them."""
    lines = [f"#include <{name}.h>" for name in (*HEADERS, "cupti_pmsampling")]
    lines = [
        "#include <cstddef>",
        "#include <cstdio>",
        "#include <cstdlib>",
        *lines,
        "int main() {",
    ]
    for kind in kinds(version):
        name = kind.C_NAME
        lines.append(f'printf("{name} %zu %zu\\n", (size_t){name}_STRUCT_SIZE, sizeof({name}));')
        for field, *_ in kind._fields_:
            at, size = f"offsetof({name}, {field})", f"sizeof((({name}*)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {at}, {size});')
    lines += [f'printf("{ours} %d\\n", (int){theirs});' for ours, theirs in ENUMS.items()]
    return "\n".join([*lines, "return 0;", "}", ""])


def ours(version: int) -> list[str]:
    """Return the same lines from our structures."""
    lines = []
    for kind in kinds(version):
        lines.append(f"{kind.C_NAME} {layout.struct_size(kind)} {ctypes.sizeof(kind)}")
        for field, *_ in kind._fields_:
            place = getattr(kind, field)
            lines.append(f"{kind.C_NAME}.{field} {place.offset} {place.size}")
    return lines + [f"{name} {getattr(layout, name)}" for name in ENUMS]


def test_every_error_and_mode_that_we_name_is_compared() -> None:
    numbers = {name for name, value in vars(layout).items() if name.isupper() and value is not None}
    assert {name for name in numbers if isinstance(getattr(layout, name), int)} == ENUMS.keys()


@each_release()
def test_structures_and_values_are_those_of_the_headers(release: Release, tmp_path: Path) -> None:
    source = tmp_path / "layout.cpp"
    source.write_text(program(release.version))
    binary = compile_with(release, source, out=tmp_path / "layout")
    output = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ours(release.version)


@each_release(oldest=0)
def test_a_release_below_the_floor_has_no_buffer_that_keeps_the_latest(release: Release) -> None:
    header = (release.include / "cupti_pmsampling.h").read_text(encoding="utf-8")
    assert ("hwBufferAppendMode" in header) is (release.version > 24)
