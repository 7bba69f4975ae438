#!/bin/bash
# DeepSpeed's train_batch_size counts the ranks of tensor parallelism as replicas.
#
# Version: deepspeed 0.19.8, runtime/config.py, DeepSpeedConfig.__init__; torch 2.13.0.
# Behaviour: with tensor_parallel.autotp_size and without an mpu, the check of the batch divides by
# all ranks. Two ranks with autotp_size 2 take the same 2 * 2 sequences a step, and the engine
# refuses train_batch_size 4. Without the key it sets 8.
# Seen: "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu *
# gradient_acc_step * world_size 4 != 2 * 2 * 2".
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==84.2.1
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import sys
from datetime import timedelta

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig

# Its operator for shared memory would be compiled at the start, which takes a compiler; gloo does
# not use it.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "tensor_parallel": {"autotp_size": 2},
}


def answer(**stated):
    try:
        return str(DeepSpeedConfig({**config, **stated}).train_batch_size)
    except AssertionError as error:
        return str(error)


found = answer(), answer(train_batch_size=4), answer(train_batch_size=8)
if torch.distributed.get_rank() == 0:
    print(f"deepspeed {deepspeed.__version__}: without the key {found[0]}; 4: {found[1]}; 8: {found[2]}")
torch.distributed.destroy_process_group()
sys.exit((found[0], found[2]) != ("8", "8") or "4 != 2 * 2 * 2" not in found[1])
PROGRAM
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo timeout 300 \
  "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/program.py"
