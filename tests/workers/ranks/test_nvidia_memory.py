"""NVIDIA's devices, listed by a stand-in for the management library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from layout_tuner.workers.ranks.memory_watch import NvidiaDevices


class NVMLError(Exception):
    """Raised by every function that fails."""


def memory_of(handle: int) -> SimpleNamespace:
    if handle == 2:
        raise NVMLError("not supported")
    return SimpleNamespace(used=5 << 30)


def fake_nvml(init: Callable[[], object] = lambda: None) -> SimpleNamespace:
    """The functions of the management library that are called, with three devices."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=memory_of,
    )


def fail() -> None:
    raise NVMLError("the library was not found")


def test_the_library_tells_number_uuid_and_bytes() -> None:
    devices = NvidiaDevices(nvml=fake_nvml())
    for _ in range(2):
        assert [(device.names, device.used_bytes) for device in devices()] == [
            (("0", "GPU-0"), 5 << 30),
            (("1", "GPU-1"), 5 << 30),
            (("2", "GPU-2"), None),
        ]


def test_without_a_driver_nothing_is_listed() -> None:
    assert NvidiaDevices(nvml=fake_nvml(fail))() == ()
    if Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is loaded here")
    pytest.importorskip("pynvml")
    assert NvidiaDevices()() == ()


def test_a_driver_that_hangs_is_asked_once_and_holds_nobody_up() -> None:
    calls: list[str] = []
    release = threading.Event()

    def hang() -> None:
        calls.append("nvmlInit")
        release.wait()

    devices = NvidiaDevices(nvml=fake_nvml(hang), within_s=0.3)
    try:
        assert devices() == ()
        assert devices() == ()
        assert calls == ["nvmlInit"]
    finally:
        release.set()


@pytest.mark.gpu
def test_this_machines_driver_tells_of_its_devices() -> None:
    if not Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is not loaded here")
    pytest.importorskip("pynvml")
    listed = NvidiaDevices()()
    assert listed
    assert all(device.used_bytes is not None for device in listed)
