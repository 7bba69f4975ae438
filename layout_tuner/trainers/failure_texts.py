"""What trainers print when memory runs out, or when another rank has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

OUT_OF_MEMORY: Final = (
    "cuda out of memory",
    "hip out of memory",
    "cuda error: out of memory",
    "hip error: out of memory",
    "outofmemoryerror",
    "cuda failure 2 'out of memory'",
    "cublas_status_alloc_failed",
    "hipblas_status_alloc_failed",
    "cuda_error_out_of_memory",
    "hiperroroutofmemory",
    "resource_exhausted: out of memory",
    "defaultcpuallocator",
    "cannot allocate memory",
    "can't allocate memory",
    "std::bad_alloc",
    "memoryerror",
)
"""Of torch on CUDA, on ROCm and on the CPU, of their libraries, of JAX, C++, Python and the kernel;
in small letters."""

PEER_ENDED: Final = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "gloo connectfullmesh failed",
    "remote process exited",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "application timeout caused pair closure",
    "socket timeout",
    "wait timeout",
    "nccl communicator was aborted",
    "failed to recv, got 0 bytes",
    "timed out waiting",
)
"""Of gloo, NCCL and torch's store: a consequence of another rank's failure."""


def mentions(text: str, texts: Sequence[str]) -> bool:
    """Whether a text contains one of these, in capital or small letters."""
    lowered = text.lower()
    return any(each in lowered for each in texts)
