"""Collectives over one axis of the mesh; a group of None is an axis of one rank: nothing to do.

Ranks of one host exchange CPU tensors through the memory that they share, others through gloo, NCCL
or RCCL. Their time is tensor parallel's inside a pass, and elsewhere that of the part that is being taken.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ReduceOp

from workers.trainer.groups import Group
from workers.trainer.lending import start_lending
from workers.trainer.stopwatch import communication


class Pending(Protocol):
    """Communication that is under way."""

    def wait(self) -> Any:
        """Returns once what was received may be read, and what was sent may be written over."""


def all_reduce(tensor: Tensor, group: Group | None) -> None:
    """Sums the tensor over the group, in place."""
    finish(start_all_reduce(tensor, group))


def all_reduce_max(tensor: Tensor, group: Group | None) -> None:
    """Takes the largest of each element over the group, in place."""
    if group is None:
        return
    with communication:
        if group.lane is not None:
            group.lane.start_all_reduce(tensor, "max").wait()
            return
        process_group = group.process_group
        start_lending(dist.all_reduce, tensor, op=ReduceOp.MAX, group=process_group).wait()


def start_all_reduce(tensor: Tensor, group: Group | None) -> Pending | None:
    """Starts summing the tensor over the group, in place; `finish` before reading it."""
    if group is None:
        return None
    with communication:
        if group.lane is not None:
            return group.lane.start_all_reduce(tensor)
        return start_lending(dist.all_reduce, tensor, group=group.process_group)


def start_reduce_scatter(own: Tensor, whole: Tensor, group: Group) -> Pending | None:
    """Starts summing `whole` over the group; each rank's share lands in its `own`."""
    # Newer torch deprecates the old name, older torch does not know the new one.
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with communication:
        if group.lane is not None:
            return group.lane.start_reduce_scatter(own, whole)
        return start_lending(reduce_scatter, own, whole, group=group.process_group)


def start_all_gather(whole: Tensor, own: Tensor, group: Group) -> Pending | None:
    """Starts filling `whole` with every rank's `own`, in the order of the ranks."""
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with communication:
        if group.lane is not None:
            return group.lane.start_all_gather(whole, own)
        return start_lending(all_gather, whole, own, group=group.process_group)


def start_scatter_rows(whole: Tensor, group: Group) -> tuple[Tensor, Pending | None]:
    """Starts summing `whole` over the group, and cutting it; returns this rank's rows of the sum."""
    own = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
    return own, start_reduce_scatter(own, whole, group)


def start_gather_rows(own: Tensor, group: Group) -> tuple[Tensor, Pending | None]:
    """Starts gathering every rank's rows; returns all of them."""
    whole = own.new_empty(own.shape[0] * group.size, *own.shape[1:])
    return whole, start_all_gather(whole, own.contiguous(), group)


def scatter_rows(whole: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum of `whole` over the group."""
    own, work = start_scatter_rows(whole, group)
    finish(work)
    return own


def gather_rows(own: Tensor, group: Group) -> Tensor:
    """The rows of every rank, in the order of the ranks."""
    whole, work = start_gather_rows(own, group)
    finish(work)
    return whole


def finish(work: Pending | None) -> None:
    """Waits for what a `start_` function started."""
    if work is not None:
        with communication:
            work.wait()


def barrier(device: torch.device) -> None:
    """Waits for the device, then for every rank of the job."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()
