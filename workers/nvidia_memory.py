"""NVIDIA's devices and what of their memory is in use, as the driver tells it without a context.

Asked through the management library, in microseconds; `nvidia-smi`, which takes a second on a node of
eight devices, is asked where that can't be loaded. Either may hang with the driver, and is then
left alone: the library in a thread, nvidia-smi in a process.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Final

from workers.device_memory import DeviceUse

NVML: Final = "libnvidia-ml.so.1"
NVIDIA_SMI: Final = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.used",
    "--format=csv,noheader,nounits",
)
_WITHIN_S: Final = 10.0
_UUID_BYTES: Final = 96
_MIB: Final = 1 << 20


class NvidiaDevices:
    """Lists the devices, by whichever way works here. Any thread may call it.

    Args:
        library: the management library.
        nvidia_smi: the command that lists number, UUID and MiB in use.
        within_s: how long the driver may take to answer.
    """

    def __init__(
        self,
        *,
        library: str = NVML,
        nvidia_smi: Sequence[str] = NVIDIA_SMI,
        within_s: float = _WITHIN_S,
    ) -> None:
        self._library_name = library
        self._nvidia_smi = nvidia_smi
        self._within_s = within_s
        self._library: _Library | None = None
        self._hangs = False

    def __call__(self) -> tuple[DeviceUse, ...]:
        """The devices that this process may use; none where nobody tells."""
        if self._hangs:
            return ()
        told: list[tuple[DeviceUse, ...]] = []
        asking = threading.Thread(target=lambda: told.append(self._ask()), daemon=True)
        asking.start()
        asking.join(self._within_s)
        self._hangs = asking.is_alive()  # one thread that waits for a driver is enough
        return told[0] if told else ()

    def _ask(self) -> tuple[DeviceUse, ...]:
        try:
            if self._library is None:
                self._library = _Library(self._library_name)
            return self._library.devices()
        except OSError:
            return _devices_by_command(self._nvidia_smi, self._within_s)


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Library:
    """The management library, initialised for as long as this process lives.

    Raises:
        OSError: it can't be loaded, or says so itself; its methods too.
    """

    def __init__(self, name: str) -> None:
        self._functions = ctypes.CDLL(name)
        self._call("nvmlInit_v2")

    def devices(self) -> tuple[DeviceUse, ...]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(map(self._device, range(count.value)))

    def _device(self, index: int) -> DeviceUse:
        handle, memory = ctypes.c_void_p(), _Memory()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        try:
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        except OSError:  # not supported, where the device shares the host's memory
            return DeviceUse(names=(str(index), uuid.value.decode()), used_bytes=None)
        return DeviceUse(names=(str(index), uuid.value.decode()), used_bytes=memory.used)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._functions, name)(*arguments)
        except AttributeError as error:
            raise OSError(f"NVML has no {name}") from error
        if code != 0:
            raise OSError(f"{name} returned {code}")


def _devices_by_command(command: Sequence[str], within_s: float) -> tuple[DeviceUse, ...]:
    try:
        listed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # not there, or it can't tell
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.stdout.splitlines()]
    return tuple(
        # "[N/A]" where the device shares the host's memory.
        DeviceUse(names=(index, uuid), used_bytes=int(mib) * _MIB if mib.isdecimal() else None)
        for index, uuid, mib in rows
    )
