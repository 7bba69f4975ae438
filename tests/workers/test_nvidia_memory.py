"""NVIDIA's devices, as the management library or nvidia-smi lists them: both stand in for theirs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.nvidia_memory import NVML, NvidiaDevices

MIB = 1 << 20
LISTING = "0, GPU-5ad1a9d5-aaaa, 4\n1, GPU-bbbb, 1024\n2, GPU-cccc, [N/A]\n"
SMI = [sys.executable, "-c", f"print({LISTING!r}, end='')"]
NO_LIBRARY = "libno-such-library.so.1"

LIBRARY = """
#include <stdio.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static int devices[3];
int nvmlInit_v2(void) { HOW_IT_STARTS }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &devices[index];
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    return snprintf(uuid, length, "GPU-%ld", (long)((int *)device - devices)) < 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    if (device == &devices[2]) return 3;  /* NVML_ERROR_NOT_SUPPORTED */
    memory->total = 1ull << 37;
    memory->used = 5ull << 30;
    memory->free = memory->total - memory->used;
    return 0;
}
"""


def build_library(folder: Path, how_it_starts: str) -> str:
    """A library with the functions of NVIDIA's that are called; its path."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the library with")
    source = folder / "nvml.c"
    source.write_text(LIBRARY.replace("HOW_IT_STARTS", how_it_starts))
    library = folder / "libnvml.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def test_the_library_tells_number_uuid_and_bytes(tmp_path: Path) -> None:
    devices = NvidiaDevices(library=build_library(tmp_path, "return 0;"), nvidia_smi=["false"])
    for _ in range(2):
        assert [(device.names, device.used_bytes) for device in devices()] == [
            (("0", "GPU-0"), 5 << 30),
            (("1", "GPU-1"), 5 << 30),
            (("2", "GPU-2"), None),
        ]


@pytest.mark.parametrize("how_it_starts", ["return 9;", None])
def test_nvidia_smi_is_asked_where_the_library_is_not_there_or_fails(
    tmp_path: Path, how_it_starts: str | None
) -> None:
    library = NO_LIBRARY if how_it_starts is None else build_library(tmp_path, how_it_starts)
    devices = NvidiaDevices(library=library, nvidia_smi=SMI)
    assert [(device.names, device.used_bytes) for device in devices()] == [
        (("0", "GPU-5ad1a9d5-aaaa"), 4 * MIB),
        (("1", "GPU-bbbb"), 1024 * MIB),
        (("2", "GPU-cccc"), None),
    ]


def test_a_driver_that_hangs_is_asked_once_and_holds_nobody_up(tmp_path: Path) -> None:
    library = build_library(tmp_path, "sleep(3600); return 0;")
    devices = NvidiaDevices(library=library, nvidia_smi=SMI, within_s=0.3)
    assert devices() == ()
    assert devices() == ()


def test_an_nvidia_smi_that_hangs_is_left_alone() -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert NvidiaDevices(library=NO_LIBRARY, nvidia_smi=hanging, within_s=0.3)() == ()


@pytest.mark.gpu
def test_this_machines_driver_tells_of_its_devices() -> None:
    if not Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is not loaded here")
    listed = NvidiaDevices(library=NVML, nvidia_smi=["false"])()
    asked = NvidiaDevices(library=NO_LIBRARY)()
    assert listed
    assert [device.names for device in listed] == [device.names for device in asked]
    assert all(device.used_bytes is not None for device in listed)
