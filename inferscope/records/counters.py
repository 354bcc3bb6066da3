"""Counters of devices, hosts and processes, and the names of drivers' codes."""

from __future__ import annotations

SAMPLER_ROLE = "sampler"
"""Role of a ring of device counters, which belongs to no engine."""

COUNTERS: dict[str, str] = {
    "busy_share": "of the window, with any kernel or copy on the device",
    "sm_active_share": "of the window, mean over the SMs, with a warp resident",
    "sm_occupancy_share": "of the warps that could be resident, mean over window and SMs",
    "tensor_share": "of the tensor pipes' cycles",
    "dram_share": "of the device memory's peak rate",
    "dram_peak_bytes_per_s": "that this share is of",
    "dram_read_bytes": "amount",
    "dram_write_bytes": "amount",
    "l2_sectors": "amount: sectors of 32 bytes that the L2 cache looked up",
    "pcie_read_bytes": "amount, as the device counts them",
    "pcie_write_bytes": "amount, as the device counts them",
    "nvlink_receive_bytes": "amount",
    "nvlink_send_bytes": "amount",
    "copy_share": "of the window, with the memory interface busy (NVML's memory utilisation)",
    "energy_uj": "amount",
    "power_w": "of the whole board, as the driver averages it",
    "power_limit_w": "that the driver holds the board to",
    "sm_clock_mhz": "at the end of the window",
    "memory_clock_mhz": "at the end of the window",
    "gpc_clock_mhz": "mean over the window, of the clock that the SMs run by",
    "sys_clock_mhz": "mean over the window, of the device's system clock",
    "dram_clock_mhz": "mean over the window, of the memory's clock",
    "temperature_c": "at the end of the window",
    "throttle_bits": "why clocks are held down: the driver's bits, `THROTTLES`",
    "xid": "the driver's code for an error of the device within the window",
    "memory_used_bytes": "level",
    "memory_total_bytes": "level",
    "num_processes": "that hold a context on the device",
    "num_foreign": "of them, that belong to no engine seen here",
    "foreign_memory_bytes": "that those hold",
    "foreign_busy_share": "of the window, with kernels of those",
    "pid": "the process that the sample is of, in the sampler's namespace",
    "cpu_ns": "amount: of processor time, over all threads of the process",
    "run_wait_ns": "amount: busy threads of the process ready to run, waiting for a CPU, summed",
    "quota_ns": "amount: the process's control group held back by its CPU quota",
    "host_busy_ns": "amount: CPU time in use, over all CPUs of the host",
    "steal_ns": "amount: CPU time that the hypervisor gave to other machines, over all CPUs",
    "num_cpus": "of the host",
    "rss_bytes": "level: resident memory of the process",
    "num_threads": "level",
    "num_dropped": "amount: windows that the source lost",
}
"""Counters of a sample. Shares are 0..1 of the window; amounts add up over windows."""

AMOUNTS = frozenset(
    (
        "dram_read_bytes", "dram_write_bytes", "l2_sectors", "pcie_read_bytes", "pcie_write_bytes",
        "nvlink_receive_bytes", "nvlink_send_bytes", "energy_uj", "cpu_ns", "run_wait_ns",
        "quota_ns", "host_busy_ns", "steal_ns", "num_dropped",
    )
)  # fmt: skip

THROTTLES: dict[int, str] = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""NVML's clocks event reasons, by bit."""
IDLE_CLOCKS = 0x1
"""Throttle bit of an idle device, which slows no work down."""

XIDS: dict[int, str] = {
    13: "graphics_exception",
    31: "memory_page_fault",
    43: "stopped_processing",
    45: "preemptive_cleanup",
    48: "double_bit_ecc",
    61: "microcontroller_breakpoint",
    62: "microcontroller_halt",
    63: "row_remapping",
    64: "row_remapping_failure",
    69: "graphics_class_error",
    74: "nvlink",
    79: "fallen_off_the_bus",
    92: "high_single_bit_ecc",
    94: "contained_ecc",
    95: "uncontained_ecc",
    119: "gsp_timeout",
    120: "gsp_error",
}
"""Names of the Xid error codes that matter for serving; the driver has others.

https://docs.nvidia.com/deploy/xid-errors/
"""


def xid_word(code: int) -> str:
    """Return the name of an Xid error, `xid_N` if it has none here."""
    return XIDS.get(code, f"xid_{code}")


def throttle_words(bits: int) -> list[str]:
    """Return the throttle reasons in a driver's bits, `bit_N` for unnamed ones."""
    held = bits & ~IDLE_CLOCKS
    places = [1 << at for at in range(held.bit_length()) if held >> at & 1]
    return [THROTTLES.get(bit, f"bit_{bit.bit_length() - 1}") for bit in places]


def plain_uuid(device_uuid: str) -> str:
    """Return a device's UUID without its vendor's prefix, as torch but not NVML writes it."""
    return device_uuid.removeprefix("GPU-").lower()


_UUID_CHARS, _UUID_DASHES = 36, 4


def driver_uuid(device_uuid: str) -> str:
    """Return a GPU's UUID in the form of its driver and of dcgm-exporter."""
    is_bare = len(device_uuid) == _UUID_CHARS and device_uuid.count("-") == _UUID_DASHES
    return f"GPU-{device_uuid.lower()}" if is_bare else device_uuid
