"""Memory that ranks of one host share: a file without a name, which each of them maps.

It never has a place in any file system: the rank that makes it hands it on as /proc/<pid>/fd/<n>
and closes it once everybody has it, so that the kernel frees it with the last of them, however
that one ends. Nothing is made before the ranks are forked.

What is written before a counter is raised is seen by whoever sees the raised counter: stores of an
x86-64 processor become visible in their order, loads are done in theirs (Intel SDM 3A, 10.2.2; AMD
APM 2, 7.1), and a counter is one aligned load or store of 8 bytes. Weaker memory models promise
neither without fences that Python does not have: ranks on other processors keep to gloo.
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
"""What is copied at once: half of a core's cache or less."""

SLOTS_A_HALF: Final = 16
"""Slots of each of a stream's two halves, which consecutive messages use in turn. Memory that no
message has reached is none."""

STREAMS_A_RANK: Final = 3
"""One that all others read, for collectives, and two that one other reads, for transfers."""

_DEPTH: Final = 2 * SLOTS_A_HALF
_COUNTER_WORDS: Final = 16
"""128 bytes: caches fetch lines in pairs, and counters of different writers share none."""


def can_share() -> bool:
    """Whether this machine has what sharing relies on."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    with suppress(OSError):  # a sandbox may allow no such calls
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
        return True
    return False


def host_identity() -> str:
    """The same for processes that see each other: this boot of this host, and its processes' namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    return ""


class SharedFile:
    """A file that its maker hands on; it is gone when it is closed and no rank maps it."""

    def __init__(self, num_ranks: int) -> None:
        """Makes one for so many ranks.

        Raises:
            OSError: the kernel refuses.
        """
        self.nonce = secrets.randbits(63)
        self._descriptor = os.memfd_create("ranks")  # close-on-exec
        os.ftruncate(self._descriptor, _header_bytes(num_ranks) + _slot_bytes(num_ranks))
        with mmap.mmap(self._descriptor, mmap.PAGESIZE) as header:
            header[:8] = self.nonce.to_bytes(8, sys.byteorder)

    @property
    def place(self) -> tuple[int, int, int]:
        """What another process opens it by: process, descriptor, nonce."""
        return os.getpid(), self._descriptor, self.nonce

    def close(self) -> None:
        os.close(self._descriptor)


class Region:
    """A mapped file: streams, each of a ring of slots and two counters; and a bell for each rank.

    posted: messages' pieces that the stream's writer has written; taken: those that have been read
    (where all ranks read all streams: by the rank whose stream it is, from every stream).
    """

    def __init__(self, place: tuple[int, int, int], num_ranks: int) -> None:
        """Maps the file of another process, or of this one.

        Raises:
            OSError: there is no such file, or it may not be read.
            ValueError: the file is another one.
        """
        process, descriptor, nonce = place
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        header_bytes = _header_bytes(num_ranks)
        try:
            mapping = mmap.mmap(opened, header_bytes + _slot_bytes(num_ranks))
        finally:
            os.close(opened)
        self._words = memoryview(mapping).cast("Q")
        if self._words[0] != nonce:
            raise ValueError(f"descriptor {descriptor} of process {process} is another file")
        self._num_streams = STREAMS_A_RANK * num_ranks
        self._bells = [
            _Bell(mapping, 8 * _COUNTER_WORDS * (2 * self._num_streams + 1 + rank))
            for rank in range(num_ranks)
        ]
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)[header_bytes:]
        self._slots: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def arm(self, rank: int) -> None:
        """This rank says that it is about to sleep; it looks once more before it does."""
        self._bells[rank].armed.value = 1

    def sleep(self, rank: int, at_most_s: float) -> None:
        """Sleeps unless it has been woken since it armed its bell."""
        self._bells[rank].sleep(at_most_s)

    def wake_others(self, rank: int) -> None:
        """Wakes those of the others that sleep, for something has been posted or taken."""
        for other, bell in enumerate(self._bells):
            if bell.armed.value and other != rank:
                bell.ring()

    def posted(self, stream: int) -> int:
        return self._words[(2 * stream + 1) * _COUNTER_WORDS]

    def set_posted(self, stream: int, count: int) -> None:
        self._words[(2 * stream + 1) * _COUNTER_WORDS] = count

    def taken(self, stream: int) -> int:
        return self._words[(2 * stream + 2) * _COUNTER_WORDS]

    def set_taken(self, stream: int, count: int) -> None:
        self._words[(2 * stream + 2) * _COUNTER_WORDS] = count

    def slot(self, stream: int, index: int, dtype: torch.dtype) -> Tensor:
        """One of the slots of a stream, as elements of this type."""
        slots = self._slots.get(dtype)
        if slots is None:
            whole = self._bytes.view(dtype).view(self._num_streams * _DEPTH, -1)
            slots = self._slots[dtype] = whole.unbind()
        return slots[stream * _DEPTH + index]


class _Bell:
    """A futex (man 2 futex): a sleeper costs nothing, and is woken at once.

    The word says that its owner sleeps. A processor may look for news before others see that word
    set, and then nobody wakes it: sleeps are short.
    """

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        self.armed = ctypes.c_uint32.from_buffer(mapping, offset)

    def sleep(self, at_most_s: float) -> None:
        timeout = _Timespec(0, int(at_most_s * 1e9))
        _FUTEX(_SYS_FUTEX, ctypes.byref(self.armed), _WAIT, 1, ctypes.byref(timeout), None, 0)

    def ring(self) -> None:
        self.armed.value = 0
        _FUTEX(_SYS_FUTEX, ctypes.byref(self.armed), _WAKE, 1, None, None, 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_FUTEX: Final = ctypes.CDLL(None).syscall
_SYS_FUTEX: Final = 202
"""On x86-64."""
_WAIT: Final = 0
_WAKE: Final = 1


def slot_index(message: int, piece: int) -> int:
    """Where a piece of a message lies: consecutive messages are in different halves of the ring.

    Small ones thus use the same two slots over and over, which stay in the cache.
    """
    return message % 2 * SLOTS_A_HALF + piece % SLOTS_A_HALF


def _header_bytes(num_ranks: int) -> int:
    used = 8 * _COUNTER_WORDS * (1 + (2 * STREAMS_A_RANK + 1) * num_ranks)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _slot_bytes(num_ranks: int) -> int:
    return STREAMS_A_RANK * num_ranks * _DEPTH * SLOT_BYTES
