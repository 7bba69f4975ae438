"""Memory of a rank: what a step really needs, and the limit that it is held to.

On the CPU the exact logical peak: the bytes of every storage that is alive at once, counted in one
iteration that is not timed, since counting slows an iteration several-fold. On a GPU the
allocator's own peak.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.trainer.errors import MemoryLimitExceededError

_SLACK_BYTES: Final = 128 << 20
"""What the allocator and the transport may take beside the tensors before the rank is stopped."""


class LogicalPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages while it is entered; raises as soon as they pass the limit.

    Temporaries inside operators are not seen, except the copy that gloo makes of the output of an
    all-gather.
    """

    def __init__(
        self, existing: Iterable[Tensor], *, limit_bytes: int | None = None, rank: int = 0
    ) -> None:
        """Starts from the storages that exist already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = self._scratch_bytes = 0
        self._limit_bytes, self._rank = limit_bytes, rank
        self.storages: dict[int, weakref.ref[Any]] = {}
        for tensor in existing:
            self._track(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler, two seconds, to say so."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "allgather_base" in func.name():
            self._scratch_bytes += args[0].nbytes
            self._rise(self._scratch_bytes)
        else:
            self._scratch_bytes = 0
        if isinstance(result, Tensor):
            self._track(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self._track(item)
        return result

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return
        num_bytes = storage.nbytes()

        def release(_: Any) -> None:
            del self.storages[key]
            self.live_bytes -= num_bytes

        self.storages[key] = weakref.ref(storage, release)
        self.live_bytes += num_bytes
        self._rise(0)

    def _rise(self, scratch_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + scratch_bytes)
        if self._limit_bytes is not None and self.peak_bytes > self._limit_bytes:
            refuse_over_limit(self.peak_bytes, self._limit_bytes, rank=self._rank, what="a step")


def refuse_over_limit(need_bytes: int, limit_bytes: int, *, rank: int, what: str) -> None:
    """Raises MemoryLimitExceededError if the need is over the limit."""
    if need_bytes > limit_bytes:
        raise MemoryLimitExceededError(
            f"{what} needs at least {need_bytes} bytes on rank {rank}, "
            f"over the limit of {limit_bytes} bytes; "
            "shard more (tp, pp, zero_stage), recompute, or lower micro_batch_size"
        )


def enforce_limit(limit_bytes: int, device: torch.device) -> None:
    """Makes the limit real, so that a layout that is far too large fails before the node suffers.

    On the CPU the kernel refuses private memory beyond what the process has now, the limit and
    some slack (RLIMIT_DATA; Linux counts anonymous mappings since 4.7). Call it once the process
    group is up, whose threads do not survive a refusal while they start.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), device)
        return
    allowed = _data_bytes() + limit_bytes + limit_bytes // 8 + _SLACK_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise MemoryLimitExceededError("/proc/self/status has no VmData; give no memory limit")
