"""NVIDIA's devices, listed by stand-ins for the management library and for nvidia-smi."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.ranks.memory_watch import NvidiaDevices

MIB = 1 << 20
LISTING = "0, GPU-5ad1a9d5-aaaa, 4\n1, GPU-bbbb, 1024\n2, GPU-cccc, [N/A]\n"
SMI = [sys.executable, "-c", f"print({LISTING!r}, end='')"]


class FakeNvml:
    """The functions of the management library that are called, with three devices."""

    class NVMLError(Exception):
        """Raised by every function that fails."""

    def __init__(self, init: Callable[[], object] = lambda: None) -> None:
        self.nvmlInit = init

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle == 2:
            raise self.NVMLError("not supported")
        return SimpleNamespace(used=5 << 30)


def fail() -> None:
    raise FakeNvml.NVMLError("the library was not found")


def test_the_library_tells_number_uuid_and_bytes() -> None:
    devices = NvidiaDevices(nvml=FakeNvml(), nvidia_smi=["false"])
    for _ in range(2):
        assert [(device.names, device.used_bytes) for device in devices()] == [
            (("0", "GPU-0"), 5 << 30),
            (("1", "GPU-1"), 5 << 30),
            (("2", "GPU-2"), None),
        ]


def test_nvidia_smi_is_asked_where_the_library_is_not_there_or_fails() -> None:
    devices = NvidiaDevices(nvml=FakeNvml(fail), nvidia_smi=SMI)
    assert [(device.names, device.used_bytes) for device in devices()] == [
        (("0", "GPU-5ad1a9d5-aaaa"), 4 * MIB),
        (("1", "GPU-bbbb"), 1024 * MIB),
        (("2", "GPU-cccc"), None),
    ]


def test_nvidia_smi_is_asked_where_there_are_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert len(NvidiaDevices(nvidia_smi=SMI)()) == 3


def test_without_a_driver_the_bindings_list_nothing() -> None:
    pytest.importorskip("pynvml")
    if Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is loaded here")
    assert NvidiaDevices(nvidia_smi=["false"])() == ()


def test_a_driver_that_hangs_is_asked_once_and_holds_nobody_up() -> None:
    calls: list[str] = []
    release = threading.Event()

    def hang() -> None:
        calls.append("nvmlInit")
        release.wait()

    devices = NvidiaDevices(nvml=FakeNvml(hang), nvidia_smi=SMI, within_s=0.3)
    try:
        assert devices() == ()
        assert devices() == ()
        assert calls == ["nvmlInit"]
    finally:
        release.set()


def test_an_nvidia_smi_that_hangs_is_left_alone() -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert NvidiaDevices(nvml=FakeNvml(fail), nvidia_smi=hanging, within_s=0.3)() == ()


@pytest.mark.gpu
def test_this_machines_driver_tells_of_its_devices() -> None:
    if not Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is not loaded here")
    pytest.importorskip("pynvml")
    listed = NvidiaDevices(nvidia_smi=["false"])()
    asked = NvidiaDevices(nvml=FakeNvml(fail))()
    assert listed
    assert [device.names for device in listed] == [device.names for device in asked]
    assert all(device.used_bytes is not None for device in listed)
