"""Trains two steps with DeepSpeed on each exported file, as one of two ranks on gloo; prints JSON.

Arguments: the file in which the ranks meet, the rank, and the exported files.
"""

import json
import sys
from pathlib import Path

import torch
from small_model import ADAM, LAYERS_TO_SHARD, VOCABULARY, SmallModel

meeting, rank, *files = sys.argv[1:]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2
)

import deepspeed  # noqa: E402 - it looks for torch.distributed's group

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # C++, which takes a minute
deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)


def trained(path):
    config = json.loads(Path(path).read_text()) | {"optimizer": ADAM}
    config["tensor_parallel"]["partition_config"] = LAYERS_TO_SHARD
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=SmallModel(), config=config)
    data = torch.Generator().manual_seed(1)  # the ranks of a tp group read the same
    losses = []
    for _ in range(2 * engine.gradient_accumulation_steps()):
        size = (engine.train_micro_batch_size_per_gpu(), 8)
        loss = engine(torch.randint(0, VOCABULARY, size, generator=data))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weight = engine.module.model.layers[0].mlp.up_proj.weight
    return {
        "steps": engine.global_steps,
        "losses": losses,
        "shard": list(getattr(weight, "ds_shape", weight.shape)),
        "zero_stage": int(engine.zero_optimization_stage()),
        "accumulates": str(engine.get_data_types()[1]),
    }


answers = [trained(path) for path in files]
Path(f"{meeting}.{rank}").write_text(json.dumps(answers))
torch.distributed.destroy_process_group()
