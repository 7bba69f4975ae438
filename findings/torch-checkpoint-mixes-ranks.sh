#!/bin/bash
# torch.distributed.checkpoint writes one rank's value of each key, and not the same rank's of all.
#
# Version: torch 2.13.0, torch/distributed/checkpoint, dcp.save and dcp.load.
# Behaviour: where ranks save plain tensors or Python values under the same keys, those of one rank
# are written for each key, and the writer changes from key to key to share the work. No warning
# says that the values differed. All ranks then load a mixture, which no rank had saved: shards of
# tensor parallelism that are no DTensors, states of data loaders, seeds.
# Seen: four layers that rank 0 saved as 0 and rank 1 as 1 are loaded by both ranks as 0, 1, 0, 1;
# the loader's position is that of rank 0, the seed that of rank 1.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def state(value, seed):
    layers = {f"layers.{i}.weight": torch.full((4, 4), float(value)) for i in range(4)}
    return {**layers, "loader": {"position": value}, "seed": seed}


def values(saved):
    layers = [saved[f"layers.{i}.weight"].unique().tolist() for i in range(4)]
    return layers, saved["loader"]["position"], saved["seed"]


dist.init_process_group("gloo")
rank = dist.get_rank()
dcp.save(state(rank, rank), checkpoint_id=sys.argv[1])
loaded = state(-1, -1)
dcp.load(loaded, checkpoint_id=sys.argv[1])
every = [None, None]
dist.all_gather_object(every, values(loaded))
if rank == 0:
    for reader, (layers, position, seed) in enumerate(every):
        print(f"torch {torch.__version__}: rank {reader}: {layers}, position {position}, seed {seed}")
dist.destroy_process_group()
layers, position, seed = every[0]
writers = {value for layer in layers for value in layer}
sys.exit(every[0] != every[1] or writers != {0.0, 1.0} or {position, seed} != {0, 1})
PROGRAM
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo timeout 300 \
  "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 \
  "$folder/program.py" "$folder/checkpoint"
