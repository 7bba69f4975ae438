"""Memory that the ranks of a host share: an anonymous file (memfd) that each of them maps.

The file has no name in any file system. The rank that creates it passes it on as
/proc/<pid>/fd/<n> and closes it once all ranks have mapped it. The kernel frees the memory when the
last rank has ended, however it ended. Nothing is created before the ranks are forked.

A reader that sees a raised counter also sees what was written before it was raised: an x86-64
processor makes stores visible in their order and executes loads in theirs (Intel SDM 3A, 10.2.2;
AMD APM 2, 7.1), and a counter is one aligned load or store of 8 bytes. Weaker memory models need
fences, which Python does not have: ranks on other processors use gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

SLOT_BYTES: Final = 1 << 20
"""Size of a piece, which is copied at once: half of a core's cache or less."""

SLOTS_A_HALF: Final = 16
"""Slots of each of a stream's two halves, which consecutive messages use in turn. The kernel
allocates a slot when a message first reaches it."""

STREAMS_A_RANK: Final = 3
"""One stream for collectives, which all other ranks read, and two for transfers, each of which one
other rank reads."""

WINDOW_BYTES: Final = 1 << 36
"""Addresses for each rank's window, of which it takes as much memory as it uses."""

_DEPTH: Final = 2 * SLOTS_A_HALF
_COUNTER_WORDS: Final = 16
"""128 bytes: caches fetch lines in pairs, and counters of different writers must not share any."""


def can_share() -> bool:
    """Whether this machine offers everything that sharing memory needs."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    with suppress(OSError):  # a sandbox may forbid these calls
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
        return True
    return False


def host_identity() -> str:
    """Boot, PID namespace and user: the same for processes that can open each other's files."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    return ""


class SharedFile:
    """An anonymous file; the kernel frees it once it is closed and no rank maps it."""

    def __init__(self, num_ranks: int) -> None:
        """Creates a file for a group of this size. Raises OSError if the kernel refused."""
        self.nonce = secrets.randbits(63)
        self._descriptor = os.memfd_create("ranks")  # close-on-exec
        os.ftruncate(self._descriptor, _file_bytes(num_ranks))
        with mmap.mmap(self._descriptor, mmap.PAGESIZE) as header:
            header[:8] = self.nonce.to_bytes(8, sys.byteorder)

    @property
    def place(self) -> tuple[int, int, int]:
        """Process, descriptor and nonce, from which another process can open it."""
        return os.getpid(), self._descriptor, self.nonce

    def close(self) -> None:
        os.close(self._descriptor)


class Region:
    """A mapped file: streams, each with a ring of slots and two counters, and a futex a rank.

    `posted` counts the pieces that the stream's writer has written. `taken` counts the pieces that
    have been read; in collectives, where every rank reads all streams, those that the stream's
    writer has read from every stream.
    """

    def __init__(self, place: tuple[int, int, int], num_ranks: int) -> None:
        """Maps the file of another process, or of this one.

        Raises:
            OSError: there is no such file, or it cannot be opened.
            ValueError: it is a different file.
        """
        process, descriptor, nonce = place
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        header_bytes = _header_bytes(num_ranks)
        try:
            self._mapping = mapping = mmap.mmap(opened, _file_bytes(num_ranks))
        finally:
            os.close(opened)
        self._words = memoryview(mapping).cast("Q")
        if self._words[0] != nonce:
            raise ValueError(f"descriptor {descriptor} of process {process} is another file")
        self._num_streams = STREAMS_A_RANK * num_ranks
        self._windows_at = header_bytes + _slot_bytes(num_ranks)
        self._futexes = [
            _Futex(mapping, 8 * _COUNTER_WORDS * (2 * self._num_streams + 1 + rank))
            for rank in range(num_ranks)
        ]
        slots = memoryview(mapping)[header_bytes : self._windows_at]
        self._bytes = torch.frombuffer(slots, dtype=torch.uint8)
        self._slots: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def arm(self, rank: int) -> None:
        """Announces that this rank will sleep; it must check for progress once more before."""
        self._futexes[rank].armed.value = 1

    def sleep(self, rank: int, at_most_s: float) -> None:
        """Sleeps unless the rank has been woken since `arm`."""
        self._futexes[rank].sleep(at_most_s)

    def wake_others(self, rank: int) -> None:
        """Wakes the other ranks that sleep, after something has been posted or taken."""
        for other, futex in enumerate(self._futexes):
            if futex.armed.value and other != rank:
                futex.wake()

    def posted(self, stream: int) -> int:
        return self._words[(2 * stream + 1) * _COUNTER_WORDS]

    def set_posted(self, stream: int, count: int) -> None:
        self._words[(2 * stream + 1) * _COUNTER_WORDS] = count

    def taken(self, stream: int) -> int:
        return self._words[(2 * stream + 2) * _COUNTER_WORDS]

    def set_taken(self, stream: int, count: int) -> None:
        self._words[(2 * stream + 2) * _COUNTER_WORDS] = count

    def slot(self, stream: int, index: int, dtype: torch.dtype) -> Tensor:
        """A slot of a stream, as elements of this type."""
        slots = self._slots.get(dtype)
        if slots is None:
            whole = self._bytes.view(dtype).view(self._num_streams * _DEPTH, -1)
            slots = self._slots[dtype] = whole.unbind()
        return slots[stream * _DEPTH + index]

    def window(self, rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of a rank that all can read; zeros until it writes it."""
        assert num_elements * dtype.itemsize <= WINDOW_BYTES, "the window reaches into the next one"
        at = self._windows_at + rank * WINDOW_BYTES
        return torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=at)


class _Futex:
    """A futex (man 2 futex), on which one rank sleeps and the others wake it.

    The word is 1 while its owner sleeps. A processor may load the counters before others see that
    word set; then no rank wakes it. Sleeps are therefore short.
    """

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        self.armed = ctypes.c_uint32.from_buffer(mapping, offset)

    def sleep(self, at_most_s: float) -> None:
        timeout = _Timespec(0, int(at_most_s * 1e9))
        _SYSCALL(_SYS_FUTEX, ctypes.byref(self.armed), _WAIT, 1, ctypes.byref(timeout), None, 0)

    def wake(self) -> None:
        self.armed.value = 0
        _SYSCALL(_SYS_FUTEX, ctypes.byref(self.armed), _WAKE, 1, None, None, 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SYSCALL: Final = ctypes.CDLL(None).syscall
_SYS_FUTEX: Final = 202
"""On x86-64."""
_WAIT: Final = 0
_WAKE: Final = 1


def slot_index(message: int, piece: int) -> int:
    """The slot of a message's piece. Consecutive messages use different halves of the ring.

    Small messages therefore use the same two slots again and again, which stay in the cache.
    """
    return message % 2 * SLOTS_A_HALF + piece % SLOTS_A_HALF


def _header_bytes(num_ranks: int) -> int:
    used = 8 * _COUNTER_WORDS * (1 + (2 * STREAMS_A_RANK + 1) * num_ranks)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(num_ranks: int) -> int:
    return _header_bytes(num_ranks) + _slot_bytes(num_ranks) + num_ranks * WINDOW_BYTES


def _slot_bytes(num_ranks: int) -> int:
    return STREAMS_A_RANK * num_ranks * _DEPTH * SLOT_BYTES
