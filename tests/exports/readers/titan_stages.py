"""Torch's schedule of an exported pipeline, as torchtitan builds it, on rank 0 of a fake group."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

V_SCHEDULE = "ZBVZeroBubble"
"""The schedule whose rank 0 has the first stage and the last."""


def build_schedule(build, pp, stages_of_rank, name, **arguments):
    """Calls torchtitan's `build` with the stages of one rank of pp; its errors are the caller's."""
    world = {"rank": 0, "world_size": pp}
    torch.distributed.init_process_group("fake", store=FakeStore(), **world)
    try:
        device, num_stages = torch.device("cpu"), pp * stages_of_rank
        own = (0, num_stages - 1) if name == V_SCHEDULE else range(0, num_stages, pp)
        stages = [PipelineStage(nn.Linear(2, 2), index, num_stages, device) for index in own]
        build(stages=stages, loss_fn=nn.MSELoss(), **arguments)
    finally:
        torch.distributed.destroy_process_group()


def check_stages(parts, modules, per_stage, first_less, last_less):
    """Every stage must have as many layers as stated, the first and the last one fewer.

    Nothing is stated of stages that are written out. All must have the model's modules, once.
    """
    assert sorted(name for part in parts for name in part) == sorted(modules), parts
    if per_stage is None:
        return
    layers = [sum(name.startswith("layers.") for name in part) for part in parts]
    stated = [per_stage] * len(parts)
    stated[0] -= first_less
    stated[-1] -= last_less
    assert layers == stated, parts
