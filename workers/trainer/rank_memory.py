"""Memory of a rank: the peak of a step, and the memory limit.

On the CPU the peak is logical and exact: the bytes of all storages that are alive at the same time.
They are counted in one iteration that is not timed, since counting makes it several times slower.
On a GPU the allocator reports its own peak.
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

from layout_tuner.units import memory
from layout_tuner.workers.trainer.errors import MemoryLimitExceededError

_SLACK_BYTES: Final = 128 << 20
"""Memory beyond the tensors that the allocator and the transport may use under the limit."""


class LogicalPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages while it is entered; raises as soon as they exceed the limit.

    Temporaries inside operators are not counted, except gloo's copy of the output of an all-gather.
    """

    def __init__(
        self, existing: Iterable[Tensor], *, limit_bytes: int | None = None, rank: int = 0
    ) -> None:
        """Counts the storages of the existing tensors first."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = self._scratch_bytes = 0
        self._limit_bytes, self._rank = limit_bytes, rank
        self.storages: dict[int, weakref.ref[Any]] = {}
        for tensor in existing:
            self._track(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """With True torch would import its compiler here, which takes two seconds."""
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
    """Raises MemoryLimitExceededError if `need_bytes` is over the limit."""
    if need_bytes > limit_bytes:
        raise MemoryLimitExceededError(
            f"rank {rank} needs at least {memory(need_bytes)} for {what}, "
            f"{memory(need_bytes - limit_bytes)} over the limit of {memory(limit_bytes)}; "
            "shard more (tp, pp, zero_stage), recompute, or lower micro_batch_size"
        )


def enforce_limit(limit_bytes: int, device: torch.device) -> None:
    """Enforces the limit, so that a layout that is far too large fails before the node runs short.

    On the CPU the kernel refuses private memory beyond the present use, the limit and some slack
    (RLIMIT_DATA, which includes anonymous mappings since Linux 4.7). Call it after the process
    group is initialised: its threads crash if the kernel refuses memory while they start.
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
