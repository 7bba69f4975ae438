"""Reads exported files as deepspeed.initialize does, and prints the layouts as JSON."""

import json
from pathlib import Path

import torch.distributed
from answers import print_answers
from torch.testing._internal.distributed.fake_pg import FakeStore

# DeepSpeed takes a world of one rank where torch.distributed is not up.
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)

import deepspeed  # noqa: E402 - it looks for torch.distributed's group
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError  # noqa: E402

deepspeed.init_distributed(dist_backend="fake", dist_init_required=False)


class Replicas:
    """Stands for the engine's groups: the data-parallel ranks that are left."""

    def __init__(self, dp):
        self.dp = dp

    def get_data_parallel_world_size(self):
        return self.dp


def layout_of(path, num_devices):
    raw = json.loads(Path(path).read_text())
    tp = raw.get("tensor_parallel", {}).get("autotp_size", 1)
    pp = raw.get("pipeline", {}).get("stages", 1)
    dp = num_devices // (tp * pp)
    config = DeepSpeedConfig(path, mpu=Replicas(dp))
    assert config.world_size == dp
    half = "bf16" if config.bfloat16_config.enabled else "fp16"
    is_half = config.bfloat16_config.enabled or config.float16_config.enabled
    stages = config.pipeline["stages"]
    return {
        "tp": max(config.tensor_parallel_config.autotp_size, 1),
        "pp": 1 if stages == "auto" else stages,
        "ep": config.expert_parallel_config.autoep_size if config.expert_parallel_config else 1,
        "dp": config.train_batch_size
        // (config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps),
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "num_microbatches": config.gradient_accumulation_steps,
        "zero_stage": int(config.zero_optimization_stage),
        "precision": half if is_half else "fp32",
        "recompute_interval": config.pipeline["activation_checkpoint_interval"],
    }


print_answers(layout_of, ValueError, AssertionError, DeepSpeedConfigError)
