"""Starts DeepSpeed's engine with exported files, and prints the layouts as JSON.

It is rank 0 of as many ranks as the job has, in a group whose collectives do nothing. The model is
small, and has the structure that AutoTP, AutoEP and the pipeline look for. The CPU stands for a
device that has fp16.
"""

import importlib
import io
import json
import logging
import os
import sys
from pathlib import Path

import torch
from answers import asked_fields, print_answers
from small_model import ADAM, LAYERS_TO_SHARD, FeedForward, SmallModel
from torch.testing._internal.distributed.fake_pg import FakeStore

# DeepSpeed looks for the group when it is imported, and takes a world of one rank without it.
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.comm import comm  # noqa: E402
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer  # noqa: E402
from deepspeed.pipe import PipelineModule  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfigError  # noqa: E402
from deepspeed.runtime.pipe.topology import (  # noqa: E402
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)

DEGREES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")

# Optimizers import torch's compiler: once here, and not in each fork.
for name in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"):
    importlib.import_module(name)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # C++, which nothing here needs
type(get_accelerator()).is_fp16_supported = lambda _self: True
torch.distributed.destroy_process_group()
os.environ |= {"LOCAL_RANK": "0", "RANK": "0"}


def layout_of(path, num_devices):
    raw = json.loads(Path(path).read_text())
    ep = raw.get("expert_parallel", {}).get("autoep_size", 1)
    pp = raw.get("pipeline", {}).get("stages", 1)
    world = {"rank": 0, "world_size": num_devices}
    torch.distributed.init_process_group("fake", store=FakeStore(), **world)
    comm.cdb = None
    deepspeed.init_distributed(dist_backend="fake", dist_init_required=False)
    if "tensor_parallel" in raw:
        raw["tensor_parallel"]["partition_config"] = LAYERS_TO_SHARD
    model, mpu = SmallModel(has_experts=ep > 1), None
    if words := json.loads(Path(path).with_name("arguments.json").read_text()):
        # As Megatron-DeepSpeed makes the groups.
        tp, pp = (int(words[words.index(flag) + 1]) for flag in DEGREES)
        grid = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=num_devices // (tp * pp))
        if pp == 1:
            mpu = PipelineParallelGrid(topology=grid)
    if pp > 1:
        stages = {"topology": grid} if words else {"num_stages": pp}
        model = PipelineModule([FeedForward() for _ in range(2 * pp)], **stages)
    said = io.StringIO()
    logging.getLogger("DeepSpeed").addHandler(logging.StreamHandler(said))
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config={**raw, "optimizer": ADAM})
    if ep > 1 and not any(isinstance(each, AutoEPMoELayer) for each in engine.module.modules()):
        raise ValueError(said.getvalue())  # it goes on without dividing any experts
    config = engine._config
    half = "bf16" if config.bfloat16_config.enabled else "fp16"
    is_half = config.bfloat16_config.enabled or config.float16_config.enabled
    answer = {
        "tp": engine.autotp_size() or 1,
        "pp": pp,
        "ep": ep,
        "dp": engine.dp_world_size,
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "num_microbatches": engine.gradient_accumulation_steps(),
        "zero_stage": int(engine.zero_optimization_stage()),
        "precision": half if is_half else "fp32",
        "accumulates": str(engine.get_data_types()[1]).removeprefix("torch."),
        "recompute_interval": config.pipeline["activation_checkpoint_interval"],
        **asked_fields(path, config),
    }
    if pp == 1:
        weight = engine.module.model.layers[0].mlp.up_proj.weight
        answer["shard"] = list(getattr(weight, "ds_shape", weight.shape))
    return answer


print_answers(
    layout_of, ValueError, AssertionError, NotImplementedError, DeepSpeedConfigError, forks=True
)
