#!/bin/bash
# DeepSpeed's bf16 adds up the micro-batches of a step in bf16: many of them lose gradient.
#
# Version: deepspeed 0.19.8, runtime/engine.py, DeepSpeedEngine.get_data_types; torch 2.13.0.
# Behaviour: with {"bf16": {"enabled": true}} and ZeRO 1 or 2, gradients of micro-batches are added
# in bf16 unless data_types.grad_accum_dtype is fp32. A sum stops to grow where a term is less than
# half of its last bit: of 512 equal micro-batches the step sees half of their mean gradient. The
# number of micro-batches is a choice of the layout, so that layouts of one global batch train
# differently.
# Seen: an SGD step at the rate 1 over 512 micro-batches with the gradient 1 changes the weight by
# 0.5, and with grad_accum_dtype fp32 by 1.0.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==84.2.1
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import sys

import deepspeed
import torch

MICROBATCHES = 512
# Its operator for shared memory would be compiled at the start, which takes a compiler; gloo does
# not use it.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")


def change(stage, data_types):
    """What a step changes a weight by, of which each micro-batch has the gradient 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "data_types": data_types,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(MICROBATCHES):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
    return round(1.0 - model.weight.item(), 4)


found = {
    (stage, dtype or "not stated"): change(stage, {"grad_accum_dtype": dtype} if dtype else {})
    for stage in (1, 2)
    for dtype in ("", "fp32")
}
for (stage, dtype), step in found.items():
    print(f"deepspeed {deepspeed.__version__}: ZeRO {stage}, grad_accum_dtype {dtype}: {step}")
torch.distributed.destroy_process_group()
sys.exit(list(found.values()) != [0.5, 1.0, 0.5, 1.0])
PROGRAM
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo timeout 300 \
  "$folder/venv/bin/python" -m torch.distributed.run --standalone "$folder/program.py"
